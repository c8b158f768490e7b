"""vLLM's internals that requests are timed by: the output processor of an API server's engine client.

`compat.py` has the workers' internals, `compat_server.py` the rest of the API server's. Every route's every
request passes here, streaming or not, with statistics or without. Touched:

=====================================================  =============  =============
name                                                   0.22.1         0.32.0
=====================================================  =============  =============
``AsyncLLM.output_processor``, ``.request_states``     there          there
``.add_request(request, …)``, called for every         there          there
sequence, and for more input of a streaming request
``._update_stats_from_output(state, output, …)``,      there          there
called before ``state`` takes the output in
``._update_stats_from_finished(state, reason, …)``     there          there
``.abort_requests(ids, internal)`` → ids aborted       there          there
``.propagate_error(error)``                            there          there
``RequestState.request_id``, ``.streaming_input``,     there          there
``.stats.queued_ts``, ``.scheduled_ts``
``EngineCoreOutput.new_token_ids``,                    there          there
``.finish_reason``
``EngineCoreRequest.request_id``,                      there          there
``.sampling_params.extra_args``
``str(FinishReason)``: "error", "abort"                there          there
=====================================================  =============  =============
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import monotonic
from typing import Any

from taphouse_tap.api.latency import ABORTED, FAILED, FINISHED, LatencyByClass


def time_requests(client: Any, latency: LatencyByClass) -> None:
    """Have ``latency`` see every request of the engine client from now on. Never raises.

    vLLM's methods run first, once, and what they return or raise is passed on. An error of ours turns
    ``latency`` off and says so there.
    """
    try:
        processor = client.output_processor
        hooks = _Hooks(processor.request_states, latency)
        wrapped = {
            name: _then(getattr(processor, name), note, latency)
            for name, note in (
                ("add_request", hooks.added),
                ("_update_stats_from_output", hooks.output),
                ("_update_stats_from_finished", hooks.finished),
                ("abort_requests", hooks.aborted),
                ("propagate_error", hooks.failed),
            )
        }
        for name, method in wrapped.items():
            setattr(processor, name, method)
    except Exception as error:
        latency.turn_off(f"this engine client can't be timed: {type(error).__name__}: {error}")


def _then(method: Callable[..., Any], note: Callable[..., None], latency: LatencyByClass) -> Any:
    """``method``, and after it ``note``, which gets the answer and the same arguments."""

    @functools.wraps(method)
    def both(*args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        if latency.problem is None:
            try:
                note(answer, *args, **kwargs)
            except Exception as error:
                latency.turn_off(f"{note.__name__}: {type(error).__name__}: {error}")
        return answer

    return both


class _Hooks:
    """What each of the methods means. ``states`` are the processor's own, by request id."""

    def __init__(self, states: Any, latency: LatencyByClass) -> None:
        self._states = states
        self._latency = latency

    def added(self, _answer: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        """A sequence arrived, or the last input of a streaming request whose outputs had all come."""
        if request.request_id in self._states:
            params = request.sampling_params
            extra_args = None if params is None else params.extra_args
            self._latency.arrived(request.request_id, extra_args, monotonic())
        else:
            self._latency.ended(request.request_id, FINISHED, monotonic())

    def output(self, _answer: Any, state: Any, output: Any, *_args: Any, **_kwargs: Any) -> None:
        """One output of the engine: no token while a pooling request runs, several with drafts."""
        count = len(output.new_token_ids)
        if count and self._latency.tokens(state.request_id, count, monotonic()):
            stats = state.stats
            if stats is not None and 0 < stats.queued_ts <= stats.scheduled_ts:
                self._latency.queued(state.request_id, stats.scheduled_ts - stats.queued_ts)
        if output.finish_reason is not None and state.streaming_input:
            self._latency.waits(state.request_id)

    def finished(self, _answer: Any, state: Any, reason: Any, *_args: Any, **_kwargs: Any) -> None:
        """The engine ended a request. One that its client aborted no longer comes here."""
        outcome = FAILED if str(reason) in ("error", "abort") else FINISHED
        self._latency.ended(state.request_id, outcome, monotonic())

    def aborted(self, request_ids: list[str], *_args: Any, **_kwargs: Any) -> None:
        """The client left."""
        for request_id in request_ids:
            self._latency.ended(request_id, ABORTED, monotonic())

    def failed(self, _answer: Any, *_args: Any, **_kwargs: Any) -> None:
        """The engine died, or its outputs could not be processed."""
        self._latency.all_failed(monotonic())
