"""Files made by hand as FORMAT.md describes them, read by the code it describes."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.client.making import make_states

from taphouse.shards import header as shard_header
from taphouse.slices import Trailer, join_slices, parse_stream, read_slice

FORMAT_MD = Path(__file__).parents[3] / "FORMAT.md"


def write_slice(path: Path, payload: np.ndarray, **fields: Any) -> None:
    """One slice, by the table."""
    raw, ids = payload.tobytes(), np.arange(len(payload), dtype="<i4").tobytes()
    trailer = {
        "version": 2,
        "tag": "ab" * 16,
        "start_id": "s",
        "tap_version": "0",
        "tp_rank": 0,
        "tp_size": 2,
        "dp_rank": 0,
        "layers": [1, 3, 6],
        "dtype": "bfloat16",
        "hidden_size": 16,
        "column_offset": 0,
        "width": 8,
        "rows": len(payload),
        "prompt_len": 4,
        "weights_epoch": 0,
        "checksum": {
            "algorithm": "crc32-4MiB",
            "payload": zlib.crc32(struct.pack("<I", zlib.crc32(raw))),
            "token_ids": zlib.crc32(ids),
        },
        "error": None,
    }
    text = json.dumps(trailer | fields).encode()
    path.write_bytes(raw + ids + text + struct.pack("<II", len(text), zlib.crc32(text)) + b"TAPSLIC1")


def test_slices_made_by_hand_are_read_and_joined(tmp_path: Path) -> None:
    states = make_states((5, 3, 16), "bfloat16")
    paths = [tmp_path / f"{'ab' * 16}.t{rank}.slice" for rank in (0, 1)]
    write_slice(paths[0], states[:, :, :8])
    write_slice(paths[1], states[:, :, 8:], tp_rank=1, column_offset=8)
    trailer, payload = read_slice(paths[1])
    assert isinstance(trailer, Trailer)
    assert (trailer.rows, trailer.column_offset, trailer.prompt_len) == (5, 8, 4)
    np.testing.assert_array_equal(payload, states[:, :, 8:])
    np.testing.assert_array_equal(join_slices(paths, range(4), [6, 1]), states[:4, [2, 0]])


def test_a_stream_body_made_by_hand_is_parsed() -> None:
    states = [make_states((2, 3, 16), "bfloat16", seed) for seed in (1, 2)]
    raw = [array.tobytes() for array in states]
    items = [
        {
            "index": n,
            "shape": [2, 3, 16],
            "offset": n * len(raw[0]),
            "bytes": len(data),
            "crc32": zlib.crc32(data),
        }
        for n, data in enumerate(raw)
    ]
    text = json.dumps({"dtype": "bfloat16", "data": items}).encode()
    body = struct.pack("<II", len(text), zlib.crc32(text)) + text + b"".join(raw) + b"TAPSTRM1"
    for got, given in zip(parse_stream(body).states, states, strict=True):
        assert got is not None
        np.testing.assert_array_equal(got, given)


@pytest.mark.parametrize(
    "model",
    [
        shard_header.ShardHeader,
        shard_header.SampleInfo,
        shard_header.TensorInfo,
        shard_header.WitnessInfo,
    ],
    ids=lambda m: m.__name__,
)
def test_every_header_field_is_in_format_md(model: Any) -> None:
    text = FORMAT_MD.read_text()
    assert [name for name in model.model_fields if f"`{name}`" not in text] == []


def test_the_limits_in_format_md_are_the_codes() -> None:
    text = FORMAT_MD.read_text()
    for limit in (
        shard_header.MAX_SAMPLES,
        shard_header.MAX_TOKENS,
        shard_header.MAX_LAYERS,
        shard_header.MAX_HIDDEN_SIZE,
        64 << 20,
    ):
        assert f"{limit:,}" in text
