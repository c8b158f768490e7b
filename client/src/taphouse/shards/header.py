"""What a shard says of itself: the JSON header, its limits and how it is checked."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from taphouse import __version__
from taphouse.errors import ChecksumMismatch, InvalidSample, MalformedShard, ShardError, UnsupportedShard
from taphouse.samples import STORAGE_DTYPES, Witness, id_problem
from taphouse.shards.codec import CODECS, PLANES_ZSTD1, STORED, TENSOR_DTYPES, unknown_codec
from taphouse.slices import fingerprint_id

FORMAT = "taphouse-shard"
VERSION = "1"
TENSORS = ("token_ids", "loss_mask", "hidden_states")
MAX_SAMPLES = 16_384
MAX_TOKENS = 1 << 24
MAX_LAYERS = 1_024
MAX_HIDDEN_SIZE = 1 << 20
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UPGRADE = "Install a newer taphouse to read this shard"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorInfo(_Record):
    """One tensor of one sample: how its blob is encoded and what comes out.

    `bytes` are those of the blob, `raw_bytes` those of the decoded tensor, `sha256` is over the decoded
    bytes. `planes` are the planes' sizes in bytes, most significant first; only codec "planes-zstd1" has
    them.
    """

    codec: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int = Field(ge=1)
    raw_bytes: int = Field(ge=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    planes: tuple[int, ...] | None = None


class WitnessInfo(_Record):
    """What the engine ranked highest at rows `first_row` on: see `taphouse.samples.Witness`."""

    first_row: int
    top_tokens: tuple[tuple[int, ...], ...] = Field(strict=False)
    top_logprobs: tuple[tuple[float, ...], ...] = Field(strict=False)

    @model_validator(mode="after")
    def _is_a_witness(self) -> WitnessInfo:
        try:
            self.witness()
        except InvalidSample as error:
            raise ValueError(error.detail) from error
        return self

    def witness(self) -> Witness:
        """As samples carry it."""
        return Witness(self.first_row, self.top_tokens, self.top_logprobs)


class SampleInfo(_Record):
    """One sample: `tokens` is T, its number of rows; the fields are those of `taphouse.samples.Sample`."""

    id: str
    tokens: int = Field(ge=1, le=MAX_TOKENS)
    prompt_len: int = Field(ge=1)
    next_token_id: int | None = Field(ge=0, lt=2**31)
    finish_reason: str | None
    witness: WitnessInfo | None = None
    tensors: dict[str, TensorInfo]

    @field_validator("id")
    @classmethod
    def _id_is_printable(cls, value: str) -> str:
        problem = id_problem(value)
        if problem:
            raise ValueError(problem)
        return value


class _Shared(_Record):
    """What all samples of a shard share.

    `layers` are the layer ids of the states' axis 1, in that order; `num_layers` the model's decoder layers
    (id `num_layers` is the stream entering the final norm); `fingerprint` identifies the weights that made
    the states; `codec` encodes the hidden states.
    """

    layers: tuple[int, ...] = Field(min_length=1, max_length=MAX_LAYERS, strict=False)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden_size: int = Field(ge=1, le=MAX_HIDDEN_SIZE)
    dtype: str
    fingerprint: dict[str, Any]
    job_id: str | None = None
    batch: int | None = Field(default=None, ge=0, lt=10**6)
    codec: str = PLANES_ZSTD1
    created_by: str = Field(default=f"taphouse {__version__}", max_length=200)

    @model_validator(mode="after")
    def _fits(self) -> _Shared:
        if len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers {list(self.layers)} name a layer twice")
        if not all(0 <= layer <= self.num_layers for layer in self.layers):
            raise ValueError(f"layers {list(self.layers)} are not all in 0..{self.num_layers}")
        if self.dtype not in STORAGE_DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(STORAGE_DTYPES)}")
        if self.codec not in CODECS:
            raise ValueError(f"codec {self.codec!r} is not one of {', '.join(CODECS)}")
        if self.job_id is not None and not _JOB_ID.fullmatch(self.job_id):
            raise ValueError(f"job_id {self.job_id!r} is not 1 to 128 of letters, digits, '.', '_' and '-'")
        return self


class ShardMeta(_Shared):
    """What all samples of a shard share, as a writer takes it."""

    @property
    def fingerprint_id(self) -> str:
        """The fingerprint's short name, 32 hex digits."""
        return fingerprint_id(self.fingerprint)


class ShardHeader(_Shared):
    """A shard's header as it was read: what its samples share, and one entry a sample."""

    fingerprint_id: str
    samples: tuple[SampleInfo, ...] = Field(min_length=1, max_length=MAX_SAMPLES)

    @property
    def meta(self) -> ShardMeta:
        """The part all samples share, as a writer takes it."""
        return ShardMeta.model_validate({name: getattr(self, name) for name in ShardMeta.model_fields})

    @property
    def tokens(self) -> int:
        """Rows of all samples."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors, decoded."""
        return sum(tensor.raw_bytes for sample in self.samples for tensor in sample.tensors.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blobs."""
        return sum(tensor.bytes for sample in self.samples for tensor in sample.tensors.values())


class ShardFacts(_Record):
    """What others need to know of a sealed shard without opening it; a ledger entry is this and a number.

    `shard` is the file's name, `path` where it lies (relative to the store), `bytes` its size, `raw_bytes`
    that of its tensors decoded, `sha256` the file's.
    """

    shard: str
    path: str
    bytes: int
    raw_bytes: int
    sha256: str
    samples: int
    tokens: int
    layers: tuple[int, ...] = Field(strict=False)
    num_layers: int
    hidden_size: int
    dtype: str
    fingerprint_id: str
    job_id: str | None
    batch: int | None


def tensor_name(index: int, tensor: str) -> str:
    """Name of a sample's tensor in the container."""
    return f"{index:06d}.{tensor}"


def tensor_specs(header: ShardMeta | ShardHeader, tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape that each tensor of a sample of `tokens` rows has in this shard."""
    return {
        "token_ids": ("int32", (tokens,)),
        "loss_mask": ("uint8", (tokens,)),
        "hidden_states": (header.dtype, (tokens, len(header.layers), header.hidden_size)),
    }


def pack_metadata(meta: ShardMeta, samples: list[SampleInfo]) -> dict[str, str]:
    """The container's metadata: format, version, header and the header's sha256."""
    header = meta.model_dump()
    header["fingerprint_id"] = meta.fingerprint_id
    header["samples"] = [
        sample.model_dump(exclude={"tensors"} if sample.witness else {"tensors", "witness"})
        | {"tensors": {name: info.model_dump(exclude_none=True) for name, info in sample.tensors.items()}}
        for sample in samples
    ]
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"format": FORMAT, "version": VERSION, "header": text, "header_sha256": digest}


def parse_metadata(metadata: Mapping[str, str]) -> ShardHeader:
    """The checked header in a container's metadata.

    Raises `MalformedShard`, `UnsupportedShard` or `ChecksumMismatch` (of the header).
    """
    if metadata.get("format") != FORMAT:
        raise MalformedShard(f"not a shard: its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.get("version") != VERSION:
        version = metadata.get("version")
        raise UnsupportedShard(f"shard version {version!r} is unknown (known: {VERSION})", advice=_UPGRADE)
    text = metadata.get("header", "").encode("utf-8", "surrogatepass")
    if hashlib.sha256(text).hexdigest() != metadata.get("header_sha256"):
        raise ChecksumMismatch("the header is not the one that was written")
    try:
        header = ShardHeader.model_validate_json(text)
    except ValidationError as error:
        raise _refusal(error, text) from error
    _check(header)
    return header


def _refusal(error: ValidationError, text: bytes) -> ShardError:
    """Turn the first complaint about a header into the error that fits it."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "header"
    if first["type"] == "extra_forbidden":
        return UnsupportedShard(f"the header has an unknown field {where!r}", advice=_UPGRADE)
    if not first["loc"] and first["type"] == "value_error":
        fields = json.loads(text)
        if fields.get("codec") not in CODECS:
            return unknown_codec(str(fields.get("codec")))
        if fields.get("dtype") not in STORAGE_DTYPES:
            return UnsupportedShard(f"dtype {fields.get('dtype')!r} is unknown", advice=_UPGRADE)
    return MalformedShard(f"{where}: {first['msg']}")


def _check(header: ShardHeader) -> None:
    if header.fingerprint_id != fingerprint_id(header.fingerprint):
        raise MalformedShard(f"fingerprint_id {header.fingerprint_id!r} is not that of its fingerprint")
    ids = {sample.id for sample in header.samples}
    if len(ids) != len(header.samples):
        raise MalformedShard("two samples have the same id")
    for index, sample in enumerate(header.samples):
        try:
            _check_sample(header, sample)
        except ShardError as error:
            raise error.at(index=index, sample=sample.id) from error


def _check_sample(header: ShardHeader, sample: SampleInfo) -> None:
    if sample.prompt_len > sample.tokens:
        raise MalformedShard(f"prompt_len {sample.prompt_len} is over its {sample.tokens} tokens")
    if sample.witness is not None and sample.witness.witness().rows.stop > sample.tokens:
        raise MalformedShard(f"its witness speaks of rows past its {sample.tokens} tokens")
    if set(sample.tensors) != set(TENSORS):
        raise MalformedShard(f"its tensors are {sorted(sample.tensors)}, not {sorted(TENSORS)}")
    for name, (dtype, shape) in tensor_specs(header, sample.tokens).items():
        info = sample.tensors[name]
        if info.codec not in CODECS:
            raise unknown_codec(info.codec).at(tensor=name)
        if info.dtype not in TENSOR_DTYPES:
            raise UnsupportedShard(f"dtype {info.dtype!r} is unknown", tensor=name, advice=_UPGRADE)
        itemsize = TENSOR_DTYPES[dtype].itemsize
        count = math.prod(shape)
        problem = None
        if (info.dtype, info.shape) != (dtype, shape):
            problem = f"{info.dtype} {list(info.shape)} where {dtype} {list(shape)} is due"
        elif info.raw_bytes != count * itemsize:
            problem = f"raw_bytes {info.raw_bytes} where {count * itemsize} are due"
        elif info.codec == STORED and info.bytes != info.raw_bytes:
            problem = f"{info.bytes} bytes are stored where {info.raw_bytes} are due"
        elif (info.planes is not None) != (info.codec == PLANES_ZSTD1):
            problem = f"codec {info.codec} with planes {info.planes}"
        elif info.planes is not None and not _planes_fit(info, count, itemsize):
            problem = (
                f"planes {list(info.planes)} don't make {itemsize} planes of {count} bytes in {info.bytes}"
            )
        if problem:
            raise MalformedShard(problem, tensor=name)


def _planes_fit(info: TensorInfo, count: int, itemsize: int) -> bool:
    planes = info.planes or ()
    return (
        len(planes) == itemsize and sum(planes) == info.bytes and all(1 <= size <= count for size in planes)
    )
