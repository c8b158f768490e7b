"""The shard format: files of samples, compressed, checksummed and self-describing. `FORMAT.md` specifies it.

Write with `write_shard` (into a store), `ShardWriter` (to a path) or `encode_shard` (in memory); read with
`open_shard`; check with `verify_shard`.
"""

from taphouse.shards.codec import CODECS
from taphouse.shards.header import SampleInfo, ShardFacts, ShardHeader, ShardMeta, TensorInfo
from taphouse.shards.reader import MAX_SAMPLE_BYTES, Shard, describe_shard, open_shard
from taphouse.shards.verify import Finding, Report, verify_shard
from taphouse.shards.writer import (
    SHARD_DIRECTORY,
    ShardWriter,
    encode_shard,
    shard_name,
    shard_path,
    write_shard,
)

__all__ = [
    "CODECS",
    "MAX_SAMPLE_BYTES",
    "SHARD_DIRECTORY",
    "Finding",
    "Report",
    "SampleInfo",
    "Shard",
    "ShardFacts",
    "ShardHeader",
    "ShardMeta",
    "ShardWriter",
    "TensorInfo",
    "describe_shard",
    "encode_shard",
    "open_shard",
    "shard_name",
    "shard_path",
    "verify_shard",
    "write_shard",
]
