"""The tap's front door: a pure ASGI middleware that answers the tap's paths and passes everything else on.

Engines without ``vllm.endpoint_plugins`` name it themselves: ``--middleware
taphouse_tap.middleware.HiddenStatesMiddleware``. Newer engines get it from the plugin. Either way it is the
outermost layer: vLLM checks ``/v1`` against the server's keys further in, where a key of the tap's own would
be refused.
"""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from taphouse_tap.api.assemble import assemble
from taphouse_tap.api.endpoint import Endpoint, route_path

logger = logging.getLogger("vllm.taphouse")


class HiddenStatesMiddleware:
    """Answers the tap's paths. Finds the engine in ``app.state`` when the server starts."""

    def __init__(self, app: ASGIApp, endpoint: Endpoint | None = None) -> None:
        """Wrap ``app``. Without an ``endpoint`` one is made, and assembled when the server starts."""
        self.app = app
        self.endpoint = Endpoint() if endpoint is None else endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, pass on, or (for the lifespan) start and stop the tap around the server."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "http" and self.endpoint.takes(scope["method"], route_path(scope)):
            await self.endpoint(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "app" in scope:
            assemble(self.endpoint, scope["app"].state)
        try:
            await self.app(scope, receive, send)
        finally:
            if self.endpoint.service is not None:
                try:
                    await self.endpoint.service.close()
                except Exception:
                    logger.exception("Taphouse: stopping the tap failed")
