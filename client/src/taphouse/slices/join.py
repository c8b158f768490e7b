"""Joins the slices of all TP ranks into one capture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CaptureFailed, MissingRows, SlicesDisagree
from .files import RAW_DTYPES, Trailer, read_slice, read_trailer

_SAME = (
    "tag",
    "start_id",
    "tap_version",
    "tp_size",
    "dp_rank",
    "layers",
    "dtype",
    "hidden_size",
    "prompt_len",
)


def check_slices(paths: Sequence[str | os.PathLike[str]]) -> list[Trailer]:
    """Read the trailers of one capture's slices and check that together they are the whole of it.

    Raises `CaptureFailed` if a rank sealed an error, `SlicesDisagree` if ranks are missing or differ, and the
    `BadSlice` errors. Returns the trailers in the order of `paths`.
    """
    if not paths:
        raise SlicesDisagree("no slices given")
    trailers = [read_trailer(path) for path in paths]
    for path, trailer in zip(paths, trailers, strict=True):
        if trailer.error is not None:
            raise CaptureFailed(f"rank {trailer.tp_rank}: {trailer.error}")
        for name in _SAME:
            if getattr(trailer, name) != getattr(trailers[0], name):
                raise SlicesDisagree(
                    f"{path}: {name} is {getattr(trailer, name)!r}, rank {trailers[0].tp_rank} has "
                    f"{getattr(trailers[0], name)!r}"
                )
    first = trailers[0]
    if sorted(t.tp_rank for t in trailers) != list(range(first.tp_size)):
        raise SlicesDisagree(f"ranks {sorted(t.tp_rank for t in trailers)} of {first.tp_size} are there")
    at = 0
    for trailer in sorted(trailers, key=lambda t: t.column_offset):
        if trailer.column_offset != at or trailer.width <= 0:
            raise SlicesDisagree(f"columns from {at} on are missing or doubled (rank {trailer.tp_rank})")
        at += trailer.width
    if at != first.hidden_size:
        raise SlicesDisagree(f"the ranks hold {at} columns of {first.hidden_size}")
    return trailers


def join_slices(
    paths: Sequence[str | os.PathLike[str]],
    rows: int,
    layers: Sequence[int] | None = None,
    *,
    verify: bool = True,
) -> NDArray[Any]:
    """Join all ranks' slices into [rows, L, H] raw elements (bf16 as uint16), little endian.

    `layers` selects and orders layer ids (None = all, as tapped). Surplus rows are cut. Raises what
    `check_slices` and `read_slice` raise, `MissingRows` for too few rows, `SlicesDisagree` for a layer that
    was not tapped.
    """
    trailers = check_slices(paths)
    first = trailers[0]
    wanted = first.layers if layers is None else tuple(layers)
    unknown = [i for i in wanted if i not in first.layers]
    if unknown:
        raise SlicesDisagree(f"layers {unknown} are not in the slices, which hold {list(first.layers)}")
    short = [t for t in trailers if t.rows < rows]
    if short:
        raise MissingRows(f"rank {short[0].tp_rank} holds {short[0].rows} rows, {rows} are needed")
    index = [first.layers.index(i) for i in wanted]
    joined = np.empty((rows, len(wanted), first.hidden_size), RAW_DTYPES[first.dtype])
    for path in paths:
        trailer, part = read_slice(path, rows=rows, verify=verify)
        columns = slice(trailer.column_offset, trailer.column_offset + trailer.width)
        for to, source in enumerate(index):
            joined[:, to, columns] = part[:, source]
    return joined
