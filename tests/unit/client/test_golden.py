"""The golden shards: files of earlier versions stay readable, and the writer's bytes stay what they are."""

from __future__ import annotations

import hashlib

import pytest
import zstandard
from tests.golden.make_golden import DTYPES, golden_meta, golden_path, golden_samples

from taphouse.shards import encode_shard, open_shard, verify_shard

SHA256 = {
    "bfloat16": "3a4892cd8a7f4db13d4ac69de7f822ae229f8bc61f4e2b759653f24cbf030390",
    "float32": "25ab90fd16daaae014b093d73d8540f18f31cdeab293286c9ab68eec1ec929c5",
}
WRITTEN_BY_ZSTD = (1, 5, 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_golden_shard_holds_what_was_put_into_it(dtype: str) -> None:
    body = golden_path(dtype).read_bytes()
    assert hashlib.sha256(body).hexdigest() == SHA256[dtype]
    assert verify_shard(golden_path(dtype), sha256=SHA256[dtype]).ok
    with open_shard(golden_path(dtype)) as shard:
        assert shard.header.meta == golden_meta(dtype)
        for got, given in zip(shard, golden_samples(dtype), strict=True):
            assert got.equals(given)


@pytest.mark.skipif(zstandard.ZSTD_VERSION != WRITTEN_BY_ZSTD, reason="another zstd may compress differently")
@pytest.mark.parametrize("dtype", DTYPES)
def test_encoding_the_same_samples_again_gives_the_same_bytes(dtype: str) -> None:
    with open_shard(golden_path(dtype)) as shard:
        again = encode_shard(shard, shard.header.meta)
    assert again == golden_path(dtype).read_bytes()
