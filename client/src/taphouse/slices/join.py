"""Joins the slices of all TP ranks into one capture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import CaptureFailed, MissingRows, NoRoom, SlicesDisagree, WrongTokens
from .files import RAW_DTYPES, Trailer, read_rows, read_slice, read_token_ids, read_trailer

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
    "weights_epoch",
    "rows",
    "token_crc32",
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
            kind = NoRoom if trailer.retry else CaptureFailed
            raise kind(f"rank {trailer.tp_rank}: {trailer.error}")
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


def check_token_ids(paths: Sequence[str | os.PathLike[str]], token_ids: ArrayLike) -> None:
    """Check that rows 0 to T - 1 of a capture that `check_slices` passed are of `token_ids` [T].

    One slice is read: the others hold the same ids, by their checksum. Raises `MissingRows` for fewer rows,
    `WrongTokens` for other tokens, and the `BadSlice` errors.
    """
    wanted = np.asarray(token_ids)
    if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
        raise ValueError(
            f"token_ids must be the integer ids [T] of the rows, got {wanted.dtype} {wanted.shape}"
        )
    fed = read_token_ids(paths[0])
    if len(fed) < len(wanted):
        raise MissingRows(f"{paths[0]} holds {len(fed)} rows, {len(wanted)} are needed")
    wrong = np.flatnonzero(fed[: len(wanted)] != wanted)
    if len(wrong):
        row = int(wrong[0])
        raise WrongTokens(
            f"{paths[0]}: row {row} is of token {fed[row]}, the sequence has {wanted[row]} there "
            f"({len(wrong)} of {len(wanted)} rows differ): these are another request's rows"
        )


def join_slices(
    paths: Sequence[str | os.PathLike[str]],
    token_ids: ArrayLike,
    layers: Sequence[int] | None = None,
    *,
    verify: bool = True,
) -> NDArray[Any]:
    """Join all ranks' slices into [T, L, H] raw elements (bf16 as uint16), little endian.

    `token_ids` [T] are the tokens that the model was fed: they say how many rows are wanted (surplus is cut)
    and must be those that the graph recorded beside the rows. `layers` selects and orders layer ids (None =
    all, as tapped). `verify` checks the checksums of the whole payloads. Raises what `check_slices`,
    `check_token_ids` and `read_slice` raise, and `SlicesDisagree` for a layer that was not tapped.
    """
    trailers = check_slices(paths)
    rows = np.asarray(token_ids).size
    check_token_ids(paths, token_ids)
    return _joined(paths, trailers, layers, lambda path: read_slice(path, rows=rows, verify=verify)[1])


def join_rows(
    paths: Sequence[str | os.PathLike[str]], first: int, count: int, layers: Sequence[int]
) -> NDArray[Any]:
    """Join rows [first, first + count) alone into [count, L, H], without reading the rest.

    No checksum covers them. Raises what `check_slices` raises, `MissingRows`, and `SlicesDisagree` for a
    layer that was not tapped.
    """
    return _joined(paths, check_slices(paths), layers, lambda path: read_rows(path, first, count))


def _joined(
    paths: Sequence[str | os.PathLike[str]],
    trailers: Sequence[Trailer],
    layers: Sequence[int] | None,
    read: Callable[[str | os.PathLike[str]], NDArray[Any]],
) -> NDArray[Any]:
    first = trailers[0]
    wanted = first.layers if layers is None else tuple(layers)
    unknown = [i for i in wanted if i not in first.layers]
    if unknown:
        raise SlicesDisagree(f"layers {unknown} are not in the slices, which hold {list(first.layers)}")
    index = [first.layers.index(i) for i in wanted]
    joined: NDArray[Any] | None = None
    for path, trailer in zip(paths, trailers, strict=True):
        part = read(path)
        if joined is None:
            joined = np.empty((len(part), len(wanted), first.hidden_size), RAW_DTYPES[first.dtype])
        columns = slice(trailer.column_offset, trailer.column_offset + trailer.width)
        for to, source in enumerate(index):
            joined[:, to, columns] = part[:, source]
    assert joined is not None
    return joined
