"""What ``GET /v1/hidden_states/status`` answers, from the ranks' records and this process's own state."""

from __future__ import annotations

import os
from typing import Any

from taphouse import slices
from taphouse_tap import __version__
from taphouse_tap.api.auth import KeyRing
from taphouse_tap.api.service import Service, Tap

SHARED = ("layers", "num_layers", "hidden_size", "dtype", "max_model_len", "max_num_batched_tokens", "mode")


def status(service: Service, keys: KeyRing) -> dict[str, Any]:
    """The whole status. Reads the start's directory; never raises for what the ranks wrote."""
    reason = service.why_off()
    records = service.records()
    answer: dict[str, Any] = {
        "object": "hidden_states.status",
        "capture": "on" if reason is None else "off",
        "reason": reason,
        "pid": os.getpid(),
        "versions": {"tap": __version__},
        "key": keys.source,
        "breaker": _first_breaker(records),
        "counters": {"endpoint": dict(service.metrics.counts), "ranks": _summed(records)},
        "limits": _limits(service),
        "latency": service.latency.section(),
        "plugins": service.plugins,
        "ranks": records,
    }
    if records:
        answer.update({name: records[0].get(name) for name in SHARED})
        answer["versions"] = {**(records[0].get("versions") or {}), "tap": __version__}
    if service.start is not None:
        answer["start_id"] = service.start.start_id
        answer["start_dir"] = str(service.start.directory)
    if service.tap is not None:
        answer.update(_of_tap(service.tap))
    return answer


def _of_tap(tap: Tap) -> dict[str, Any]:
    claims = tap.start.claims()
    return {
        "seeds": tap.model.seeds,
        "fingerprint": tap.fingerprint,
        "fingerprint_id": slices.fingerprint_id(tap.fingerprint),
        "canary": tap.canary.result.as_dict(),
        "isolation": tap.isolation.status(),
        "in_flight": {
            "here": len(tap.collector.in_flight),
            "claims": len(claims),
            "claimed_bytes": sum(claim.nbytes for claim in claims),
        },
    }


def _limits(service: Service) -> dict[str, Any]:
    settings = service.settings
    return {
        "slice_dir_bytes": settings.slice_dir_limit_bytes,
        "in_flight": settings.max_in_flight,
        "stream_bytes": settings.stream_limit_bytes,
        "bytes_per_s": settings.max_bytes_per_s,
        "body_bytes": settings.max_body_bytes,
        "prompts": settings.max_prompts,
        "slice_ttl_s": settings.slice_ttl_s,
    }


def _first_breaker(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    for record in records:
        if record.get("breaker"):
            return {**record["breaker"], "dp_rank": record.get("dp_rank"), "tp_rank": record.get("tp_rank")}
    return None


def _summed(records: list[dict[str, Any]]) -> dict[str, float]:
    """Stage counters summed over the ranks; of `_max_` the largest."""
    total: dict[str, float] = {}
    for record in records:
        for name, value in (record.get("counters") or {}).items():
            if isinstance(value, (int, float)):
                before = total.get(name, 0)
                total[name] = max(before, value) if "_max_" in name else before + value
    return total
