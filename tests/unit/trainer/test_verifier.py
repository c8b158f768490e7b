"""Three tensors out of checkpoints of several layouts, and not a byte more."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from taphouse_trainer import verifier as module
from taphouse_trainer.errors import TargetError, WrongFingerprint
from taphouse_trainer.verifier import read_verifier

VOCAB, HIDDEN = 12, 4
EMBED = np.arange(VOCAB * HIDDEN, dtype=np.float32).reshape(VOCAB, HIDDEN)
HEAD = -EMBED
NORM = np.array([1.0, 1.001, 0.3333333, 2.5], np.float32)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}


def checkpoint(path: Path, files: Mapping[str, Mapping[str, np.ndarray]], config: Mapping[str, Any]) -> Path:
    """Several files get an index, one is ``model.safetensors``."""
    for name, tensors in files.items():
        save_file(dict(tensors), path / name)
    if len(files) > 1:
        weight_map = {t: name for name, tensors in files.items() for t in tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config))
    return path


def single(path: Path, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    return checkpoint(path, {"model.safetensors": tensors}, {**CONFIG, **changes})


PLAIN = {"model.embed_tokens.weight": EMBED, "model.norm.weight": NORM, "lm_head.weight": HEAD}


@pytest.mark.parametrize(
    "names",
    [
        ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
        (
            "language_model.model.embed_tokens.weight",
            "language_model.model.norm.weight",
            "language_model.lm_head.weight",
        ),
        ("model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "lm_head.weight"),
    ],
)
def test_finds_the_language_model_under_any_prefix(tmp_path: Path, names: tuple[str, str, str]) -> None:
    others = {
        "vision_tower.norm.weight": NORM * 9,
        "model.layers.0.input_layernorm.weight": NORM * 8,
        # A multi-token-prediction layer carries embeddings of its own.
        "model.layers.3.embed_tokens.weight": EMBED * 7,
    }
    path = single(tmp_path, {**others, names[0]: EMBED, names[1]: NORM, names[2]: HEAD})
    verifier = read_verifier(path)
    assert np.array_equal(verifier.embed.data, EMBED)
    assert np.array_equal(verifier.lm_head.data, HEAD)
    assert np.array_equal(verifier.final_norm.data, NORM)
    assert (verifier.num_layers, verifier.hidden_size, verifier.vocab_size) == (3, HIDDEN, VOCAB)


def test_a_config_with_a_text_part(tmp_path: Path) -> None:
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": CONFIG, "vision_config": {}}
    verifier = read_verifier(checkpoint(tmp_path, {"model.safetensors": PLAIN}, whole))
    assert verifier.num_layers == 3
    assert verifier.architectures == ("KimiK25ForConditionalGeneration",)


def test_tied_embeddings(tmp_path: Path) -> None:
    tensors = {k: v for k, v in PLAIN.items() if k != "lm_head.weight"}
    verifier = read_verifier(single(tmp_path, tensors, tie_word_embeddings=True))
    assert np.array_equal(verifier.lm_head.data, EMBED)


def test_a_missing_head_is_not_taken_for_tied(tmp_path: Path) -> None:
    tensors = {k: v for k, v in PLAIN.items() if k != "lm_head.weight"}
    with pytest.raises(TargetError, match="lm_head"):
        read_verifier(single(tmp_path, tensors))


def test_padding_rows_are_cut(tmp_path: Path) -> None:
    padded = {**PLAIN, "model.embed_tokens.weight": np.vstack([EMBED, EMBED[:4]])}
    assert np.array_equal(read_verifier(single(tmp_path, padded)).embed.data, EMBED)


def sharded_int4(path: Path) -> Path:
    """The three tensors in three files, packed expert weights beside each, as in a quantized checkpoint."""
    packed = np.arange(200_000, dtype=np.int32).reshape(100, 2000)
    files = {}
    for k, (name, tensor) in enumerate(PLAIN.items(), start=1):
        experts = {f"model.layers.{k}.mlp.experts.{e}.down_proj.weight_packed": packed for e in range(3)}
        files[f"model-{k:05d}-of-00004.safetensors"] = {**experts, name: tensor}
    files["model-00004-of-00004.safetensors"] = {"model.layers.2.mlp.experts.0.up_proj.weight_packed": packed}
    return checkpoint(path, files, CONFIG)


def test_reads_three_tensors_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sharded_int4(tmp_path)
    # The file without any of the three is not even opened, and the others' packed tensors are not read.
    (path / "model-00004-of-00004.safetensors").unlink()
    reads: list[int] = []
    real = os.preadv

    def counting(fd: int, buffers: list[Any], offset: int) -> int:
        got = real(fd, buffers, offset)
        reads.append(got)
        return got

    monkeypatch.setattr(module.os, "preadv", counting)
    verifier = read_verifier(path)
    assert sum(reads) == EMBED.nbytes + HEAD.nbytes + NORM.nbytes
    assert np.array_equal(verifier.lm_head.data, HEAD)


def test_the_process_does_not_read_the_rest_either(tmp_path: Path) -> None:
    """Counted by the kernel: all read calls together stay far below one packed tensor."""
    path = sharded_int4(tmp_path)
    before = bytes_read()
    read_verifier(path)
    assert bytes_read() - before < 100_000
    assert sum(f.stat().st_size for f in path.iterdir()) > 8_000_000


def bytes_read() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def test_quantized_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="stored as I32"):
        read_verifier(single(tmp_path, {**PLAIN, "lm_head.weight": HEAD.astype(np.int32)}))


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = single(tmp_path, PLAIN)
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 8)
    with pytest.raises(TargetError, match="cut off"):
        read_verifier(path)


def test_shapes_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="shape"):
        read_verifier(single(tmp_path, PLAIN, vocab_size=VOCAB + 1))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path, missing: str) -> None:
    path = single(tmp_path, PLAIN)
    (path / missing).unlink()
    with pytest.raises(TargetError, match=missing):
        read_verifier(path)


def test_targets_with_another_norm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="gemma3"):
        read_verifier(single(tmp_path, PLAIN, model_type="gemma3_text"))


def bfloat16_by_hand(values: np.ndarray) -> list[bytes]:
    """Each value's nearest bfloat16 as float32 bytes, found by trying both neighbours."""
    out = []
    for value in values:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        low, high = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
        near = min(
            (low, high), key=lambda b: abs(struct.unpack("<f", struct.pack("<I", b))[0] - float(value))
        )
        out.append(struct.pack("<I", near))
    return out


def test_fingerprint_follows_the_engines_dtype(tmp_path: Path) -> None:
    path = single(tmp_path, PLAIN)
    verifier = read_verifier(path)
    expected = hashlib.sha256(b"".join(bfloat16_by_hand(NORM))).hexdigest()
    assert verifier.final_norm_sha256("bfloat16") == expected
    assert verifier.final_norm_sha256("float32") == hashlib.sha256(NORM.tobytes()).hexdigest()
    config = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    verifier.check_fingerprint({"config": config, "final_norm": expected}, "bfloat16")
    with pytest.raises(WrongFingerprint, match="final_norm"):
        verifier.check_fingerprint({"config": config, "final_norm": expected}, "float32")
    with pytest.raises(WrongFingerprint, match="config"):
        verifier.check_fingerprint({"config": "0" * 64, "final_norm": expected}, "bfloat16")
    with pytest.raises(WrongFingerprint, match="final_norm"):
        verifier.check_fingerprint({"config": config}, "bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "no JSON object"),
        (b'"x"', "no JSON object"),
        (b"{", "can't read config.json"),
        (b'{"a": "\xff"}', "can't read config.json"),
        (b"[" * 100_000, "can't read config.json"),
        (b'{"text_config": [1]}', "no JSON object"),
        (b'{"vocab_size": null}', "has no vocab_size"),
        (b'{"vocab_size": "many"}', "vocab_size is 'many'"),
        (b'{"vocab_size": 0}', "vocab_size is 0"),
        (b'{"vocab_size": [12]}', "vocab_size is"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_config_that_is_none_is_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = single(tmp_path, PLAIN)
    (path / "config.json").write_bytes(text)
    with pytest.raises(TargetError, match=message):
        read_verifier(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "says no dtype"),
        ([], "says no dtype"),
        ({"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}, "says no dtype"),
        ({"dtype": "F32", "shape": [12, 4], "data_offsets": [0]}, "says no dtype"),
        ({"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}, "cut off"),
        ({"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [-12, -4], "data_offsets": [0, 192]}, "shape"),
    ],
)
def test_a_header_that_says_nonsense_is_one_line(tmp_path: Path, entry: Any, message: str) -> None:
    path = single(tmp_path, PLAIN)
    header = json.dumps(dict.fromkeys(PLAIN, entry)).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(400))
    with pytest.raises(TargetError, match=message):
        read_verifier(path)


@pytest.mark.parametrize("index", [b"[]", b'{"weight_map": []}', b'{"weight_map": {"a": 3}}', b"{"])
def test_an_index_that_is_none_is_one_line(tmp_path: Path, index: bytes) -> None:
    path = single(tmp_path, PLAIN)
    (path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(TargetError, match="not a safetensors index"):
        read_verifier(path)
