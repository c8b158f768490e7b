"""A stand-in engine that answers at once: every capture is the same rows, sealed as a real slice.

    python -m benchmarks.service_bench.engine PORT SLICE_DIR --tokens 512 --hidden 576

Its rows look like hidden states: a few columns are much larger than the others, so that the codec finds about
what it finds in a model's.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.queue.fake_tap import Answer, FakeTap
from tests.queue.stand_in import Handler

from taphouse.slices import Claim, SliceWriter, Trailer, fingerprint_id, new_tag

LAYERS = (2, 15, 27, 30)


@dataclass
class BenchTap(FakeTap):
    """One start whose captures all hold the same `tokens` rows."""

    layers: tuple[int, ...] = LAYERS
    num_layers: int = 30
    tp_size: int = 1
    tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        self.start.spares.allow(1 << 30)
        self._rows = bfloat16((self.tokens, len(self.layers), self.hidden))
        self._ids = np.arange(self.tokens + 1, dtype=np.int32)
        self._said = self._ids.tolist()

    def status(self) -> dict[str, Any]:
        return {**super().status(), "dtype": "bfloat16"}

    def capture(self, _: dict[str, Any]) -> Answer:
        """Seal the rows under a new tag and answer."""
        tag = new_tag()
        claim = Claim(
            tag=tag,
            nbytes=self._rows.nbytes,
            created_at=time.time(),
            prompt_len=self.tokens,
            max_rows=self.tokens,
        )
        self.start.reserve(claim, 4 << 30)
        trailer = Trailer(
            tag=tag,
            start_id=self.start.start_id,
            tap_version="bench",
            tp_rank=0,
            tp_size=1,
            dp_rank=0,
            layers=self.layers,
            dtype="bfloat16",
            hidden_size=self.hidden,
            column_offset=0,
            width=self.hidden,
            rows=0,
            prompt_len=self.tokens,
            weights_epoch=0,
            crc32=0,
            token_crc32=0,
        )
        writer = SliceWriter(self.start.directory, trailer, self.tokens + 1)
        writer.write(0, self._rows)
        sealed = writer.seal(self._ids[:-1])
        assert sealed is not None
        item = {
            "index": 0,
            "tag": tag,
            "slices": [{"path": f"/elsewhere/{tag}.t0.slice", "tp_rank": 0, "crc32": sealed.crc32}],
            "token_ids": self._said,
            "prompt_len": self.tokens,
            "rows": self.tokens,
            "shape": [self.tokens, len(self.layers), self.hidden],
            "finish_reason": "length",
            "error": None,
        }
        return (
            200,
            {},
            {
                "start_id": self.start.start_id,
                "fingerprint": self.fingerprint,
                "fingerprint_id": fingerprint_id(self.fingerprint),
                "layers": list(self.layers),
                "num_layers": self.num_layers,
                "dtype": "bfloat16",
                "data": [item],
            },
        )


def bfloat16(shape: tuple[int, int, int]) -> NDArray[np.uint16]:
    """Made-up states, as the upper halves of float32."""
    chance = np.random.default_rng(7)
    scales = chance.lognormal(0.0, 1.0, shape[1:]).astype(np.float32)
    states = chance.standard_normal(shape, np.float32) * scales
    return np.ascontiguousarray((states.view(np.uint32) >> 16).astype(np.uint16))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("slice_dir", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=576)
    given = parser.parse_args()
    Handler.tap = BenchTap(given.slice_dir, hidden=given.hidden, tokens=given.tokens)
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
