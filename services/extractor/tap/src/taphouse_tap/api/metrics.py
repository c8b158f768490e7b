"""What this API server's tap counted: in the status answer, and on vLLM's ``/metrics`` where possible.

vLLM serves prometheus_client's default registry, or with several API servers the sum over their shared
directory; counters of the default registry reach both.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.taphouse")

_HELP = {
    "requests": "Requests for hidden states",
    "refused": "Requests for hidden states answered with 4xx or 503",
    "failed": "Requests for hidden states answered with 500",
    "aborted": "Requests for hidden states whose caller left",
    "captures": "Prompts captured whole",
    "rows": "Rows (tokens) captured",
    "bytes": "Bytes of states captured, over all ranks",
    "proven": "Captures proven against the engine's own top tokens",
    "disproved": "Captures that were not what the engine computed",
    "expired": "Captures nobody consumed in time",
}


class Metrics:
    """Counters by name; `counts` is what the status route shows."""

    def __init__(self, registry: Any = None, *, publish: bool = True) -> None:
        """Register with ``registry`` (None: prometheus_client's default). Never raises."""
        self.counts = dict.fromkeys(_HELP, 0)
        self._published: dict[str, Any] = {}
        if publish:
            try:
                self._published = _register(registry)
            except Exception as error:
                logger.warning("Taphouse: no counters on /metrics: %s", error)

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        self.counts[name] += amount
        if name in self._published:
            self._published[name].inc(amount)


def _register(registry: Any) -> dict[str, Any]:
    import prometheus_client

    target = prometheus_client.REGISTRY if registry is None else registry
    return {
        name: prometheus_client.Counter(f"taphouse_{name}", text, registry=target)
        for name, text in _HELP.items()
    }
