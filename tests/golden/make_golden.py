"""Makes the golden shards of this directory again: for a new format version only. Old ones stay readable.

python -m tests.golden.make_golden
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from taphouse.samples import Sample
from taphouse.shards import ShardMeta, encode_shard

DIRECTORY = Path(__file__).parent
DTYPES = ("bfloat16", "float32")
LAYERS = (2, 8, 13, 16)
HIDDEN = 24


def golden_states(tokens: int, offset: int, dtype: str) -> np.ndarray:
    """States [tokens, 4, 24] by integer arithmetic alone, so that every machine makes the same bits.

    Magnitudes from 2^-6 to 2^5 by channel, mantissas that look random; bfloat16 as uint16 bits.
    """
    place = np.arange(tokens * len(LAYERS) * HIDDEN, dtype=np.uint64) + np.uint64(offset + 1)
    noise = (place * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    sign = (noise >> np.uint64(31)) & np.uint64(1)
    exponent = np.uint64(121) + place % np.uint64(12)
    bits = (sign << np.uint64(31)) | (exponent << np.uint64(23)) | (noise & np.uint64(0x7FFFFF))
    wide = bits.astype(np.uint32).reshape(tokens, len(LAYERS), HIDDEN)
    return (wide >> 16).astype(np.uint16) if dtype == "bfloat16" else wide.view(np.float32)


def golden_samples(dtype: str) -> list[Sample]:
    """Three samples: a generated answer, a prompt alone, and one token."""
    samples = []
    for number, (tokens, prompt) in enumerate(((40, 25), (17, 17), (1, 1))):
        ids = (np.arange(tokens) * 7919 + number) % 49_152
        samples.append(
            Sample(
                id=("HumanEval/0", "prompt alone", "größe-1")[number],
                token_ids=ids.astype(np.int32),
                loss_mask=(np.arange(tokens) >= prompt).astype(np.uint8),
                hidden_states=golden_states(tokens, 10_000 * number, dtype),
                dtype=dtype,
                prompt_len=prompt,
                next_token_id=None if number == 1 else 11 + number,
                finish_reason=("length", None, "stop")[number],
            )
        )
    return samples


def golden_meta(dtype: str) -> ShardMeta:
    """The golden shards' meta."""
    return ShardMeta(
        layers=LAYERS,
        num_layers=16,
        hidden_size=HIDDEN,
        dtype=dtype,
        fingerprint={"config": "ab" * 32, "dtype": dtype, "revision": None, "weights": "cd" * 32},
        job_id="golden",
        batch=1,
        created_by="taphouse 0.1.0",
    )


def golden_path(dtype: str) -> Path:
    """File of the golden shard of a dtype."""
    return DIRECTORY / f"shard-v1-{dtype}.safetensors"


if __name__ == "__main__":
    for name in DTYPES:
        golden_path(name).write_bytes(encode_shard(golden_samples(name), golden_meta(name)))
