"""The entry point of group ``vllm.endpoint_plugins``: loaded when ``VLLM_PLUGINS`` names ``taphouse``.

Nothing in here may stop the server: an error becomes a log line, and 503 with the reason on the tap's paths.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.taphouse")


class HiddenStatesPlugin:
    """Adds the tap's routes to vLLM's API server (vLLM's ``EndpointPlugin`` protocol)."""

    name = "taphouse"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._endpoint: Any = None

    def attach_router(self, app: Any) -> None:
        """Put the tap's front door around the server's FastAPI ``app``.

        The stack of middlewares is wrapped when it is built, and not added to: vLLM adds its check of keys
        after this call, and builds the stack before `init_state`.
        """
        try:
            from taphouse_tap.api.endpoint import Endpoint
            from taphouse_tap.middleware import HiddenStatesMiddleware

            build, endpoint = app.build_middleware_stack, Endpoint()
            app.build_middleware_stack = lambda: HiddenStatesMiddleware(build(), endpoint)
            self._endpoint = endpoint
        except Exception:
            logger.exception("Taphouse adds no routes for hidden states; the server goes on without them")

    async def init_state(self, engine_client: Any, state: Any, _args: Any) -> None:
        """Start the tap around the engine."""
        if self._endpoint is None:
            return
        if engine_client is None:
            self._endpoint.problem = "this server has no engine"
            return
        try:
            from taphouse_tap.api.assemble import assemble

            assemble(self._endpoint, state)
        except Exception as error:
            logger.exception("Taphouse's endpoint did not start; the server goes on without it")
            self._endpoint.problem = f"the endpoint did not start: {type(error).__name__}: {error}"
