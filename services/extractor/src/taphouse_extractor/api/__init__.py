"""The HTTP API: `create_app` builds it from a `Context`; routers hold the routes."""

from taphouse_extractor.api.app import create_app
from taphouse_extractor.api.context import Context

__all__ = ["Context", "create_app"]
