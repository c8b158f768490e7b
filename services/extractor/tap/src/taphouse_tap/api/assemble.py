"""Composition root of the API side: builds the service for one server and hands it to the endpoint."""

from __future__ import annotations

import logging
from typing import Any

from taphouse_tap.api.auth import KeyRing
from taphouse_tap.api.endpoint import Endpoint

logger = logging.getLogger("vllm.taphouse")


def assemble(endpoint: Endpoint, state: Any) -> None:
    """Build the tap around the engine in ``state`` (``app.state`` of vLLM's server) and start it.

    Never raises: what went wrong becomes the endpoint's 503. A second call changes nothing.
    """
    if endpoint.service is not None:
        return
    try:
        from taphouse_tap import compat_server, compat_timing
        from taphouse_tap.api.latency import LatencyByClass
        from taphouse_tap.api.latency_reports import LatencyReports
        from taphouse_tap.api.metrics import LatencyMetrics, Metrics
        from taphouse_tap.api.service import Service
        from taphouse_tap.settings import load_settings

        settings = load_settings()
        endpoint.keys = KeyRing([settings.key() or ""], compat_server.server_keys(state))
        server, latency = compat_server.VllmServer(state), LatencyByClass()
        compat_timing.time_requests(state.engine_client, latency)
        endpoint.service = Service(settings, server, Metrics(), LatencyReports(latency, LatencyMetrics()))
        endpoint.service.begin()
    except Exception as error:
        logger.exception("Taphouse's endpoint did not start; the server goes on without it")
        endpoint.problem = f"the endpoint did not start: {type(error).__name__}: {error}"
