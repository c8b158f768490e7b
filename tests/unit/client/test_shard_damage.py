"""Shards that are not as they should be: cut, flipped, forged. Nothing wrong is ever read as right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.making import hand_made, make_meta, make_sample, make_samples

from taphouse.errors import (
    ChecksumMismatch,
    MalformedShard,
    NotInStore,
    ShardError,
    TruncatedShard,
    UnsupportedShard,
)
from taphouse.shards import Shard, encode_shard, open_shard, verify_shard

SAMPLES = make_samples(3)
BODY = encode_shard(SAMPLES, make_meta())
WIDE_SAMPLES = make_samples(2, "float32")
WIDE_BODY = encode_shard(WIDE_SAMPLES, make_meta("float32"))
HEADER_END = 8 + int.from_bytes(BODY[:8], "little")


def test_every_truncation_is_refused_at_once() -> None:
    for length in range(len(BODY)):
        with pytest.raises((TruncatedShard, MalformedShard)):
            open_shard(BODY[:length])


@pytest.mark.parametrize("length", [0, 7, 8, HEADER_END - 1, HEADER_END, HEADER_END + 1, len(BODY) - 1])
def test_a_truncated_file_is_refused_and_named(length: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(BODY[:length])
    with pytest.raises(TruncatedShard, match=r"cut\.safetensors"):
        open_shard(path)
    report = verify_shard(path)
    assert (report.ok, report.kind) == (False, "TruncatedShard")


def test_bytes_too_many_are_refused() -> None:
    with pytest.raises(TruncatedShard):
        open_shard(BODY + b"\0")


def test_a_file_that_shrinks_while_open_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(BODY)
    with open_shard(path) as shard:
        with path.open("r+b") as file:
            file.truncate(len(BODY) - 10)
        with pytest.raises(TruncatedShard, match="sample-2"):
            shard[2]
        assert shard[0].equals(SAMPLES[0])


@settings(max_examples=400, deadline=None)
@given(
    region=st.sampled_from(["length", "header", "blobs", "anywhere"]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    wide=st.booleans(),
)
def test_a_flipped_bit_is_refused_or_harmless(region: str, place: float, bit: int, wide: bool) -> None:
    body, samples = (WIDE_BODY, WIDE_SAMPLES) if wide else (BODY, SAMPLES)
    end = 8 + int.from_bytes(body[:8], "little")
    first, last = {"length": (0, 8), "header": (8, end), "blobs": (end, len(body))}.get(
        region, (0, len(body))
    )
    broken = bytearray(body)
    broken[first + int(place * (last - first))] ^= 1 << bit
    _refused_or_equal(bytes(broken), samples)


def test_every_byte_of_the_header_matters() -> None:
    """Flip one bit of every byte before the blobs; the padding's spaces too."""
    for position in range(HEADER_END):
        broken = bytearray(BODY)
        broken[position] ^= 1 << (position % 8)
        with pytest.raises(ShardError):
            open_shard(bytes(broken))


@settings(max_examples=200, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(BODY) - 1), st.binary(max_size=8)), min_size=1, max_size=4)
)
def test_overwritten_bytes_are_refused_or_harmless(edits: list[tuple[int, bytes]]) -> None:
    broken = bytearray(BODY)
    for position, data in edits:
        broken[position : position + len(data)] = data
    _refused_or_equal(bytes(broken), SAMPLES)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    for body in (data, len(data).to_bytes(8, "little") + data):
        with pytest.raises(ShardError):
            open_shard(body)


def _refused_or_equal(body: bytes, samples: list[Any]) -> None:
    """A reader raises `ShardError` for the shard or for some samples; all it does return is right."""
    report = verify_shard(body)
    try:
        shard = open_shard(body)
    except ShardError:
        assert report.problem is not None
        return
    assert len(shard) == len(samples)
    bad = {finding.index for finding in report.bad}
    for index, sample in enumerate(samples):
        if index in bad:
            with pytest.raises(ShardError):
                shard[index]
        else:
            assert shard[index].equals(sample)


def test_one_corrupt_sample_names_itself_and_the_others_are_read(tmp_path: Path) -> None:
    broken = bytearray(BODY)
    broken[-1] ^= 1  # in the last sample's states
    path = tmp_path / "a.safetensors"
    path.write_bytes(broken)
    shard = open_shard(path)
    with pytest.raises(ChecksumMismatch) as caught:
        shard[2]
    error = caught.value
    assert (error.index, error.sample, error.tensor) == (2, "sample-2", "hidden_states")
    assert error.source == str(path)
    assert str(error).startswith(f"{path}: sample 2 'sample-2': hidden_states: ")
    assert "run its batch again" in str(error)
    assert shard[0].equals(SAMPLES[0])
    assert shard[1].equals(SAMPLES[1])
    report = verify_shard(path)
    assert (report.samples, report.good, report.ok) == (3, 2, False)
    assert report.bad[0].id == "sample-2"


def test_without_verification_the_damage_is_read_as_it_is() -> None:
    broken = bytearray(BODY)
    broken[-1] ^= 1
    assert not Shard.from_bytes(bytes(broken), verify=False)[2].equals(SAMPLES[2])


def test_a_file_that_is_not_there_is_no_shard_error(tmp_path: Path) -> None:
    with pytest.raises(NotInStore):
        open_shard(tmp_path / "none.safetensors")


@pytest.mark.parametrize("body", [b"", b"<html><body>502 Bad Gateway</body></html>", b"{}", b"\0" * 64])
def test_what_is_no_shard_at_all_is_refused(body: bytes) -> None:
    with pytest.raises((MalformedShard, TruncatedShard)):
        open_shard(body)


def _container(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("entries", "data"),
    [
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "U8", "shape": [4, 1], "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}, b"1234"),
        ({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [4, 0]}}, b"1234"),
        ({"a": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]}}, b"1234"),
        ({"a": {"dtype": "U8", "shape": [1.5], "data_offsets": [0, 1.5]}}, b"1234"),
        ({"a": 1}, b""),
        ({"__metadata__": {"format": 1}}, b""),
        ({"__metadata__": []}, b""),
        (
            {
                "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
                "b": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]},
            },
            b"1234",
        ),
    ],
)
def test_a_container_that_contradicts_itself_is_refused(entries: dict[str, Any], data: bytes) -> None:
    with pytest.raises(MalformedShard):
        open_shard(_container(entries, data))


def test_a_deeply_nested_header_is_refused() -> None:
    text = b"[" * 200_000
    with pytest.raises(MalformedShard):
        open_shard(len(text).to_bytes(8, "little") + text)


def test_a_header_length_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(1 << 41)
    with pytest.raises(MalformedShard, match="header of 1099511627776 bytes"):
        open_shard(path)


def _tensor(name: str = "hidden_states", **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["samples"][1]["tensors"][name].update(fields)


def _sample(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["samples"][1].update(fields)


def _top(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update(fields)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_top(codec="lz5"), "codec 'lz5'"),
        (_top(dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn'"),
        (_top(transposed=True), "unknown field 'transposed'"),
        (_tensor(codec="lz5"), "codec 'lz5'"),
        (_tensor(dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn'"),
        (_tensor("token_ids", dtype="int64"), "dtype 'int64'"),
        (_tensor(scale=2.0), "unknown field 'samples.1.tensors.hidden_states.scale'"),
    ],
)
def test_what_a_newer_version_may_write_is_refused_with_advice(
    edit: Callable[[dict[str, Any]], None], problem: str
) -> None:
    with pytest.raises(UnsupportedShard, match=problem) as caught:
        open_shard(hand_made(SAMPLES, edit=edit))
    assert "newer taphouse" in caught.value.advice


def test_another_version_or_format_is_refused() -> None:
    with pytest.raises(UnsupportedShard, match=r"version '2'.*newer taphouse"):
        open_shard(hand_made(SAMPLES, metadata={"version": "2"}))
    with pytest.raises(MalformedShard, match="format is 'pt'"):
        open_shard(hand_made(SAMPLES, metadata={"format": "pt"}))
    with pytest.raises(ChecksumMismatch, match="header"):
        open_shard(hand_made(SAMPLES, metadata={"header_sha256": "0" * 64}))


@pytest.mark.parametrize(
    "edit",
    [
        _top(layers=[1, 3]),
        _top(layers=[1, 3, 3]),
        _top(num_layers=5),
        _top(hidden_size=8),
        _top(dtype="float16"),
        _top(fingerprint_id="0" * 32),
        _top(samples=[]),
        _top(batch=-1),
        _top(job_id="a/../b"),
        lambda header: header.pop("samples"),
        lambda header: header["samples"].pop(),
        lambda header: header["samples"].append(header["samples"][0]),
        lambda header: header["samples"][1]["tensors"].pop("loss_mask"),
        lambda header: header["samples"][1]["tensors"].update(x=header["samples"][1]["tensors"]["loss_mask"]),
        _sample(id="sample-0"),
        _sample(id=""),
        _sample(id="a\nb"),
        _sample(tokens=0),
        _sample(tokens=4),
        _sample(tokens=6),
        _sample(tokens="5"),
        _sample(prompt_len=6),
        _sample(prompt_len=0),
        _sample(next_token_id=-1),
        _sample(finish_reason=3),
        _tensor(shape=[5, 3, 15]),
        _tensor(shape=[5, 3 * 16]),
        _tensor(shape=[10**9, 10**9, 10**9]),
        _tensor(shape=[-5, -3, 16]),
        _tensor(bytes=479),
        _tensor(raw_bytes=481),
        _tensor(sha256="x"),
        _tensor(codec="planes-zstd1"),
        _tensor(codec="planes-zstd1", planes=[240]),
        _tensor(codec="planes-zstd1", planes=[241, 239]),
        _tensor(codec="planes-zstd1", planes=[480, 0]),
        _tensor(codec="planes-zstd1", planes=[-1, 481]),
        _tensor(planes=[240, 240]),
        _tensor("loss_mask", dtype="int32"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(edit: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(MalformedShard):
        open_shard(hand_made(SAMPLES, edit=edit))


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("token_ids", np.array([3, 1, 4, -1, 5], np.int32), "token 3 is negative"),
        ("loss_mask", np.array([0, 1, 255, 1, 0], np.uint8), "position 2 is not 0 or 1"),
    ],
)
def test_values_no_capture_gives_are_refused_by_verify(name: str, values: np.ndarray, problem: str) -> None:
    report = verify_shard(hand_made([make_sample(0), make_sample(1, **{name: values})]))
    assert [(f.index, f.tensor) for f in report.bad] == [(1, name)]
    assert problem in report.bad[0].problem


def test_a_swapped_pair_of_blobs_is_noticed() -> None:
    samples = [make_sample(0), make_sample(1)]
    swapped = {
        "000000.hidden_states": samples[1].hidden_states.tobytes(),
        "000001.hidden_states": samples[0].hidden_states.tobytes(),
    }
    report = verify_shard(hand_made(samples, blobs=swapped))
    assert [f.kind for f in report.bad] == ["ChecksumMismatch"] * 2


RAW = SAMPLES[0].hidden_states.tobytes()


def _frame(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def _with_frame(frame: bytes, **fields: Any) -> bytes:
    def edit(header: dict[str, Any]) -> None:
        values = {"codec": "raw-zstd", "bytes": len(frame)} | fields
        header["samples"][0]["tensors"]["hidden_states"].update(values)

    return hand_made(SAMPLES[:1], edit=edit, blobs={"000000.hidden_states": frame})


def test_a_frame_made_elsewhere_is_read() -> None:
    assert open_shard(_with_frame(_frame(RAW, level=19, write_checksum=True)))[0].equals(SAMPLES[0])


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(_frame(RAW, write_content_size=False), id="no content size"),
        pytest.param(_frame(RAW[:100]) + _frame(RAW[100:]), id="two frames"),
        pytest.param(_frame(RAW) + _frame(b""), id="an empty frame after it"),
        pytest.param(_frame(RAW) + b"\0", id="a byte after it"),
        pytest.param(b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + _frame(RAW), id="a skippable frame before it"),
        pytest.param(_frame(RAW)[:-1], id="cut"),
        pytest.param(_frame(RAW[:-2]), id="too little"),
        pytest.param(_frame(b"\1" * (1 << 28)), id="a bomb"),
        pytest.param(b"not zstd", id="no zstd"),
    ],
)
def test_a_frame_that_is_not_exactly_the_tensor_is_refused(frame: bytes) -> None:
    with pytest.raises((MalformedShard, ChecksumMismatch), match="hidden_states"):
        open_shard(_with_frame(frame))[0]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"raw_bytes": len(RAW) - 2}, f"raw_bytes {len(RAW) - 2} where {len(RAW)} are due"),
        ({"bytes": 5}, "bytes where the header says 5"),
        ({"codec": "stored"}, f"are stored where {len(RAW)} are due"),
    ],
)
def test_sizes_that_do_not_agree_are_refused_at_once(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(MalformedShard, match=problem):
        open_shard(_with_frame(_frame(RAW), **fields))


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    frame = bytearray(_frame(b"\1" * (1 << 20)))
    honest = len(RAW)
    assert frame[4] & 0xC0 == 0x80  # a four-byte content size follows
    start = 5 if frame[4] & 0x20 else 6
    frame[start : start + 4] = honest.to_bytes(4, "little")
    with pytest.raises((MalformedShard, ChecksumMismatch)):
        open_shard(_with_frame(bytes(frame)))[0]


def test_a_sample_over_the_readers_limit_is_refused_before_it_is_decoded() -> None:
    shard = open_shard(BODY, max_sample_bytes=SAMPLES[1].raw_bytes)
    assert shard[1].equals(SAMPLES[1])
    with pytest.raises(MalformedShard, match="the limit is"):
        shard[2]
