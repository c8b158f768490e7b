"""One training sample: a sequence's token ids, its loss mask and the hidden states of the tapped layers.

numpy has no bfloat16, so bfloat16 states are held as the uint16 that carry their bits, beside the dtype's
name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taphouse.errors import InvalidSample, NotFinite, ZeroRow

#: dtype name → little-endian numpy dtype that holds its elements
STORAGE_DTYPES: dict[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}

# Per dtype: unsigned type of the same width, mask that drops the sign, exponent with all bits set.
_BITS: dict[str, tuple[str, int, int]] = {
    "bfloat16": ("<u2", 0x7FFF, 0x7F80),
    "float16": ("<u2", 0x7FFF, 0x7C00),
    "float32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
}
_CHECK_ELEMENTS = 1 << 18
MAX_ID_LENGTH = 256
MAX_WITNESS_ROWS = 64
MAX_WITNESS_TOKENS = 64


@dataclass(frozen=True)
class Witness:
    """What the engine itself ranked highest at some rows, to prove a sample's states with.

    `top_tokens[i]` and `top_logprobs[i]` (natural logarithm, before temperature) are those of row
    `first_row + i`, best first. Whoever has the model's head can compare them with `head(norm(h))` of the
    states that enter the final norm. Raises `InvalidSample` when they are not such.
    """

    first_row: int
    top_tokens: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        problem = _witness_problem(self)
        if problem:
            raise InvalidSample(f"the witness {problem}")

    @property
    def rows(self) -> range:
        """The rows it speaks of."""
        return range(self.first_row, self.first_row + len(self.top_tokens))


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of T rows with the states of L layers of width H.

    `token_ids` int32 [T]; `loss_mask` uint8 [T], 1 where the token is trained on; `hidden_states` [T, L,
    H], as uint16 bits for dtype "bfloat16", as float16 or float32 otherwise. `prompt_len` is in 1..T (T
    when nothing was generated). `next_token_id` is the token sampled after the last row: it never ran
    through the model and has no row. `witness` is there for the few samples that the engine was asked to
    prove. Raises `InvalidSample` when built with anything else; values are
    checked by `check_values`.
    """

    id: str
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    hidden_states: NDArray[np.generic]
    dtype: str
    prompt_len: int
    next_token_id: int | None = None
    finish_reason: str | None = None
    witness: Witness | None = None

    def __post_init__(self) -> None:
        problem = _shape_problem(self)
        if problem:
            tensor, detail = problem
            raise InvalidSample(detail, sample=str(self.id), tensor=tensor)

    @property
    def tokens(self) -> int:
        """T, the number of rows."""
        return int(self.token_ids.shape[0])

    @property
    def raw_bytes(self) -> int:
        """Bytes of the three tensors, uncompressed."""
        return int(self.token_ids.nbytes + self.loss_mask.nbytes + self.hidden_states.nbytes)

    def hidden_float32(self) -> NDArray[np.float32]:
        """The states as float32 [T, L, H], a copy; exact for all three dtypes."""
        return to_float32(self.hidden_states, self.dtype)

    def equals(self, other: Sample) -> bool:
        """Whether every field is the same, to the bit."""
        return (
            _plain(self) == _plain(other)
            and self.hidden_states.shape == other.hidden_states.shape
            and self.token_ids.tobytes() == other.token_ids.tobytes()
            and self.loss_mask.tobytes() == other.loss_mask.tobytes()
            and self.hidden_states.tobytes() == other.hidden_states.tobytes()
        )


def to_float32(states: NDArray[np.generic], dtype: str) -> NDArray[np.float32]:
    """Return stored states of `dtype` (see `Sample`) as float32, a copy; exact for all three dtypes."""
    if dtype == "bfloat16":
        bits = states.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return states.astype(np.float32)


def check_values(sample: Sample, layers: Sequence[int]) -> None:
    """Refuse values that no capture can have given.

    `layers` are the layer ids of axis 1. Raises `InvalidSample` for a negative token id or a mask other
    than 0 and 1, `NotFinite` for NaN or infinity, `ZeroRow` for a row of zeros in a layer other than 0
    (layer 0 is the embedding, and a model may embed its padding token as zeros) or in every layer at once.
    """
    if int(sample.token_ids.min()) < 0:
        where = int(np.argmax(sample.token_ids < 0))
        raise InvalidSample(f"token {where} is negative", sample=sample.id, tensor="token_ids")
    if int(sample.loss_mask.max()) > 1:
        where = int(np.argmax(sample.loss_mask > 1))
        raise InvalidSample(f"position {where} is not 0 or 1", sample=sample.id, tensor="loss_mask")
    unsigned, magnitude, infinity = _BITS[sample.dtype]
    bits = np.ascontiguousarray(sample.hidden_states).view(unsigned)
    may_be_zero = np.array([layer == 0 for layer in layers])
    step = max(1, _CHECK_ELEMENTS // max(1, bits[0].size))
    for start in range(0, len(bits), step):
        peaks = np.bitwise_and(bits[start : start + step], magnitude).max(axis=-1)  # [rows, L]
        if int(peaks.max()) >= infinity:
            row, layer = (int(n) for n in np.argwhere(peaks >= infinity)[0])
            raise NotFinite(
                f"NaN or infinity in row {start + row} of layer {layers[layer]}",
                sample=sample.id,
                tensor="hidden_states",
            )
        if int(peaks.min()) == 0:
            _refuse_zero_rows(sample.id, peaks == 0, may_be_zero, layers, start)


def _refuse_zero_rows(
    sample: str, zero: NDArray[np.bool_], may_be_zero: NDArray[np.bool_], layers: Sequence[int], start: int
) -> None:
    everywhere = zero.all(axis=1, keepdims=True)
    wrong = np.argwhere(zero & (~may_be_zero | everywhere))
    if len(wrong):
        row, layer = (int(n) for n in wrong[0])
        raise ZeroRow(
            f"row {start + row} of layer {layers[layer]} is all zeros",
            sample=sample,
            tensor="hidden_states",
            advice="The capture did not happen (a stale compiled graph does this): run the engine's canary",
        )


def id_problem(sample_id: object) -> str | None:
    """What is wrong with a sample's id, or None.

    An id is 1 to 256 printable characters, encodable as UTF-8.
    """
    if not isinstance(sample_id, str) or not 1 <= len(sample_id) <= MAX_ID_LENGTH:
        return f"a sample's id is a string of 1 to {MAX_ID_LENGTH} characters"
    if not sample_id.isprintable():
        return "a sample's id has printable characters only"
    return None


def _shape_problem(sample: Sample) -> tuple[str | None, str] | None:
    """The first thing wrong with a sample's types and shapes, as (tensor, message)."""
    if sample.dtype not in STORAGE_DTYPES:
        return None, f"dtype {sample.dtype!r} is not one of {', '.join(STORAGE_DTYPES)}"
    problem = id_problem(sample.id) or _number_problem(sample)
    return (None, problem) if problem else _array_problem(sample)


def _number_problem(sample: Sample) -> str | None:
    if not 1 <= sample.prompt_len <= len(sample.token_ids):
        return f"prompt_len {sample.prompt_len} is not in 1..{len(sample.token_ids)}"
    if sample.witness is not None and sample.witness.rows.stop > len(sample.token_ids):
        return f"the witness speaks of row {sample.witness.rows.stop - 1} of {len(sample.token_ids)} rows"
    if sample.next_token_id is not None and not 0 <= sample.next_token_id < 2**31:
        return f"next_token_id {sample.next_token_id} is not a token id"
    return None


def _plain(sample: Sample) -> tuple[object, ...]:
    """Every field that is no tensor."""
    return (
        sample.id,
        sample.dtype,
        sample.prompt_len,
        sample.next_token_id,
        sample.finish_reason,
        sample.witness,
    )


def _witness_problem(witness: Witness) -> str | None:
    tokens, logprobs = witness.top_tokens, witness.top_logprobs
    if witness.first_row < 0 or not 1 <= len(tokens) <= MAX_WITNESS_ROWS:
        return f"is not of 1 to {MAX_WITNESS_ROWS} rows from 0 on"
    if [len(row) for row in tokens] != [len(row) for row in logprobs]:
        return "has not one logprob a token"
    for row, values in zip(tokens, logprobs, strict=True):
        if not 1 <= len(row) <= MAX_WITNESS_TOKENS or not all(0 <= token < 2**31 for token in row):
            return f"has a row without 1 to {MAX_WITNESS_TOKENS} token ids"
        if not all(math.isfinite(value) for value in values):
            return "has a logprob that is not finite"
    return None


def _array_problem(sample: Sample) -> tuple[str, str] | None:
    ids, mask, states = sample.token_ids, sample.loss_mask, sample.hidden_states
    expected = STORAGE_DTYPES[sample.dtype]
    if ids.dtype != np.dtype("<i4") or ids.ndim != 1 or ids.size == 0:
        return "token_ids", f"expected int32 [T] with T of at least 1, got {ids.dtype} {list(ids.shape)}"
    if mask.dtype != np.uint8 or mask.shape != ids.shape:
        return "loss_mask", f"expected uint8 {list(ids.shape)}, got {mask.dtype} {list(mask.shape)}"
    if states.dtype != expected or states.ndim != 3 or states.shape[0] != ids.size or 0 in states.shape:
        got = f"{states.dtype} {list(states.shape)}"
        return "hidden_states", f"expected {expected} [{ids.size}, L, H] for {sample.dtype}, got {got}"
    return None
