"""The composition root of the trainer, and its command ``taphouse-trainer``.

Exit status: 0 when training ended as asked (a limit, the end of the data, SIGTERM or SIGINT, each after a
checkpoint), 1 when it can't go on, 2 when the settings are wrong.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from pydantic import ValidationError

from taphouse import logs
from taphouse.errors import StoreBusy, TaphouseError
from taphouse.ledger import Ledger
from taphouse.service_settings import settings_problems
from taphouse.store import LocalStore, Store
from taphouse.store.identity import begun
from taphouse_trainer.batches import Packing, torch_dtype
from taphouse_trainer.checkpoint import Checkpoints, Interval, Stored, TrainingState
from taphouse_trainer.draft import Draft, DraftShape, Objective, library_mapping
from taphouse_trainer.errors import AlreadyRunning, SettingsConflict, TrainerError
from taphouse_trainer.health import HealthServer, Metrics
from taphouse_trainer.loop import Limits, Trainer
from taphouse_trainer.optimizer import Optimizer, Schedule
from taphouse_trainer.progress import Progress, StepLog
from taphouse_trainer.resume import check_resume
from taphouse_trainer.settings import Settings, load_settings
from taphouse_trainer.shard_gate import ShardGate
from taphouse_trainer.shard_stream import HeldOut, ShardStream, StreamPolicy, Waiting
from taphouse_trainer.verifier import Verifier, read_verifier
from taphouse_trainer.vocabulary import (
    TokenCounts,
    Vocabulary,
    full_vocabulary,
    load_vocabulary,
    make_vocabulary,
)

log = logging.getLogger(__name__)

_FLEX_BLOCK = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse settings, train, and turn errors into one readable line."""
    logs.set_up("text")
    try:
        settings = load_settings(sys.argv[1:] if arguments is None else arguments)
    except ValidationError as e:
        for line in settings_problems(e, Settings):
            print(f"taphouse-trainer: {line}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as e:
        print(f"taphouse-trainer: {e}", file=sys.stderr)
        return 2
    logs.set_up(settings.log_format)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        log.info("ended: %s", run(settings, stop))
        return 0
    except SettingsConflict as e:
        log.error("%s", e)
        return 2
    except (TrainerError, TaphouseError, OSError) as e:
        log.error("%s", e)
        return 1


def run(settings: Settings, stop: threading.Event) -> str:
    """Train until a limit, the end of the data, or ``stop``; returns which it was.

    Raises:
        TrainerError, TaphouseError: it can't go on; the message says why.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    device = _device(settings)
    objective = Objective(settings.loss, settings.step_decay)
    store = LocalStore(settings.store, create=False)
    begun(store)
    verifier = read_verifier(settings.target)
    ledger = Ledger(store)
    checkpoints = Checkpoints(
        settings.output, settings.keep_checkpoints, torch_dtype(verifier.final_norm.dtype)
    )
    with ExitStack() as stack:
        stack.enter_context(checkpoints.owned())
        _own_name(stack, store, settings.name)
        stored = checkpoints.latest()
        if stored:
            check_resume(stored, settings, verifier, ledger)
        gate = ShardGate(store, verifier, stored.state.layers if stored else settings.layers)
        metrics = Metrics()
        steps = StepLog(settings.output / "metrics.jsonl")
        progress = Progress(
            store, ledger, name=settings.name, steps=steps, metrics=metrics, refused=gate.refused
        )
        server = HealthServer(settings.host, settings.port, metrics, progress.health)
        stack.callback(server.close)
        server.start()
        log.info("health and metrics on http://%s:%d", settings.host, server.port)
        references = stored.state.held_out if stored else ()
        held_out = HeldOut(settings.held_out_fraction, settings.held_out_samples, references)
        stream = ShardStream(
            ledger, gate, held_out, policy=_policy(settings), waiting=_waiting(stop, progress)
        )
        vocabulary = stored.vocabulary if stored else _vocabulary(settings, verifier, stream, progress)
        if vocabulary is None or gate.layers is None:
            progress.close("stopped")
            return "stopped before training began"
        draft = _draft(settings, verifier, vocabulary, objective, layers=gate.layers, device=device)
        trainer = Trainer(
            stream=stream,
            held_out=held_out,
            packing=_packing(settings, device),
            draft=draft,
            optimizer=_optimizer(settings, draft),
            checkpoints=checkpoints,
            progress=progress,
            limits=Limits(
                settings.evaluate_every_steps, settings.stop_after_steps, settings.stop_after_samples
            ),
            interval=Interval(settings.checkpoint_every_steps, settings.checkpoint_every_s),
            stopping=stop.is_set,
        )
        ending = trainer.run(_begin(settings, verifier, trainer, stored))
        progress.close(ending)
        return ending


def _own_name(stack: ExitStack, store: Store, name: str) -> None:
    """Be the one trainer of this name in the store, until ``stack`` ends or this process does."""
    try:
        stack.enter_context(store.lock(f"consumers/{name}.lock", wait=False))
    except StoreBusy as e:
        raise AlreadyRunning(
            f"another trainer is at work under the name {name!r} in this store, and two would overwrite "
            "each other's record; give this one its own --name, or end the other"
        ) from e


def _begin(settings: Settings, verifier: Verifier, trainer: Trainer, stored: Stored | None) -> TrainingState:
    """Where training goes on: the stored state, restored, or a fresh one, saved as checkpoint-0."""
    if stored:
        state = stored.state
        trainer.checkpoints.restore(stored, trainer.draft, trainer.optimizer)
        trainer.interval.mark(state.step)
        log.info("resumed from %s", stored.path)
    else:
        state = TrainingState(trainer.draft.shape.layers, settings.pinned(), verifier.config_sha256)
        trainer.save(state)
    acknowledged = trainer.stream.acknowledged(state.position)
    trainer.progress.resumed(state.step, state.samples, state.tokens, state.position, acknowledged)
    return state


def _device(settings: Settings) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsConflict("device is cuda, and torch finds no CUDA device: use device=cpu or auto")
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def _policy(settings: Settings) -> StreamPolicy:
    return StreamPolicy(
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        replay_after_s=settings.replay_after_s,
        stop_when_idle_s=settings.stop_when_idle_s,
        poll_s=settings.poll_s,
        seed=settings.seed,
    )


def _waiting(stop: threading.Event, progress: Progress) -> Waiting:
    def sleep(seconds: float) -> bool:
        return stop.wait(seconds) if seconds else stop.is_set()

    return Waiting(time.monotonic, sleep, progress.waiting)


def _vocabulary(
    settings: Settings, verifier: Verifier, stream: ShardStream, progress: Progress
) -> Vocabulary | None:
    """A given mapping, or one made from what landed; ``None`` when told to stop first.

    Also when a mapping is given, one shard must have landed: it says which layers there are.
    """
    size = min(settings.draft_vocab_size, verifier.vocab_size)
    given = load_vocabulary(settings.vocabulary) if settings.vocabulary else None
    if size == verifier.vocab_size:
        given = full_vocabulary(size)
    if given:
        given.check(size, verifier.vocab_size)
    progress.phase("waiting for shards" if given else "counting tokens")
    counts = TokenCounts(verifier.vocab_size)
    if not stream.count_tokens(counts, 1 if given else settings.vocabulary_min_tokens):
        return None
    if given:
        return given
    log.info(
        "mapping %d of %d tokens, from %d trained tokens", size, verifier.vocab_size, counts.trained_tokens
    )
    return make_vocabulary(counts, size, verifier.vocab_size, library_mapping)


def _draft(
    settings: Settings,
    verifier: Verifier,
    vocabulary: Vocabulary,
    objective: Objective,
    *,
    layers: tuple[int, ...],
    device: torch.device,
) -> Draft:
    low_precision = settings.dtype == "bfloat16" or (settings.dtype == "auto" and device.type == "cuda")
    return Draft(
        verifier,
        vocabulary,
        DraftShape(
            layers=layers,
            num_layers=settings.draft_layers,
            ttt_steps=settings.ttt_steps,
            generation=settings.generation,
            sliding_window=settings.sliding_window,
        ),
        objective,
        device=device,
        autocast=torch.bfloat16 if low_precision else None,
    )


def _optimizer(settings: Settings, draft: Draft) -> Optimizer:
    return Optimizer(
        (p for _, p in draft.trainable()),
        Schedule(settings.lr, settings.warmup_steps, settings.lr_decay_steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )


def _packing(settings: Settings, device: torch.device) -> Packing:
    """Flex attention (CUDA) works on whole blocks of rows."""
    multiple = _FLEX_BLOCK if device.type == "cuda" else 1
    return Packing(settings.sequence_length, settings.ttt_steps, multiple)


if __name__ == "__main__":
    sys.exit(main())
