"""The worker extension: `--worker-extension-cls taphouse_tap.worker.HiddenStatesExtension`.

vLLM imports this module in every worker before it builds the worker; importing it wraps `Worker.load_model`,
`Worker.execute_model` and the methods that change the loaded weights. Nothing here may stop an engine: a
failed import leaves vLLM as it is, and the extension's methods say why.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.taphouse")

_TAP = "_taphouse_tap"
_import_error: str | None = None


def _load_model(worker: Any) -> None:
    """Install the tap in a worker whose model was just loaded."""
    try:
        from .rank.tap import WorkerTap

        if getattr(worker, _TAP, None) is not None:
            getattr(worker, _TAP).breaker.refuse(
                "the model was loaded a second time, which the tap can't follow"
            )
            return
        tap = WorkerTap(worker)
        setattr(worker, _TAP, tap)
        tap.install()
    except Exception:
        logger.exception("Taphouse could not install its tap; serving goes on")


def _before(worker: Any, scheduler_output: Any) -> None:
    tap = getattr(worker, _TAP, None)
    if tap is not None and tap.steps is not None:
        tap.steps.before(scheduler_output)


def _after(worker: Any, scheduler_output: Any) -> None:
    tap = getattr(worker, _TAP, None)
    if tap is not None and tap.steps is not None:
        tap.steps.after(scheduler_output)


def _weights_changing(worker: Any, how: str) -> None:
    tap = getattr(worker, _TAP, None)
    if tap is not None:
        tap.weights_changing(how)


def _weights_changed(worker: Any, how: str) -> None:
    tap = getattr(worker, _TAP, None)
    if tap is not None:
        tap.weights_changed(how)


try:
    from . import compat

    compat.wrap_worker(compat.WorkerHooks(_load_model, _before, _after, _weights_changing, _weights_changed))
except Exception as error:
    _import_error = f"{type(error).__name__}: {error}"
    logger.exception("Taphouse could not hook into this vLLM; serving goes on")


class HiddenStatesExtension:
    """Methods that vLLM adds to its worker class, for `collective_rpc` off the hot path. None raises."""

    def taphouse_start(self) -> dict[str, Any]:
        """Return this rank's `start_id`, `start_dir`, ranks, and whether it captures and why not."""
        try:
            tap = getattr(self, _TAP, None)
            if tap is not None:
                return tap.summary()
            reason = _import_error or "the tap is not installed in this worker"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        return {
            "start_id": None,
            "start_dir": None,
            "tp_rank": None,
            "dp_rank": None,
            "capture": "off",
            "reason": reason,
        }

    def taphouse_check(
        self,
        tag: str,
        token_ids: list[int],
        rows: int,
        first: int | None = None,
        highest: list[int] | None = None,
    ) -> dict[str, Any]:
        """Check a sealed capture against the tokens of the engine: see `rank.check.Checker.check`."""
        try:
            tap = getattr(self, _TAP, None)
            if tap is None or tap.checker is None:
                return {"ok": False, "reason": self.taphouse_start()["reason"], "checked": 0}
            return tap.checker.check(tag, token_ids, rows, first, highest)
        except Exception as error:
            logger.warning("Taphouse's check of capture %s failed", tag, exc_info=True)
            return {"ok": False, "reason": f"{type(error).__name__}: {error}", "checked": 0}
