"""Samples in training order, followed from the ledger with a position that can be saved.

An **epoch** is one pass over the ledger. The first follows it from entry 1, in order, as shards land. When
a pass has caught up and nothing new landed for a while, the next begins: it takes the entries behind it in
a shuffled order and then again whatever lands. Within an epoch every sample comes exactly once. Within a
shard the order is shuffled too. All orders follow from the seed by hashing, so a position of four numbers
is all there is to save.

Samples whose id hashes below the held-out fraction are never trained on; the first of them become the set
that held-out loss is measured on.

No torch here, and no clock of its own: time comes in, so that tests don't wait.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from taphouse.errors import LedgerError
from taphouse.ledger import Ledger, LedgerEntry
from taphouse.samples import Sample
from taphouse_trainer.errors import ShardDamaged
from taphouse_trainer.shard_gate import Accepted, ShardGate
from taphouse_trainer.vocabulary import TokenCounts


@dataclass(frozen=True)
class Position:
    """Where to go on: ``visited`` entries of the epoch and ``offset`` samples of the next one are behind.

    The epoch's first ``head`` entries are those there were when it began, in shuffled order.
    """

    epoch: int = 0
    head: int = 0
    visited: int = 0
    offset: int = 0

    @property
    def cursor(self) -> int:
        """Ledger entries that were reached at least once."""
        return max(self.head, self.visited)

    @property
    def begun(self) -> int:
        """The last ledger entry that a sample was taken from; 0: none."""
        return max(self.head, self.visited + (self.offset > 0))

    def next_entry(self) -> Position:
        """At the start of the following entry."""
        return replace(self, visited=self.visited + 1, offset=0)

    def next_epoch(self) -> Position:
        """At the start of the epoch after the one that ends here."""
        return Position(self.epoch + 1, head=self.visited)


@dataclass(frozen=True)
class Drawn:
    """A sample to train on, its layer columns (see ``Accepted``), and the position after it."""

    sample: Sample
    columns: tuple[int, ...]
    position: Position


@dataclass(frozen=True)
class StreamPolicy:
    """When passes begin and end. Times in seconds.

    ``epochs``: passes at most, ``None`` for any number; the last one follows the ledger on.
    ``replay_after_s``: how long nothing new must have landed before the next pass begins.
    ``stop_when_idle_s``: how long nothing new must have landed, in the last pass, for the stream to end;
    ``None``: never.
    """

    batch_size: int = 4
    epochs: int | None = 1
    replay_after_s: float = 30.0
    stop_when_idle_s: float | None = None
    poll_s: float = 0.5
    seed: int = 0


class HeldOut:
    """Which samples stay out of training, and references (ledger entry, index) to the first ``limit`` of
    them.
    """

    def __init__(self, fraction: float, limit: int, references: Sequence[tuple[int, int]] = ()) -> None:
        self.references = [(int(seq), int(index)) for seq, index in references]
        self._fraction = fraction
        self._limit = limit

    def holds(self, sample_id: str) -> bool:
        """Whether a sample is held out, by the hash of its id alone.

        The hash is the trainer's own: data that was split by a plain hash of the ids still splits here.
        """
        return _unit(f"held out of training/{sample_id}") < self._fraction

    def note(self, seq: int, index: int) -> None:
        """Remember a held-out sample, while there is room."""
        if len(self.references) < self._limit and (seq, index) not in self.references:
            self.references.append((seq, index))


class _Turn(enum.Enum):
    MORE = "more"
    NEXT_EPOCH = "next epoch"
    END = "end"


@dataclass
class Waiting:
    """How to wait: ``sleep(s)`` returns True when it is time to stop; ``beat`` is called at every turn."""

    clock: Callable[[], float]
    sleep: Callable[[float], bool]
    beat: Callable[[], None] = field(default=lambda: None)


class ShardStream:
    """Draws batches of samples from the shards that the ledger names."""

    def __init__(
        self, ledger: Ledger, gate: ShardGate, held_out: HeldOut, *, policy: StreamPolicy, waiting: Waiting
    ) -> None:
        self._ledger = ledger
        self._gate = gate
        self._held_out = held_out
        self._policy = policy
        self._waiting = waiting
        self._newest = 0
        self._newest_at = waiting.clock()
        self._order: tuple[Position, list[int]] = (Position(), [])

    def batches(self, start: Position) -> Iterator[list[Drawn]]:
        """Batches from ``start`` on; blocks until shards land; ends when told to stop or when the policy
        says so.

        A batch is cut short only where an epoch or the stream ends.
        """
        batch: list[Drawn] = []
        for drawn in self._draws(start):
            if drawn is not None:
                batch.append(drawn)
            if batch and (drawn is None or len(batch) == self._policy.batch_size):
                yield batch
                batch = []

    def acknowledged(self, position: Position) -> int:
        """How many of the first ledger entries nothing is trained on any more after ``position``."""
        return position.visited if self._is_last(position) and position.visited >= position.head else 0

    def reached_at(self, position: Position) -> float | None:
        """When the last ledger entry that was read from was made; ``None``: none was."""
        entry = self._ledger.entry(position.begun) if position.begun else None
        return entry.created_at if entry is not None else None

    def count_tokens(self, counts: TokenCounts, enough: int) -> bool:
        """Count the tokens of landed training samples until ``enough`` trained ones were seen.

        Returns False when told to stop before. Settles for fewer where the stream itself would end.
        """
        seq = 1
        while counts.trained_tokens < enough:
            if self._waiting.sleep(0):
                return False
            entry = self._entry(seq)
            if entry is None:
                if self._wait(last_epoch=True) is _Turn.END:
                    return counts.trained_tokens > 0
                continue
            for index, sample in enumerate(self._gate.inspect(entry)):
                if self._held_out.holds(sample.id):
                    self._held_out.note(seq, index)
                else:
                    counts.add(sample.token_ids, sample.loss_mask)
            seq += 1
            self._waiting.beat()
        return True

    def held_out_samples(self) -> Iterator[Drawn]:
        """The held-out samples that can still be read."""
        for seq, index in self._held_out.references:
            entry = self._ledger.entry(seq)
            accepted = self._gate.examine(entry) if entry else None
            if entry is None or accepted is None or not self._is_held_out(accepted, index):
                continue
            try:
                yield Drawn(self._gate.read(entry, index), accepted.columns, Position())
            except ShardDamaged as e:
                self._gate.refuse(entry, e)

    def _draws(self, position: Position) -> Iterator[Drawn | None]:
        """Samples in order; ``None`` where an epoch or the stream ends."""
        trained_in_epoch = position.visited > 0
        while not self._waiting.sleep(0):
            seq = self._seq(position)
            entry = self._entry(seq)
            if entry is None and position.visited < position.head:
                raise LedgerError(
                    f"ledger entry {seq} is gone", advice="Restore the ledger, or train into a new output"
                )
            if entry is None:
                turn = self._wait(last_epoch=self._is_last(position) or not trained_in_epoch)
                if turn is not _Turn.MORE:
                    yield None
                if turn is _Turn.END:
                    return
                if turn is _Turn.NEXT_EPOCH:
                    position, trained_in_epoch = position.next_epoch(), False
                continue
            for drawn in self._samples(entry, position):
                trained_in_epoch = True
                yield drawn
            position = position.next_entry()

    def _entry(self, seq: int) -> LedgerEntry | None:
        """The entry, ``None`` while it has not landed.

        Raises:
            LedgerError: later ones have, so it is gone, and waiting for it would never end.
        """
        entry = self._ledger.entry(seq)
        if entry is None and self._ledger.entry(seq + 1) is not None:
            entry = self._ledger.entry(seq)  # it may have landed between the two looks
            if entry is None:
                raise LedgerError(
                    f"ledger entry {seq} is gone, and {seq + 1} is there",
                    advice="Restore the ledger directory from a copy",
                )
        return entry

    def _samples(self, entry: LedgerEntry, position: Position) -> Iterator[Drawn]:
        accepted = self._gate.examine(entry)
        if accepted is None:
            now = self._ledger.entry(entry.seq)
            if now is not None and now.shard != entry.shard:  # written anew since the entry was read
                yield from self._samples(now, position)
            return
        order = _shuffled(
            range(len(accepted.sample_ids)), f"{self._policy.seed}/{position.epoch}/{entry.seq}"
        )
        try:
            with self._gate.reading(entry) as shard:
                for n, index in enumerate(order[position.offset :], start=position.offset + 1):
                    if self._is_trained_on(accepted, index):
                        after = replace(position, offset=n) if n < len(order) else position.next_entry()
                        yield Drawn(shard[index], accepted.columns, after)
        except ShardDamaged as e:
            self._gate.refuse(entry, e)

    def _is_held_out(self, accepted: Accepted, index: int) -> bool:
        """Whether a reference still names a held-out sample: a shard written anew has fewer."""
        return index < len(accepted.sample_ids) and self._held_out.holds(accepted.sample_ids[index])

    def _is_trained_on(self, accepted: Accepted, index: int) -> bool:
        if self._held_out.holds(accepted.sample_ids[index]):
            self._held_out.note(accepted.entry.seq, index)
            return False
        return accepted.trainable[index]

    def _seq(self, position: Position) -> int:
        """The ledger entry at a position."""
        if position.visited >= position.head:
            return position.visited + 1
        begin = Position(position.epoch, position.head)
        if self._order[0] != begin:
            self._order = (
                begin,
                _shuffled(range(1, position.head + 1), f"{self._policy.seed}/{position.epoch}"),
            )
        return self._order[1][position.visited]

    def _is_last(self, position: Position) -> bool:
        return self._policy.epochs is not None and position.epoch + 1 >= self._policy.epochs

    def _wait(self, *, last_epoch: bool) -> _Turn:
        """Caught up with the ledger: look again a little later, unless it is time for something else."""
        policy, now = self._policy, self._waiting.clock()
        head = self._ledger.head()
        if head != self._newest:
            self._newest, self._newest_at = head, now
        self._waiting.beat()
        idle = now - self._newest_at
        if not last_epoch and idle >= policy.replay_after_s:
            return _Turn.NEXT_EPOCH
        if last_epoch and policy.stop_when_idle_s is not None and idle >= policy.stop_when_idle_s:
            return _Turn.END
        self._waiting.sleep(policy.poll_s)
        return _Turn.MORE


def _unit(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _shuffled(items: Sequence[int], key: str) -> list[int]:
    """The items in an order that depends on the key alone, on any machine and version."""
    return sorted(items, key=lambda i: hashlib.sha256(f"{key}/{i}".encode()).digest())
