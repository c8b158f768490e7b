"""Spans for OpenTelemetry, where the settings name a collector; otherwise nothing.

A span a batch, made in its work-horse: job, batch, rows, stages' seconds, and the kind of error that ended
it. This is the only file that names OpenTelemetry. No prompt, no sample id and no message of an
error is in a span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from taphouse_extractor import __version__
from taphouse_extractor.errors import MissingExtra, error_code

__all__ = ["Tracer", "tracer_to"]

EXPORT_TIMEOUT_S = 2
Note = Callable[..., None]


class Tracer:
    """Makes spans and hands each to `exporter` as it ends; without one it does nothing."""

    def __init__(self, exporter: Any = None) -> None:
        self._tracer: Any = None
        if exporter is not None:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor

            resource = Resource.create({"service.name": "taphouse-extractor", "service.version": __version__})
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(SimpleSpanProcessor(exporter))
            self._tracer = provider.get_tracer("taphouse_extractor")

    @contextmanager
    def span(self, name: str, **attributes: str | int | float) -> Iterator[Note]:
        """A span around what is inside, which may add attributes by calling what it is given."""
        if self._tracer is None:
            yield lambda **_: None
            return
        quiet = {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(name, attributes=_named(attributes), **quiet) as span:
            try:
                yield lambda **more: span.set_attributes(_named(more))
            except BaseException as error:
                from opentelemetry.trace import StatusCode

                span.set_status(
                    StatusCode.ERROR, error_code(error) if isinstance(error, Exception) else "ended"
                )
                raise


def tracer_to(endpoint: str | None) -> Tracer:
    """Spans to a collector's OTLP/HTTP endpoint; None: no spans.

    A collector that is away costs each span two seconds at most. Raises `MissingExtra` without the packages.
    """
    if endpoint is None:
        return Tracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise MissingExtra(
            "otlp_endpoint needs OpenTelemetry: pip install taphouse-extractor[otel]"
        ) from error
    return Tracer(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"taphouse.{name}": value for name, value in attributes.items()}
