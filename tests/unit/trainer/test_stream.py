"""Order, epochs, positions and waiting, with shards of made-up states and a clock that the test moves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from taphouse.errors import LedgerError
from taphouse.ledger import Ledger
from taphouse.samples import Sample
from taphouse.shards import ShardMeta, open_shard, shard_name, write_shard
from taphouse.store import LocalStore
from taphouse_trainer.shard_gate import ShardGate
from taphouse_trainer.shard_stream import Drawn, HeldOut, Position, ShardStream, StreamPolicy, Waiting
from taphouse_trainer.verifier import RawTensor, Verifier
from taphouse_trainer.vocabulary import TokenCounts

LAYERS, HIDDEN, VOCAB, ROWS, PER_SHARD = 2, 4, 32, 6, 5


class Clock:
    """Time that only sleeping moves. ``at`` maps a time to something that happens then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stop_at = float("inf")
        self.at: dict[float, object] = {}

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> bool:
        self.now += seconds
        for when in [t for t in self.at if t <= self.now]:
            action = self.at.pop(when)
            action()  # type: ignore[operator]
        return self.now >= self.stop_at


class World:
    """A store with a ledger, and streams over it."""

    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root)
        self.ledger = Ledger(self.store)
        self.clock = Clock()
        zeros = RawTensor("none", "float32", np.zeros((1, HIDDEN), np.float32))
        norm = RawTensor("norm", "float32", np.ones(HIDDEN, np.float32))
        self.verifier = Verifier(
            path=root, config={}, architectures=(), config_sha256="c", num_layers=LAYERS, hidden_size=HIDDEN,
            vocab_size=VOCAB, embed=zeros, lm_head=zeros, final_norm=norm,
        )  # fmt: skip
        self.held_out = HeldOut(0.0, 8)

    def land(self, shards: int = 1) -> list[str]:
        """Shards of five samples; returns their ids."""
        landed = []
        for _ in range(shards):
            batch = self.ledger.head()
            fingerprint = {"config": "c", "final_norm": self.verifier.final_norm_sha256("float32")}
            meta = ShardMeta(
                layers=(0, 1, LAYERS), num_layers=LAYERS, hidden_size=HIDDEN, dtype="float32",
                fingerprint=fingerprint, job_id="j", batch=batch,
            )  # fmt: skip
            samples = [sample(f"{batch}-{k}") for k in range(PER_SHARD)]
            self.ledger.append(write_shard(self.store, shard_name("j", batch), samples, meta))
            landed += [s.id for s in samples]
        return landed

    def stream(self, **policy: object) -> ShardStream:
        defaults: dict[str, object] = {"batch_size": 4, "stop_when_idle_s": 0, "replay_after_s": 0}
        return ShardStream(
            self.ledger, ShardGate(self.store, self.verifier), self.held_out,
            policy=StreamPolicy(**{**defaults, **policy}),  # type: ignore[arg-type]
            waiting=Waiting(self.clock.time, self.clock.sleep),
        )  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def sample(name: str, mask: int = 1) -> Sample:
    return Sample(
        id=name,
        token_ids=np.full(ROWS, sum(map(ord, name)) % VOCAB, np.int32),
        loss_mask=np.full(ROWS, mask, np.uint8),
        hidden_states=np.ones((ROWS, 3, HIDDEN), np.float32),
        dtype="float32",
        prompt_len=1,
    )


def flat(batches: Iterator[list[Drawn]]) -> list[tuple[int, str]]:
    return [(d.position.epoch, d.sample.id) for batch in batches for d in batch]


def test_every_sample_once_an_epoch_in_changing_order(world: World) -> None:
    ids = world.land(4)
    seen = flat(world.stream(epochs=3).batches(Position()))
    assert Counter(seen) == {(epoch, i): 1 for epoch in range(3) for i in ids}
    orders = [[i for epoch, i in seen if epoch == e] for e in range(3)]
    assert len({tuple(o) for o in orders}) == 3
    assert [i.split("-")[0] for i in orders[0]] == sorted(i.split("-")[0] for i in ids)


def test_going_on_from_any_position_repeats_and_skips_nothing(world: World) -> None:
    world.land(3)
    whole = list(world.stream(epochs=3).batches(Position()))
    assert len(whole) == 3 * 4  # 15 samples in fours: the last of an epoch is cut short
    for n, batch in enumerate(whole):
        position = Position(**asdict(batch[-1].position))
        rest = flat(world.stream(epochs=3).batches(position))
        assert rest == flat(iter(whole[n + 1 :]))


def test_another_seed_gives_another_order(world: World) -> None:
    world.land(3)
    assert flat(world.stream(seed=1).batches(Position())) != flat(world.stream(seed=2).batches(Position()))


def test_what_lands_later_joins_the_running_epoch(world: World) -> None:
    first = world.land(2)
    batches = world.stream(epochs=2, batch_size=1).batches(Position())
    seen = [next(batches)[0] for _ in range(12)]  # the second epoch has begun
    second = world.land(2)
    seen += [batch[0] for batch in batches]
    counts = Counter((d.position.epoch, d.sample.id) for d in seen)
    assert counts == {**{(e, i): 1 for e in (0, 1) for i in first}, **{(1, i): 1 for i in second}}


def test_the_last_epoch_waits_and_ends_when_idle(world: World) -> None:
    world.land(1)
    world.clock.at[100.0] = world.land
    seen = flat(world.stream(stop_when_idle_s=60, poll_s=1.0).batches(Position()))
    assert len(seen) == 5
    assert 60 <= world.clock.now < 63
    world.clock.now = 99.0
    seen = flat(world.stream(stop_when_idle_s=60, poll_s=1.0).batches(Position()))
    assert len(seen) == 10


def test_replay_begins_after_a_pause_only(world: World) -> None:
    ids = world.land(1)
    world.clock.at[20.0] = world.land
    world.clock.at[45.0] = lambda: setattr(world.clock, "stop_at", 0.0)
    seen = flat(
        world.stream(epochs=None, stop_when_idle_s=None, replay_after_s=30, poll_s=1).batches(Position())
    )
    assert {epoch for epoch, _ in seen} == {0}
    assert len(seen) == 8  # the two that fill no batch wait for more
    assert {i for _, i in seen} > set(ids)


def test_an_empty_ledger_is_not_replayed_in_circles(world: World) -> None:
    world.clock.stop_at = 50.0
    assert flat(world.stream(epochs=None, stop_when_idle_s=None, poll_s=1).batches(Position())) == []
    assert world.clock.now >= 50


def test_stopping_drops_what_fills_no_batch(world: World) -> None:
    world.land(1)
    batches = world.stream(stop_when_idle_s=None, poll_s=1).batches(Position())
    assert len(next(batches)) == 4
    world.clock.stop_at = 0.0
    assert list(batches) == []


def test_held_out_samples_are_never_drawn(world: World) -> None:
    world.held_out = HeldOut(0.4, 3)
    ids = world.land(6)
    stream = world.stream(epochs=2)
    drawn = {i for _, i in flat(stream.batches(Position()))}
    out = {i for i in ids if HeldOut(0.4, 3).holds(i)}
    assert 4 <= len(out) <= 20
    assert drawn == set(ids) - out
    assert len(world.held_out.references) == 3
    assert {d.sample.id for d in stream.held_out_samples()} <= out
    again = HeldOut(0.4, 3, world.held_out.references)
    again.note(99, 0)
    assert again.references == world.held_out.references


def test_counting_waits_for_enough_and_settles_when_idle(world: World) -> None:
    world.land(1)
    world.clock.at[5.0] = world.land
    counts = TokenCounts(VOCAB)
    assert world.stream(stop_when_idle_s=20, poll_s=1).count_tokens(counts, enough=40)
    assert counts.trained_tokens == 2 * PER_SHARD * ROWS
    assert 5 <= world.clock.now < 7
    assert world.stream(stop_when_idle_s=20, poll_s=1).count_tokens(TokenCounts(VOCAB), enough=10_000)
    world.clock.stop_at = 0.0
    assert not world.stream().count_tokens(TokenCounts(VOCAB), enough=10)


def test_the_cursor_counts_reached_entries(world: World) -> None:
    world.land(3)
    last = list(itertools.chain(*world.stream(epochs=2).batches(Position())))[-1].position
    assert last == Position(epoch=1, head=3, visited=3, offset=0)
    assert Position(epoch=1, head=3, visited=1).cursor == 3
    assert Position(visited=2, offset=4).cursor == 2


def test_a_lost_ledger_entry_is_an_error(world: World) -> None:
    world.land(3)
    (world.store.local_path("ledger") / "000000000002.json").unlink()
    with pytest.raises(LedgerError, match="gone"):
        flat(world.stream(epochs=2).batches(Position(epoch=1, head=3)))


@pytest.mark.parametrize("gone", [1, 2])
def test_an_entry_gone_from_the_middle_is_not_taken_for_the_end(tmp_path: Path, gone: int) -> None:
    world = World(tmp_path)
    world.land(3)
    world.store.delete(f"ledger/{gone:012d}.json")
    gate = ShardGate(world.store, world.verifier)
    waiting = Waiting(world.clock.time, world.clock.sleep)
    policy = StreamPolicy(stop_when_idle_s=1.0)
    stream = ShardStream(world.ledger, gate, world.held_out, policy=policy, waiting=waiting)
    with pytest.raises(LedgerError, match=f"entry {gone} is gone"):
        list(stream.batches(Position()))
    with pytest.raises(LedgerError, match=f"entry {gone} is gone"):
        stream.count_tokens(TokenCounts(VOCAB), 10**9)


def rewrite(world: World, seq: int, kept: list[str]) -> None:
    """Write an entry's shard anew with few samples, or take it away, as the extractor does."""
    entry = world.ledger.entry(seq)
    assert entry is not None
    if kept:
        with open_shard(world.store.local_path(entry.path)) as shard:
            meta, name = shard.header.meta, f"j-{seq}.new.safetensors"
        world.ledger.replace(
            seq, name, lambda: write_shard(world.store, name, [sample(id_) for id_ in kept], meta)
        )
    else:
        world.ledger.remove(seq, "samples were deleted")
    world.store.delete(entry.path)


@pytest.mark.parametrize("drawn_before", [1, 17])
def test_shards_that_lost_samples_are_read_as_they_are_now(tmp_path: Path, drawn_before: int) -> None:
    world = World(tmp_path)
    world.land(3)
    stream = world.stream(epochs=2, batch_size=1)
    drawn = stream.batches(Position())
    seen = [next(drawn)[0].sample.id for _ in range(drawn_before)]
    first = list(dict.fromkeys(seen))
    rewrite(world, 2, ["1-0"])
    rewrite(world, 3, [])
    later = [batch[0].sample.id for batch in drawn]
    lost = {f"{n}-{k}" for n in (1, 2) for k in range(PER_SHARD)} - {"1-0"}
    assert not lost & set(later[1:])  # the shard at hand is open, and read to its end
    assert set(seen) | set(later) >= {f"0-{k}" for k in range(PER_SHARD)} | {"1-0"}
    assert len(first) == min(drawn_before, 3 * PER_SHARD)


def test_an_entry_that_was_read_before_its_shard_was_written_anew(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land(2)
    stale = world.ledger.entry(2)
    assert stale is not None
    rewrite(world, 2, ["1-3"])
    stream = world.stream()
    assert [drawn.sample.id for drawn in stream._samples(stale, Position())] == ["1-3"]


def test_a_held_out_reference_names_no_other_sample_after_a_rewrite(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.land(1)
    world.held_out = HeldOut(1.0, 8, [(1, 0), (1, 4)])
    rewrite(world, 1, ["0-0", "0-1"])
    assert [drawn.sample.id for drawn in world.stream().held_out_samples()] == ["0-0"]
    world.held_out = HeldOut(0.0, 8, [(1, 0)])
    assert list(world.stream().held_out_samples()) == []


@pytest.mark.parametrize(
    ("epochs", "position", "acknowledged"),
    [
        (1, Position(0, 0, 3, 2), 3),
        (2, Position(0, 0, 3, 2), 0),
        (2, Position(1, 4, 3, 0), 0),
        (2, Position(1, 4, 4, 0), 4),
        (2, Position(1, 4, 6, 1), 6),
        (None, Position(7, 4, 6, 1), 0),
    ],
)
def test_acknowledged_is_what_no_later_pass_reads(
    tmp_path: Path, epochs: int | None, position: Position, acknowledged: int
) -> None:
    assert World(tmp_path).stream(epochs=epochs).acknowledged(position) == acknowledged
