"""The Python client of the extractor's API.

    with Taphouse("http://127.0.0.1:8900", token="...") as taphouse:
        job = taphouse.enqueue(Path("rows.jsonl"), JobOptions(max_tokens=256))
        print(taphouse.queue().depth)

Synchronous, one connection pool, safe to share between threads. Every failure is one of `taphouse.errors`.
"""

from __future__ import annotations

from taphouse.client.api import Taphouse

__all__ = ["Taphouse"]
