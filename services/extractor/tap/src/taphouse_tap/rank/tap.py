"""The tap of one worker: installed after the model was loaded, before vLLM profiles and compiles it."""

from __future__ import annotations

from typing import Any

from taphouse.slices import Start, Trailer, open_start
from taphouse_tap import __version__, compat, compat_model
from taphouse_tap.errors import CaptureRefused
from taphouse_tap.settings import TapSettings, load_settings

from .breaker import Breaker
from .check import Checker
from .link import Link
from .record import Counters, RecordThread, counters_dict, versions
from .staging import Staging
from .steps import Steps
from .taps import Taps, faults
from .weights import Weights

_PROMPT_TOKENS = 1 << 20
"""Room for tokens of new prompts on their way to the writer; more where two prompts can be longer."""

_SPARE_SHARE = 2
"""Released slices may take one part in so many of the slice directory's limit, while nobody needs it."""


class WorkerTap:
    """Everything of ours in one worker. Capture is on when `steps` is set and the breaker is whole."""

    def __init__(self, worker: Any) -> None:
        self.breaker = Breaker()
        self.start: Start | None = None
        self.steps: Steps | None = None
        self.checker: Checker | None = None
        self.facts: dict[str, Any] = {}
        self._worker = worker
        self._counters = Counters()
        self._staging: Staging | None = None
        self._link: Link | None = None
        self._taps: Taps | None = None
        self._weights: Weights | None = None
        self._record: RecordThread | None = None

    def install(self) -> None:
        """Tap the loaded model. Never raises: where capture can't be right it stays off, with the reason."""
        try:
            settings = load_settings()
            ranks = compat.ranks(self._worker)
            self.facts = {"dp_rank": ranks.dp_rank, "tp_rank": ranks.tp_rank, "tp_size": ranks.tp_size}
            self.start = open_start(settings.slice_dir, compat.instance_id(self._worker))
        except Exception as error:
            self.breaker.trip("load_model", error)
            self._give_up()
            return
        sweep_after_s = settings.slice_ttl_s if ranks.tp_rank == 0 else None
        record = self._record = RecordThread(self.start, self.breaker, self._state, sweep_after_s, self._look)
        try:
            self._tap_model(settings, self.start, ranks, record)
        except CaptureRefused as error:
            self.breaker.refuse(str(error))
            self._give_up()
        except Exception as error:
            self.breaker.trip("load_model", error)
            self._give_up()
        try:
            record.start()
        except Exception as error:
            self.breaker.trip("record", error)

    def summary(self) -> dict[str, Any]:
        """Return where this rank's start is and whether it captures, for `taphouse_start`."""
        return {
            "start_id": self.start.start_id if self.start else None,
            "start_dir": str(self.start.directory) if self.start else None,
            "tp_rank": self.facts.get("tp_rank"),
            "dp_rank": self.facts.get("dp_rank"),
            "capture": "off" if self.breaker.tripped else "on",
            "reason": self.breaker.reason,
        }

    def weights_changing(self, how: str) -> None:
        """The engine's weights are about to change or to go away, by its method `how`. Never raises."""
        if self._weights is None or self.breaker.tripped:
            return
        try:
            self._weights.put_away(f"the engine's weights are changing or put away ({how})")
            if self.steps is not None:
                self.steps.fail_all(f"the engine's weights changed while it ran ({how})")
            self._publish()
        except Exception as error:
            self.breaker.trip(f"{how} (before)", error)

    def weights_changed(self, how: str) -> None:
        """Other weights are loaded, or the same are back: a new epoch begins. Never raises."""
        if self._weights is None or self.breaker.tripped:
            return
        try:
            self._weights.renew()
            self._publish()
        except Exception as error:
            self.breaker.trip(f"{how} (after)", error)

    def _epoch_now(self) -> int:
        """The weights' epoch, once a look at a few tensors has shown that nobody changed them unseen.

        Raises `CaptureRefused` while they are away.
        """
        assert self._weights is not None
        if self._weights.now.away is not None:  # their memory may be gone: reading it would end the engine
            raise CaptureRefused(self._weights.now.away)
        if not self._weights.look_again():
            self.weights_changing("unseen")
            self.weights_changed("unseen")
        return self._weights.epoch

    def _publish(self) -> None:
        if self._record is not None:
            self._record.publish()

    def _tap_model(
        self, settings: TapSettings, start: Start, ranks: compat.Ranks, record: RecordThread
    ) -> None:
        sizes = compat.model_facts(self._worker)
        dtype = str(sizes.dtype).removeprefix("torch.")
        self.facts.update(
            mode=compat.mode(self._worker),
            versions=versions(compat.version()),
            hidden_size=sizes.hidden_size,
            dtype=dtype,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
        )
        config = compat.tap_config(self._worker)
        if config.get("version") != __version__:
            raise CaptureRefused(
                f"--additional-config names tap version {config.get('version')!r}, installed is "
                f"{__version__!r}: a graph compiled with another tap could be reused; start with the flags "
                "that `python -m taphouse_tap launch-args` prints"
            )
        compat.check_mode(self._worker, allow_unknown_version=settings.allow_unknown_version)
        model = compat.model(self._worker)
        stack = compat_model.find_stack(model, sizes.dtype)
        layers = tapped_layers(config.get("layers"), len(stack.layers))
        width, left = divmod(sizes.hidden_size, ranks.tp_size)
        if left:
            raise CaptureRefused(f"{sizes.hidden_size} columns don't divide over {ranks.tp_size} ranks")
        self.facts.update(layers=layers, num_layers=len(stack.layers), width=width)
        device = next(model.parameters()).device
        staging = self._staging = Staging(
            (sizes.max_num_batched_tokens, len(layers), width),
            sizes.dtype,
            device,
            settings.pinned_limit_bytes,
            max(_PROMPT_TOKENS, 2 * sizes.max_model_len),
        )
        faults.report = self.breaker.trip
        column = ranks.tp_rank * width
        self._taps = Taps(stack, layers, staging.rows, staging.marks, column)
        if device.type == "cuda":
            memory = staging.memory
            compat.account_device_memory(self._worker, memory["buffer_bytes"] + memory["staging_bytes"])
        weights = self._weights = Weights(model, stack.norm, compat.identity(self._worker), dtype)
        self.checker = Checker(model, stack, start, device, self._epoch_now)
        start.spares.allow(settings.slice_dir_limit_bytes // _SPARE_SHARE)
        link = self._start_writer(start, staging)
        self.steps = Steps(
            self._worker,
            start.secret,
            staging=staging,
            weights=weights,
            link=link,
            breaker=self.breaker,
            counters=self._counters,
            changed=record.changed,
        )

    def _start_writer(self, start: Start, staging: Staging) -> Link:
        facts = self.facts
        template = Trailer(
            tag="",
            start_id=start.start_id,
            tap_version=__version__,
            tp_rank=facts["tp_rank"],
            tp_size=facts["tp_size"],
            dp_rank=facts["dp_rank"],
            layers=tuple(facts["layers"]),
            dtype=facts["dtype"],
            hidden_size=facts["hidden_size"],
            column_offset=facts["tp_rank"] * facts["width"],
            width=facts["width"],
            rows=0,
            prompt_len=0,
            weights_epoch=0,
            crc32=0,
            token_crc32=0,
        )
        link = Link(staging.area, start.directory, template, self.breaker)
        link.start()
        self._link = link
        return link

    def _look(self) -> None:
        if self._link is not None:
            self._link.look()

    def _state(self) -> dict[str, Any]:
        loaded = self._weights.now if self._weights is not None else None
        return {
            **self.facts,
            "model_fingerprint": loaded.fingerprint if loaded is not None else None,
            "weights_epoch": loaded.epoch if loaded is not None else None,
            "paused": loaded.away if loaded is not None else None,
            "in_flight": self._link.in_flight if self._link is not None else 0,
            "counters": counters_dict(
                self._counters, self._staging.area.words if self._staging is not None else None
            ),
            "memory": self._memory(),
        }

    def _memory(self) -> dict[str, int] | None:
        if self._staging is None or self._link is None:
            return None
        used = self._link.rows_used * self._staging.held_bytes
        return {**self._staging.memory, "pinned_bytes": used}

    def _give_up(self) -> None:
        if self._taps is not None:
            self._taps.remove()
        if self._link is not None:
            self._link.close()
        if self._staging is not None:
            self._staging.close()
        self._taps = self._staging = self._link = self.steps = None
        try:
            compat.mark_untapped(self._worker)
        except Exception as error:
            self.breaker.trip("load_model", error)


def tapped_layers(configured: Any, count: int) -> list[int]:
    """Return the layer ids to tap of a stack of `count` layers: ascending, `count` always among them.

    `configured` None means `(2, count // 2, count - 3)`. Raises `CaptureRefused` for an id out of [0, count].
    """
    if configured is None:
        configured = [i for i in (2, count // 2, count - 3) if 0 <= i < count]
    if not isinstance(configured, list) or not all(type(i) is int and 0 <= i <= count for i in configured):
        raise CaptureRefused(
            f"layers {configured!r} are not ids from 0 to {count}, the model's number of layers"
        )
    return sorted({*configured, count})
