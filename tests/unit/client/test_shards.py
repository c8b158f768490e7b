"""Shards that are as they should be: round trips, sealing, reading, the written format."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.making import (
    HIDDEN,
    LAYERS,
    hand_made,
    make_meta,
    make_sample,
    make_samples,
    make_states,
)

from taphouse.errors import InvalidSample, MalformedShard, NotFinite, ShardError, ZeroRow
from taphouse.samples import Sample, Witness
from taphouse.shards import (
    CODECS,
    Shard,
    ShardWriter,
    describe_shard,
    encode_shard,
    open_shard,
    shard_name,
    verify_shard,
    write_shard,
)
from taphouse.store import LocalStore

DTYPES = ("bfloat16", "float16", "float32")
FORMAT_MD = Path(__file__).parents[3] / "FORMAT.md"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_come_back_to_the_bit(dtype: str, codec: str) -> None:
    samples = make_samples(4, dtype)
    meta = make_meta(dtype, codec=codec)
    shard = Shard.from_bytes(encode_shard(samples, meta))
    assert len(shard) == 4
    assert all(got.equals(given) for got, given in zip(shard, samples, strict=True))
    assert shard.header.meta == meta
    assert shard.header.fingerprint_id == meta.fingerprint_id
    assert shard.header.raw_bytes == sum(sample.raw_bytes for sample in samples)
    assert shard.header.tokens == sum(sample.tokens for sample in samples)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    codec=st.sampled_from(CODECS),
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    ids=st.lists(
        st.text(min_size=1, max_size=256).filter(str.isprintable), min_size=5, max_size=5, unique=True
    ),
)
def test_any_finite_bits_come_back(
    dtype: str, codec: str, tokens: list[int], seed: int, ids: list[str]
) -> None:
    rng = np.random.default_rng(seed)
    samples = []
    for number, count in enumerate(tokens):
        width = 4 if dtype == "float32" else 2
        raw = rng.integers(0, 256, (count, len(LAYERS), HIDDEN, width), dtype=np.uint8)
        raw[..., -1] &= 0x3B  # an exponent that is never all ones, in all three dtypes
        raw[..., 0, 0] |= 1  # and no row of zeros
        storage = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}[dtype]
        states = raw.reshape(-1).view(storage).reshape(count, len(LAYERS), HIDDEN)
        samples.append(make_sample(number, count, dtype, hidden_states=states, id=ids[number]))
    meta = make_meta(dtype, codec=codec)
    body = encode_shard(samples, meta)
    assert encode_shard(samples, meta) == body
    assert all(got.equals(given) for got, given in zip(open_shard(body), samples, strict=True))
    assert verify_shard(body).ok


def test_a_shard_is_a_safetensors_file_of_bytes() -> None:
    samples = make_samples(2)
    tensors = safetensors.numpy.load(encode_shard(samples, make_meta()))
    assert sorted(tensors) == [
        f"{number:06d}.{name}" for number in range(2) for name in ("hidden_states", "loss_mask", "token_ids")
    ]
    assert all(tensor.dtype == np.uint8 and tensor.ndim == 1 for tensor in tensors.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shard_written_by_another_writer_is_read(dtype: str) -> None:
    samples = make_samples(3, dtype)
    shard = open_shard(hand_made(samples))
    assert all(got.equals(given) for got, given in zip(shard, samples, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_snippet_in_format_md_reads_a_shard(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = make_sample(0, 300, dtype)
    monkeypatch.chdir(tmp_path)
    Path("shard.safetensors").write_bytes(encode_shard([make_sample(1, 3, dtype), sample], make_meta(dtype)))
    blocks = re.findall(r"```python\n(.*?)```", FORMAT_MD.read_text(), re.S)
    names: dict[str, object] = {}
    exec(blocks[0], names)
    states = names["states"]
    assert isinstance(states, np.ndarray)
    assert states.tobytes() == sample.hidden_states.tobytes()
    assert capsys.readouterr().out.splitlines()[1] == f"sample-0 {dtype} (300, 3, 16)"


def test_bfloat16_that_was_widened_to_float32_stays_small() -> None:
    half = make_states((400, len(LAYERS), HIDDEN), "bfloat16")
    wide = (half.astype(np.uint32) << 16).view(np.float32)
    narrow = encode_shard([make_sample(0, 400, hidden_states=half)], make_meta())
    widened = encode_shard([make_sample(0, 400, hidden_states=wide, dtype="float32")], make_meta("float32"))
    assert len(widened) < 1.02 * len(narrow)


def test_writing_and_reading_hold_one_sample_in_memory(tmp_path: Path) -> None:
    tokens, count = 16_384, 24
    size = make_sample(0, tokens).raw_bytes
    store = LocalStore(tmp_path)
    tracemalloc.start()
    try:
        samples = (make_sample(number, tokens) for number in range(count))
        made = _peak_of(lambda: make_sample(0, tokens))
        wrote = _peak_of(lambda: write_shard(store, "a.safetensors", samples, make_meta()))
        with open_shard(store.local_path("shards/a.safetensors")) as shard:
            read = _peak_of(lambda: sum(sample.tokens for sample in shard))
    finally:
        tracemalloc.stop()
    assert wrote < made + 8 * size  # and not 24 samples
    assert read < 6 * size


def _peak_of(work: Callable[[], object]) -> int:
    """Most bytes that were allocated at once while `work` ran."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    work()
    return tracemalloc.get_traced_memory()[1] - before


def test_reading_costs_one_sample_at_a_time_and_any_order() -> None:
    samples = make_samples(3)
    shard = open_shard(encode_shard(samples, make_meta()))
    assert shard[2].equals(samples[2])
    assert shard[-3].equals(samples[0])
    assert shard.find("sample-1").equals(samples[1])
    for index in (3, -4):
        with pytest.raises(IndexError):
            shard[index]
    with pytest.raises(KeyError):
        shard.find("sample-9")


def test_arrays_are_fresh_and_writable() -> None:
    shard = open_shard(encode_shard(make_samples(1), make_meta()))
    first = shard[0]
    first.hidden_states[:] = 0
    first.token_ids[:] = 0
    assert shard[0].equals(make_samples(1)[0])


def test_threads_read_one_shard(tmp_path: Path) -> None:
    samples = [make_sample(number, 50) for number in range(8)]
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode_shard(samples, make_meta()))
    wrong: list[int] = []

    def read(shard: Shard) -> None:
        wrong.extend(n for _ in range(5) for n in range(8) if not shard[n].equals(samples[n]))

    with open_shard(path) as shard:
        threads = [threading.Thread(target=read, args=(shard,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_facts_of_a_written_shard_are_those_of_the_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    samples = make_samples()
    facts = write_shard(store, shard_name("job", 0), iter(samples), make_meta())
    body = store.read("shards/job-000000.safetensors")
    assert body == encode_shard(samples, make_meta())
    assert facts.sha256 == hashlib.sha256(body).hexdigest()
    assert (facts.bytes, facts.samples, facts.tokens) == (len(body), 3, 15)
    assert facts == describe_shard(store.local_path(facts.path), path=facts.path)
    assert store.list("shards") == ["job-000000.safetensors"]
    assert [p.name for p in (tmp_path / "shards").iterdir()] == ["job-000000.safetensors"]


def test_the_first_sealed_shard_of_a_name_wins(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with ShardWriter(path, make_meta()) as first, ShardWriter(path, make_meta()) as second:
        first.add(make_sample(0))
        second.add(make_sample(1))
        facts = first.seal()
        assert second.seal() == facts
    assert open_shard(path)[0].equals(make_sample(0))
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    store = LocalStore(tmp_path)
    kept = write_shard(store, "b.safetensors", [make_sample(0)], make_meta())
    assert write_shard(store, "b.safetensors", [make_sample(1)], make_meta()) == kept


def test_a_broken_file_under_the_name_is_not_taken_for_the_shard(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("shards/a.safetensors", encode_shard(make_samples(), make_meta())[:-1])
    with pytest.raises(ShardError, match=r"a\.safetensors"):
        write_shard(store, "a.safetensors", make_samples(), make_meta())


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def samples() -> list[Sample]:
        raise RuntimeError("engine went away")

    path = tmp_path / "a.safetensors"
    with pytest.raises(RuntimeError), ShardWriter(path, make_meta()) as writer:
        writer.add(make_sample())
        samples()
    with pytest.raises(MalformedShard, match="at least one sample"), ShardWriter(path, make_meta()) as writer:
        writer.seal()
    assert list(tmp_path.iterdir()) == []


def test_a_refused_sample_does_not_spoil_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    zeros = np.zeros_like(make_sample().hidden_states)
    with ShardWriter(path, make_meta()) as writer:
        writer.add(make_sample(0))
        with pytest.raises(ZeroRow) as caught:
            writer.add(make_sample(1, hidden_states=zeros))
        assert (caught.value.index, caught.value.sample) == (1, "sample-1")
        writer.add(make_sample(2))
        assert writer.seal().samples == 2
    assert verify_shard(path).ok


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (make_sample(0), "of this id"),
        (make_sample(1, dtype="float16"), "dtype float16"),
        (make_sample(1, hidden_states=make_states((5, 2, HIDDEN), "bfloat16")), r"\[5, 2, 16\]"),
        (make_sample(1, token_ids=np.array([1, 2, -1, 4, 5], np.int32)), "token 2 is negative"),
        (make_sample(1, loss_mask=np.array([0, 1, 1, 2, 0], np.uint8)), "position 3"),
    ],
)
def test_what_a_writer_refuses(sample: Sample, problem: str) -> None:
    with pytest.raises(InvalidSample, match=problem):
        encode_shard([make_sample(0), sample], make_meta())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_at_write_and_by_verify(dtype: str, value: float) -> None:
    sample = make_sample(1, 400, dtype)
    wide = sample.hidden_float32()
    wide[371, 1, 9] = value
    states = (
        (wide.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "bfloat16"
        else wide.astype(sample.hidden_states.dtype)
    )
    bad = make_sample(1, 400, dtype, hidden_states=states)
    with pytest.raises(NotFinite, match="row 371 of layer 3"):
        encode_shard([bad], make_meta(dtype))
    body = hand_made([make_sample(0, 5, dtype), bad, make_sample(2, 5, dtype)])
    report = verify_shard(body)
    assert not report.ok
    assert [(f.index, f.id, f.kind) for f in report.bad] == [(1, "sample-1", "NotFinite")]
    assert report.good == 2
    with pytest.raises(NotFinite):
        open_shard(body)[1]
    assert open_shard(body, verify=False)[1].equals(bad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_row_of_zeros_is_refused_at_write_and_by_verify(dtype: str, zero: float) -> None:
    sample = make_sample(1, 6, dtype)
    wide = sample.hidden_float32()
    wide[4, 2] = zero
    states = (
        (wide.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "bfloat16"
        else wide.astype(sample.hidden_states.dtype)
    )
    bad = make_sample(1, 6, dtype, hidden_states=states)
    with pytest.raises(ZeroRow, match="row 4 of layer 6"):
        encode_shard([bad], make_meta(dtype))
    assert [f.kind for f in verify_shard(hand_made([bad])).bad] == ["ZeroRow"]


def test_an_embedding_may_be_zero_but_not_every_layer() -> None:
    states = make_sample().hidden_states.copy()
    states[3, 0] = 0
    meta = make_meta(layers=(0, 3, 6))
    assert verify_shard(encode_shard([make_sample(hidden_states=states)], meta)).ok
    only_embeddings = np.ascontiguousarray(states[:, :1])
    with pytest.raises(ZeroRow, match="row 3 of layer 0"):
        encode_shard([make_sample(hidden_states=only_embeddings)], make_meta(layers=(0,)))


def test_the_hash_of_the_file_is_checked_when_it_is_given(tmp_path: Path) -> None:
    body = encode_shard(make_samples(), make_meta())
    digest = hashlib.sha256(body).hexdigest()
    path = tmp_path / "a.safetensors"
    path.write_bytes(body)
    for source in (body, path):
        assert len(open_shard(source, sha256=digest)) == 3
        report = verify_shard(source, sha256="0" * 64)
        assert (report.ok, report.kind) == (False, "ChecksumMismatch")


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": (1, 1)},
        {"layers": (1, 7)},
        {"layers": ()},
        {"dtype": "float8_e4m3fn"},
        {"codec": "lz4"},
        {"job_id": "../x"},
        {"hidden_size": 0},
        {"unknown": 1},
    ],
)
def test_what_a_shard_meta_refuses(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        make_meta(**fields)


WITNESS = Witness(3, ((7, 9), (2, 1)), ((-0.25, -1.5), (-0.125, -3.0)))


def test_a_witness_comes_back() -> None:
    samples = [make_sample(0), make_sample(1, witness=WITNESS)]
    encoded = encode_shard(samples, make_meta())
    with open_shard(encoded) as shard:
        assert [sample.witness for sample in shard] == [None, WITNESS]
        assert all(read.equals(written) for read, written in zip(shard, samples, strict=True))
        assert not shard[0].equals(shard[1])
    length = int.from_bytes(encoded[:8], "little")
    header = json.loads(json.loads(encoded[8 : 8 + length])["__metadata__"]["header"])
    assert ["witness" in sample for sample in header["samples"]] == [False, True]
    assert verify_shard(encoded).witnessed == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"first_row": -1}, "rows from 0 on"),
        ({"top_tokens": ()}, "rows from 0 on"),
        ({"top_tokens": ((1,), (2,))}, "one logprob a token"),
        ({"top_tokens": ((1, -2), (3, 4))}, "token ids"),
        ({"top_logprobs": ((float("nan"), 0.0), (0.0, 0.0))}, "not finite"),
    ],
)
def test_what_is_no_witness_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSample, match=says):
        replace(WITNESS, **fields)


def test_a_witness_of_rows_that_are_not_there_is_refused() -> None:
    with pytest.raises(InvalidSample, match="row 5 of 5 rows"):
        make_sample(tokens=5, witness=replace(WITNESS, first_row=4))
