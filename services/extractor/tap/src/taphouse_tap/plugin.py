"""The entry point of group ``vllm.endpoint_plugins``: loaded when ``VLLM_PLUGINS`` names ``taphouse``.

Nothing in here may stop the server: an error becomes a log line, and 503 with the reason on the tap's paths.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class HiddenStatesPlugin:
    """Adds the tap's routes to vLLM's API server (vLLM's ``EndpointPlugin`` protocol)."""

    name = "taphouse"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._app: Any = None
        self._endpoint: Any = None

    def attach_router(self, app: Any) -> None:
        """Put the tap's paths on the server's FastAPI ``app``."""
        try:
            from starlette.routing import Route

            from taphouse_tap.endpoint import Endpoint

            self._app, self._endpoint = app, Endpoint()
            for method, path in self._endpoint.paths:
                app.router.routes.append(Route(path, self._endpoint, methods=[method]))
        except Exception:
            logger.exception("taphouse: no routes for hidden states; the server goes on without them")

    async def init_state(self, engine_client: Any, state: Any, _args: Any) -> None:
        """Start the tap around the engine, and let its own key past the server's key check."""
        try:
            from taphouse_tap.assemble import assemble
            from taphouse_tap.middleware import HiddenStatesMiddleware

            if self._endpoint is None:
                return
            if engine_client is None:
                self._endpoint.problem = "this server has no engine"
                return
            assemble(self._endpoint, state)
            self._app.add_middleware(HiddenStatesMiddleware, endpoint=self._endpoint)
        except Exception:
            logger.exception("taphouse: the tap's endpoint did not start; the server goes on without it")
