"""The three tensors of the target that training needs, read without loading the target.

A draft is trained against the target's token embeddings, output head and final norm. They are found
by name in a checkpoint directory (one ``model.safetensors``, or several with an index), and only their
byte ranges are read: the size of the checkpoint doesn't matter, nor do quantized tensors beside them.

Names vary: multimodal checkpoints put the language model under a prefix such as ``language_model.``,
and checkpoints with tied embeddings have no output head of their own. The stack is the shortest
``<prefix>embed_tokens.weight`` that has a sibling ``<prefix>norm.weight``.

Numpy only: bfloat16 is carried as ``uint16`` beside its dtype's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from taphouse.samples import to_float32
from taphouse_trainer.errors import TargetError, WrongFingerprint

_DTYPES = {"BF16": ("bfloat16", np.uint16), "F16": ("float16", np.float16), "F32": ("float32", np.float32)}
_MAX_HEADER_BYTES = 100_000_000
_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_ONE_PLUS_WEIGHT = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text"})


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it is stored: ``data`` is ``uint16`` for ``bfloat16``, native otherwise."""

    name: str
    dtype: str
    data: np.ndarray

    def as_float32(self) -> np.ndarray:
        """The values as float32 (exact)."""
        return to_float32(self.data, self.dtype)


@dataclass(frozen=True)
class Verifier:
    """What is known of the target: sizes, config and three tensors.

    ``embed`` and ``lm_head`` are ``[vocab_size, hidden_size]``, ``final_norm`` is ``[hidden_size]``.
    ``config`` is the language model's part of ``config.json``; ``config_sha256`` covers the raw file.
    """

    path: Path
    config: Mapping[str, Any]
    architectures: tuple[str, ...]
    config_sha256: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    embed: RawTensor
    lm_head: RawTensor
    final_norm: RawTensor

    def final_norm_sha256(self, dtype: str) -> str:
        """SHA-256 of the final norm as an engine running in ``dtype`` holds it.

        Cast to ``dtype``, then to little-endian float32.
        """
        values = _round_to(self.final_norm.as_float32(), dtype)
        return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()

    def logits(self, state: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Logits float32 [n] of `tokens` [n] for a state [H] that enters the final norm (an RMS norm)."""
        x = state.astype(np.float32)
        eps = float(self.config.get("rms_norm_eps", 1e-6))
        normed = x / np.sqrt(np.mean(x * x) + eps) * self.final_norm.as_float32()
        rows = RawTensor(self.lm_head.name, self.lm_head.dtype, self.lm_head.data[tokens])
        return rows.as_float32() @ normed

    @property
    def plain_logits(self) -> bool:
        """Whether logits are head(norm(h)) as they are, neither scaled nor capped."""
        return not any(self.config.get(key) not in (None, 1, 1.0) for key in _CHANGES_LOGITS)

    def check_fingerprint(self, fingerprint: Mapping[str, Any], dtype: str) -> None:
        """Compare a shard's fingerprint with this checkpoint.

        Raises:
            WrongFingerprint: the states were made by other weights, or the shard doesn't say.
        """
        expected = {"config": self.config_sha256, "final_norm": self.final_norm_sha256(dtype)}
        for key, value in expected.items():
            found = fingerprint.get(key)
            if found is None:
                raise WrongFingerprint(
                    f"the fingerprint has no {key!r}: can't tell which weights made the states"
                )
            if found != value:
                raise WrongFingerprint(
                    f"fingerprint {key!r} is {str(found)[:12]}…, the target has {value[:12]}… "
                    f"({self.path}): the states were made by another checkpoint"
                )


def read_verifier(path: Path) -> Verifier:
    """Read config and the three tensors of the checkpoint at ``path``.

    Raises:
        TargetError: no readable checkpoint, a tensor is missing, quantized or of the wrong shape,
            or the target's final norm follows a convention the draft can't reproduce.
    """
    raw, whole = _read_config(path)
    config = whole.get("text_config") or whole.get("llm_config") or whole
    if not isinstance(config, dict):
        raise TargetError(f"{path / 'config.json'}: its text_config or llm_config is no JSON object")
    if config.get("model_type") in _ONE_PLUS_WEIGHT:
        raise TargetError(
            f"{path}: unsupported target: {config['model_type']} scales its final norm by 1 + weight"
        )
    vocab, hidden, layers = (
        _size(config, name, path) for name in ("vocab_size", "hidden_size", "num_hidden_layers")
    )
    files = _tensor_files(path)
    prefix = _stack_prefix(files, path)
    embed = _read_tensor(files, f"{prefix}embed_tokens.weight")
    norm = _read_tensor(files, f"{prefix}norm.weight")
    head_name = None if _is_tied(whole, config) else _head_name(files, prefix)
    if head_name is None and _declared_untied(whole, config):
        raise TargetError(f"{path}: no lm_head.weight, and config.json says that embeddings are not tied")
    head = embed if head_name is None else _read_tensor(files, head_name)
    for tensor, width in ((embed, (vocab, hidden)), (head, (vocab, hidden)), (norm, (hidden,))):
        if tensor.data.shape[1:] != width[1:] or tensor.data.shape[0] < width[0]:
            raise TargetError(
                f"{path}: {tensor.name} has shape {tensor.data.shape}, config.json says {width}"
            )
    return Verifier(
        path=path,
        config=config,
        architectures=_architectures(whole, path),
        config_sha256=hashlib.sha256(raw).hexdigest(),
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        embed=_rows(embed, vocab),
        lm_head=_rows(head, vocab),
        final_norm=norm,
    )


def _rows(tensor: RawTensor, rows: int) -> RawTensor:
    """Without the padding rows some checkpoints carry."""
    return RawTensor(tensor.name, tensor.dtype, tensor.data[:rows])


def _read_config(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        raw = (path / "config.json").read_bytes()
        whole = json.loads(raw)
    except (OSError, ValueError, RecursionError) as e:
        raise TargetError(f"{path}: can't read config.json ({e}); give the directory of a checkpoint") from e
    if not isinstance(whole, dict):
        raise TargetError(f"{path}: config.json is no JSON object; give the directory of a checkpoint")
    return raw, whole


def _size(config: Mapping[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if value is None:
        raise TargetError(f"{path / 'config.json'} has no {name}")
    if not isinstance(value, int) or value < 1:
        raise TargetError(f"{path / 'config.json'}: {name} is {value!r:.40}, which is no size")
    return value


def _architectures(whole: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    names = whole.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TargetError(
            f"{path / 'config.json'}: architectures is {names!r:.40}, which is no list of names"
        )
    return tuple(names)


def _is_tied(whole: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", whole.get("tie_word_embeddings", False)))


def _declared_untied(whole: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    return config.get("tie_word_embeddings", whole.get("tie_word_embeddings")) is False


def _tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name → the file that holds it."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.exists():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            return {name: path / file for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise TargetError(f"{index} is not a safetensors index ({e})") from e
    if single.exists():
        return dict.fromkeys((n for n in _read_header(single)[0] if n != "__metadata__"), single)
    raise TargetError(f"{path} holds neither model.safetensors nor model.safetensors.index.json")


def _stack_prefix(files: Mapping[str, Path], path: Path) -> str:
    suffix = "embed_tokens.weight"
    prefixes = sorted((n.removesuffix(suffix) for n in files if n.endswith(suffix)), key=len)
    for prefix in prefixes:
        if f"{prefix}norm.weight" in files:
            return prefix
    raise TargetError(f"{path}: found no <prefix>embed_tokens.weight with a <prefix>norm.weight beside it")


def _head_name(files: Mapping[str, Path], prefix: str) -> str | None:
    """``lm_head.weight`` at the top, or under the part of the prefix that ends before ``model.``."""
    outer = prefix.removesuffix("model.")
    for name in (f"{outer}lm_head.weight", f"{prefix}lm_head.weight", "lm_head.weight"):
        if name in files:
            return name
    return None


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header and the offset of its data."""
    try:
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(f.read(length))
            if not isinstance(header, dict):
                raise ValueError("its header is no JSON object")
            return header, 8 + length
    except (OSError, ValueError, RecursionError, struct.error) as e:
        raise TargetError(f"{file} is not a readable safetensors file ({e})") from e


def _read_tensor(files: Mapping[str, Path], name: str) -> RawTensor:
    """Read one tensor's bytes, and nothing else, from the file that holds it."""
    file = files[name]
    header, base = _read_header(file)
    if name not in header:
        raise TargetError(f"{file} has no tensor {name}, though the index says so")
    try:
        stored, shape = str(header[name]["dtype"]), tuple(int(n) for n in header[name]["shape"])
        begin, end = (int(offset) for offset in header[name]["data_offsets"])
    except (KeyError, TypeError, ValueError) as e:
        raise TargetError(f"{file}: its header says no dtype, shape and place of {name} ({e})") from e
    if stored not in _DTYPES:
        raise TargetError(f"{file}: {name} is stored as {stored}; needs bfloat16, float16 or float32")
    dtype, numpy_dtype = _DTYPES[stored]
    if begin < 0 or base + end > file.stat().st_size:
        raise TargetError(f"{file}: {name} lies at {begin} to {end}: the file is cut off before that")
    if not shape or min(shape) < 1 or math.prod(shape) * np.dtype(numpy_dtype).itemsize != end - begin:
        raise TargetError(f"{file}: {name} takes {end - begin} bytes, its shape {shape} needs others")
    data = np.empty(shape, numpy_dtype)
    with file.open("rb") as f:
        _read_into(f.fileno(), data.reshape(-1).view(np.uint8).data, base + begin, f"{file}: {name}")
    return RawTensor(name, dtype, data)


def _read_into(fd: int, buffer: memoryview, offset: int, what: str) -> None:
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done : done + (1 << 30)]], offset + done)
        if got == 0:
            raise TargetError(f"{what} is cut off after {done} of {len(buffer)} bytes")
        done += got


def _round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 values rounded (to nearest, ties to even) to what ``dtype`` can hold."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32)
    raise TargetError(f"unknown dtype {dtype!r}")
