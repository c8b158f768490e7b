"""Slice files: round trips, damage, full file systems, joining of ranks."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taphouse.slices import (
    RAW_DTYPES,
    BadSlice,
    CaptureFailed,
    ChecksumMismatch,
    DirectoryFull,
    MissingRows,
    SlicesDisagree,
    SliceWriter,
    Trailer,
    TruncatedSlice,
    UnsupportedSlice,
    WrongTokens,
    files,
    join_rows,
    join_slices,
    read_slice,
    read_token_ids,
    read_trailer,
    seal_error,
)

TAG = "0123456789abcdef" * 2


def trailer(rank: int = 0, size: int = 1, hidden: int = 8, dtype: str = "bfloat16") -> Trailer:
    width = hidden // size
    return Trailer(
        tag=TAG,
        start_id="ab123",
        tap_version="0",
        tp_rank=rank,
        tp_size=size,
        dp_rank=0,
        layers=(0, 3, 5),
        dtype=dtype,
        hidden_size=hidden,
        column_offset=rank * width,
        width=width,
        rows=0,
        prompt_len=2,
        weights_epoch=0,
        crc32=0,
        token_crc32=0,
    )


def states(rows: int, hidden: int = 8, dtype: str = "bfloat16", seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(
        0, 256, rows * 3 * hidden * RAW_DTYPES[dtype].itemsize, np.uint8
    )
    return raw.view(RAW_DTYPES[dtype]).reshape(rows, 3, hidden)


def tokens(rows: int) -> np.ndarray:
    """Token ids [rows] that every slice of these tests was fed."""
    return np.arange(100, 100 + rows)


def claim(directory: Path) -> None:
    (directory / f"{TAG}.claim").write_text("{}")


def seal_all(directory: Path, data: np.ndarray, size: int = 1, dtype: str = "bfloat16") -> list[Path]:
    claim(directory)
    paths = []
    for rank in range(size):
        t = trailer(rank, size, data.shape[2], dtype)
        writer = SliceWriter(directory, t, len(data))
        writer.write(0, np.ascontiguousarray(data[:, :, t.column_offset : t.column_offset + t.width]))
        assert writer.seal(tokens(len(data))) is not None
        paths.append(writer.final)
    return paths


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", sorted(RAW_DTYPES))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_join_to_what_was_written(tmp_path: Path, dtype: str, size: int) -> None:
    data = states(7, dtype=dtype)
    paths = seal_all(tmp_path, data, size, dtype)
    assert same(join_slices(paths, tokens(7)), data)
    assert same(join_slices(paths[::-1], tokens(5), layers=[5, 0]), np.ascontiguousarray(data[:5, [2, 0]]))
    assert not list(tmp_path.glob("*.part"))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_chunks_in_any_order_give_the_same_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = data.draw(st.integers(1, 30))
    kept = data.draw(st.integers(1, rows))
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=6))})
    chunks = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    array = states(rows, seed=rows)
    directory = tmp_path_factory.mktemp("slices")
    claim(directory)
    writer = SliceWriter(directory, trailer(), rows)
    with pytest.MonkeyPatch.context() as patch:
        block = data.draw(st.integers(1, array[0].nbytes * (rows + 1)))
        patch.setattr(files, "BLOCK_BYTES", block)
        patch.setattr(files, "_CHUNK_BYTES", data.draw(st.integers(1, block)))
        _write_and_read(writer, array, chunks, kept)


def _write_and_read(writer: SliceWriter, array: np.ndarray, chunks: list[tuple[int, int]], kept: int) -> None:
    for lo, hi in chunks:
        writer.write(lo, array[lo:hi] + 1)
        writer.write(lo, array[lo:hi])
    sealed = writer.seal(tokens(kept))
    found, read = read_slice(writer.final)
    assert sealed == found
    assert same(read, array[:kept])


def test_last_write_wins(tmp_path: Path) -> None:
    claim(tmp_path)
    first, second = states(4, seed=1), states(4, seed=2)
    writer = SliceWriter(tmp_path, trailer(), 4)
    writer.write(0, first)
    writer.write(1, second[1:3])
    writer.seal(tokens(4))
    first[1:3] = second[1:3]
    assert same(read_slice(writer.final)[1], first)


@pytest.mark.parametrize("size", [1, 2])
def test_every_truncation_is_refused(tmp_path: Path, size: int) -> None:
    path = seal_all(tmp_path, states(3, hidden=4), size)[0]
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadSlice):
            read_slice(path)


def test_every_bit_flip_is_refused(tmp_path: Path) -> None:
    path = seal_all(tmp_path, states(2, hidden=4))[0]
    whole = path.read_bytes()
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        with pytest.raises(BadSlice):
            read_slice(path)


def test_a_flip_in_the_payload_is_named_a_checksum_mismatch(tmp_path: Path) -> None:
    paths = seal_all(tmp_path, states(3), 2)
    damaged = bytearray(paths[1].read_bytes())
    damaged[5] ^= 16
    paths[1].write_bytes(damaged)
    with pytest.raises(ChecksumMismatch):
        join_slices(paths, tokens(3))
    assert len(join_slices(paths, tokens(3), verify=False)) == 3


@pytest.mark.parametrize(
    ("old", "new"), [(b'"version": 2', b'"version": 3'), (b"crc32", b"crc33"), (b"bfloat16", b"bfloat17")]
)
def test_what_is_not_known_is_refused(old: bytes, new: bytes) -> None:
    with pytest.raises(UnsupportedSlice):
        Trailer.from_json(trailer().to_json().encode().replace(old, new))


def test_fewer_rows_is_an_error_and_surplus_is_cut(tmp_path: Path) -> None:
    paths = seal_all(tmp_path, states(4))
    assert len(join_slices(paths, tokens(3))) == 3
    with pytest.raises(MissingRows, match="4 rows, 5 are needed"):
        join_slices(paths, tokens(5))
    with pytest.raises(MissingRows):
        read_slice(paths[0], rows=5)


def test_ranks_must_agree(tmp_path: Path) -> None:
    data = states(4)
    paths = seal_all(tmp_path, data, 2)
    with pytest.raises(SlicesDisagree, match="ranks"):
        join_slices(paths[:1], tokens(4))
    with pytest.raises(SlicesDisagree, match="ranks"):
        join_slices([paths[0], paths[0]], tokens(4))
    with pytest.raises(SlicesDisagree, match="not in the slices"):
        join_slices(paths, tokens(4), layers=[1])
    with pytest.raises(SlicesDisagree):
        join_slices([], tokens(4))
    for changed in (replace(trailer(1, 2), prompt_len=3), replace(trailer(1, 2), column_offset=0)):
        paths[1].unlink()
        writer = SliceWriter(tmp_path, changed, 4)
        writer.write(0, np.ascontiguousarray(data[:, :, :4]))
        writer.seal(tokens(4))
        with pytest.raises(SlicesDisagree):
            join_slices(paths, tokens(4))


def test_rows_of_other_tokens_are_refused(tmp_path: Path) -> None:
    paths = seal_all(tmp_path, states(4), 2)
    wrong = tokens(4)
    wrong[2] = 7
    for token_ids in (wrong, wrong[:3]):
        with pytest.raises(WrongTokens, match="row 2 is of token 102, the sequence has 7 there"):
            join_slices(paths, token_ids)
    assert len(join_slices(paths, wrong[:2])) == 2
    assert read_token_ids(paths[1]).tolist() == tokens(4).tolist()


def test_ranks_must_have_been_fed_the_same_tokens(tmp_path: Path) -> None:
    data = states(4)
    paths = seal_all(tmp_path, data, 2)
    paths[1].unlink()
    writer = SliceWriter(tmp_path, trailer(1, 2), 4)
    writer.write(0, np.ascontiguousarray(data[:, :, 4:]))
    writer.seal(tokens(4)[::-1])
    with pytest.raises(SlicesDisagree, match="token_crc32"):
        join_slices(paths, tokens(4))


@pytest.mark.parametrize("token_ids", [7, [[100, 101]], [100.0, 101.5], ["a"]])
def test_what_are_no_token_ids_is_said(tmp_path: Path, token_ids: object) -> None:
    with pytest.raises(ValueError, match="integer ids"):
        join_slices(seal_all(tmp_path, states(4)), token_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", "3"), ("rows", 3.0), ("width", None), ("tp_size", "1"), ("dtype", ["bfloat16"])],
)
def test_a_trailer_of_wrong_types_is_no_trailer(name: str, value: object) -> None:
    body = json.loads(trailer().to_json()) | {name: value}
    with pytest.raises(BadSlice):
        Trailer.from_json(json.dumps(body).encode())


def test_some_rows_alone(tmp_path: Path) -> None:
    data = states(6)
    paths = seal_all(tmp_path, data, 2)
    assert same(join_rows(paths, 2, 3, [5, 0]), np.ascontiguousarray(data[2:5, [2, 0]]))
    with pytest.raises(MissingRows, match="6 rows, 7 are needed"):
        join_rows(paths, 5, 2, [0])


def test_a_failed_rank_says_why(tmp_path: Path) -> None:
    paths = seal_all(tmp_path, states(4), 2)
    paths[1].unlink()
    assert seal_error(tmp_path, trailer(1, 2), "row 3 is missing") is not None
    assert read_trailer(paths[1]).error == "row 3 is missing"
    with pytest.raises(CaptureFailed, match="rank 1: row 3 is missing"):
        join_slices(paths, tokens(4))


def test_nothing_stays_when_the_claim_is_gone(tmp_path: Path) -> None:
    writer = SliceWriter(tmp_path, trailer(), 2)
    writer.write(0, states(2))
    assert writer.seal(tokens(2)) is None
    assert list(tmp_path.iterdir()) == []
    assert seal_error(tmp_path, trailer(), "late") is None
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_was_released_meanwhile_is_no_error(tmp_path: Path) -> None:
    writer = SliceWriter(tmp_path, trailer(), 2)
    writer.part.unlink()
    assert writer.seal(tokens(0)) is None


def test_rows_outside_the_reserved_space_are_refused(tmp_path: Path) -> None:
    writer = SliceWriter(tmp_path, trailer(), 2)
    for row, count in ((1, 2), (-1, 1), (2, 1)):
        with pytest.raises(ValueError, match="outside"):
            writer.write(row, states(count))
    with pytest.raises(ValueError, match="bytes"):
        writer.write(0, states(1, hidden=4))
    writer.abort()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / f"{TAG}.t0.part").symlink_to(target)
    with pytest.raises(FileExistsError):
        SliceWriter(tmp_path, trailer(), 2)
    path = tmp_path / "link.slice"
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        read_slice(path)
    assert target.read_bytes() == b"precious"


def test_a_full_file_system_is_an_error_and_leaves_no_part(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full disk: the write fails (EFBIG) once its signal is ignored."""
    script = textwrap.dedent(
        f"""
        import resource, signal, sys
        from pathlib import Path
        sys.path[:0] = {[str(Path(__file__).parent)]!r}
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        from test_slice_files import DirectoryFull, SliceWriter, states, tokens, trailer
        writer = SliceWriter(Path({str(tmp_path)!r}), trailer(), 1000)
        try:
            writer.write(0, states(1000))
        except DirectoryFull as error:
            print("full:", error)
            writer.abort()
        writer = SliceWriter(Path({str(tmp_path)!r}), trailer(), 80)
        writer.write(0, states(80))
        try:
            writer.seal(tokens(80))
        except DirectoryFull as error:
            print("full:", error)
            writer.abort()
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("full:") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_full_tmpfs_is_an_error(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mounted)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        writer = SliceWriter(mounted, trailer(), 10_000)
        with pytest.raises(DirectoryFull):
            writer.write(0, states(10_000))
        writer.abort()
        assert list(mounted.iterdir()) == []
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_reading_a_missing_slice_is_the_usual_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_slice(tmp_path / "none.slice")
    (tmp_path / "short.slice").write_bytes(b"x" * 100)
    with pytest.raises(TruncatedSlice):
        read_trailer(tmp_path / "short.slice")
