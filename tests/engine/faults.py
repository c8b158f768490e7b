"""A worker extension for tests: the tap's own, plus RPCs that break it on purpose and mend it again.

It also gives vLLM a weight transfer engine, `file`, that needs no GPU.

`TEST_TAP_FAULT` breaks what happens while the engine starts: `import`, or `load_model:<rank>`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

FAULT = os.environ.get("TEST_TAP_FAULT", "")
if FAULT == "import":
    sys.modules["taphouse_tap.compat"] = None  # type: ignore[assignment]

from taphouse_tap.worker import HiddenStatesExtension  # noqa: E402


def _raise(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: E402

if "file" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(
        "file", "tests.engine.weights_from_file", "FileWeightTransferEngine"
    )

if FAULT.startswith("load_model:"):
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    from taphouse_tap import compat_model

    _find_stack = compat_model.find_stack

    def _find_stack_or_raise(*args: Any) -> Any:
        if get_tensor_model_parallel_rank() == int(FAULT.split(":")[1]):
            _raise()
        return _find_stack(*args)

    compat_model.find_stack = _find_stack_or_raise


class FaultyExtension(HiddenStatesExtension):
    """`taphouse_break(what, rank)` and `taphouse_mend()`, for `collective_rpc`."""

    def taphouse_break(self, what: str, rank: int | None = None) -> None:
        """Break one thing on one rank, or on all."""
        tap: Any = self._taphouse_tap
        if rank is None or tap.facts["tp_rank"] == rank:
            _undo.extend(getattr(_Breaks, what)(tap))

    def taphouse_mend(self) -> None:
        """Put everything back and close the breaker."""
        tap: Any = self._taphouse_tap
        while _undo:
            _undo.pop()()
        tap.steps._active.clear()
        tap.breaker.tripped, tap.breaker.reason, tap.breaker.trip_record = False, None, None


_undo: list[Callable[[], None]] = []


def _replace(owner: Any, name: str, new: Any) -> Callable[[], None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    return lambda: setattr(owner, name, old)


def _tapped(tap: Any, name: str, new: Callable[[Any], Any]) -> list[Callable[[], None]]:
    """Give the tapped modules another buffer than the one that is read."""
    undo: list[Callable[[], None]] = []
    for module in tap._taps._modules:
        old = module._buffers.get(name)
        if old is not None:
            module._buffers[name] = new(old)
            undo.append(lambda module=module, old=old: module._buffers.__setitem__(name, old))
    return undo


def _change_rows(tap: Any, change: Callable[[Any], None]) -> list[Callable[[], None]]:
    """Change staged rows (`marks` and `rows` of the area) before the writer is told of them."""
    staging = tap._staging
    move = staging.move

    def changed(runs: Any, at: int) -> Any:
        arrival = move(runs, at)
        span = slice(at, at + sum(count for _, count in runs))
        change(SimpleNamespace(marks=staging.area.marks[span], raw=staging.area.rows[span]))
        return arrival

    return [_replace(staging, "move", changed)]


class _Breaks:
    """What can be broken; each returns how to undo it."""

    @staticmethod
    def pace(tap: Any) -> list[Callable[[], None]]:
        """Nothing breaks: every step takes longer, so that what a test does meets a capture in flight."""
        before = tap.steps.before

        def slowly(scheduler_output: Any) -> None:
            time.sleep(0.02)
            before(scheduler_output)

        return [_replace(tap.steps, "before", slowly)]

    # Errors of ours, which must trip the breaker.

    @staticmethod
    def before_step(tap: Any) -> list[Callable[[], None]]:
        from taphouse_tap import compat

        return [_replace(compat, "row_count", _raise)]

    @staticmethod
    def after_step(tap: Any) -> list[Callable[[], None]]:
        from taphouse_tap import compat

        return [_replace(compat, "batch_rows", _raise)]

    @staticmethod
    def row_tap(tap: Any) -> list[Callable[[], None]]:
        return _tapped(tap, "_taphouse_rows", lambda old: old.new_zeros(()))

    @staticmethod
    def marks_tap(tap: Any) -> list[Callable[[], None]]:
        return _tapped(tap, "_taphouse_marks", lambda old: old.new_zeros(()))

    @staticmethod
    def writer(tap: Any) -> list[Callable[[], None]]:
        """The writer process meets an error of ours; it stays."""
        from taphouse_tap.rank.messages import Step

        step = tap._link.step

        def nonsense(told: Any) -> Any:
            return step(Step(told.at, told.arrival, [(number, "many", None) for number, *_ in told.parts]))

        return [_replace(tap._link, "step", nonsense)]

    @staticmethod
    def killed(tap: Any) -> list[Callable[[], None]]:
        """The writer process is gone; mending starts another."""
        tap._link.process.kill()

        def again() -> None:
            from taphouse_tap.rank.link import Link

            link = Link(tap._staging.area, tap.start.directory, tap._link._template, tap.breaker)
            link.start()
            tap._link = tap.steps._link = link

        return [again]

    @staticmethod
    def record(tap: Any) -> list[Callable[[], None]]:
        """One failure: the breaker's own publication gets through again."""
        write = tap.start.write_record

        def once(record: Any) -> None:
            tap.start.write_record = write
            _raise()

        return [_replace(tap.start, "write_record", once)]

    # Wrong data, which a verification must catch.

    @staticmethod
    def mapping(tap: Any) -> list[Callable[[], None]]:
        """Every request is given the rows one further on."""
        from taphouse_tap import compat

        whole = compat.batch_rows

        def shifted(*args: Any) -> Any:
            for request_id, first, count in whole(*args):
                if count > 1:
                    yield request_id, first + 1, count - 1
                else:
                    yield request_id, first, count

        return [_replace(compat, "batch_rows", shifted)]

    @staticmethod
    def swapped(tap: Any) -> list[Callable[[], None]]:
        """Two requests that compute as many rows in a step are given each other's: positions are right."""
        from taphouse_tap import compat

        whole = compat.batch_rows

        def exchanged(*args: Any) -> Any:
            rows = list(whole(*args))
            if len(rows) == 2 and rows[0][2] == rows[1][2]:
                rows = [(rows[0][0], *rows[1][1:]), (rows[1][0], *rows[0][1:])]
            return iter(rows)

        return [_replace(compat, "batch_rows", exchanged)]

    @staticmethod
    def positions(tap: Any) -> list[Callable[[], None]]:
        def reverse(rows: Any) -> None:
            rows.marks[:, 0] = rows.marks[::-1, 0].copy()

        return _change_rows(tap, reverse)

    @staticmethod
    def later(tap: Any) -> list[Callable[[], None]]:
        """Each generated row seems to be of the next position."""

        def shift(rows: Any) -> None:
            if len(rows.marks) == 1:
                rows.marks[:, 0] += 1

        return _change_rows(tap, shift)

    @staticmethod
    def chunk(tap: Any) -> list[Callable[[], None]]:
        """The second step's rows go missing."""
        from taphouse_tap import compat

        whole, calls = compat.batch_rows, iter(range(10**9))

        def without(*args: Any) -> Any:
            rows = list(whole(*args))
            return iter([] if next(calls) == 1 else rows)

        return [_replace(compat, "batch_rows", without)]

    @staticmethod
    def graph(tap: Any) -> list[Callable[[], None]]:
        """The forward runs, and writes nothing where the tap looks: as with a stale graph."""
        return _tapped(tap, "_taphouse_rows", lambda old: old.clone()) + _tapped(
            tap, "_taphouse_marks", lambda old: old.clone()
        )

    @staticmethod
    def one_layer(tap: Any) -> list[Callable[[], None]]:
        """One layer's rows are not written."""
        first = next(m for m in tap._taps._modules if "_taphouse_rows" in m._buffers)
        first._buffers["_taphouse_rows"] = tap._staging.rows.clone()
        return [lambda: first._buffers.__setitem__("_taphouse_rows", tap._staging.rows)]

    @staticmethod
    def wrong_rows(tap: Any) -> list[Callable[[], None]]:
        """Finite, complete, in place, and not what the model computed."""

        def negate(rows: Any) -> None:
            rows.raw.view(np.float32)[:] *= -1

        return _change_rows(tap, negate)

    @staticmethod
    def bit(tap: Any) -> list[Callable[[], None]]:
        """A bit of what was written flips before it is sealed."""
        from taphouse_tap.rank.messages import Finish

        link = tap._link
        put = link.put

        def flipping(message: Any) -> None:
            if isinstance(message, Finish):
                while link.rows_used:
                    time.sleep(0.001)
                part = tap.start.directory / f"{link._open[message.number].tag}.t{tap.facts['tp_rank']}.part"
                with part.open("r+b") as file:
                    file.seek(100)
                    byte = file.read(1)[0]
                    file.seek(100)
                    file.write(bytes([byte ^ 4]))
            put(message)

        return [_replace(link, "put", flipping)]
