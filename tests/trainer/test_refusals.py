"""Shards that must not be trained on: each is refused, named and skipped, and training goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.conftest import StoreMaker
from tests.trainer.runs import seen, train
from tests.trainer.tiny import LAYERS, add_shard

from taphouse.errors import NotInStore, WrongStore
from taphouse.ledger import Ledger
from taphouse.samples import Sample
from taphouse.shards import ShardMeta, shard_name, write_shard
from taphouse.store import LocalStore
from taphouse_trainer.errors import ShardDamaged
from taphouse_trainer.shard_gate import ShardGate
from taphouse_trainer.verifier import read_verifier


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-100])


def flip_a_bit(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 0x10
    shard.write_bytes(bytes(data))


def remove(shard: Path) -> None:
    shard.unlink()


def refused(store: Path) -> list[dict[str, str]]:
    record = json.loads((store / "consumers" / "trainer.json").read_text())
    return list(record["refused_shards"])


def check_skipped(
    tmp_path: Path, store: Path, target: Path, *, good: list[Sample], reason: str, shard: str
) -> None:
    assert train(tmp_path, store, target, held_out_fraction=0, epochs=2) == "data ended"
    assert Counter(seen(tmp_path / "out")) == {(epoch, s.id): 1 for epoch in (0, 1) for s in good}
    assert refused(store) == [{"shard": shard, "reason": reason}]


@pytest.mark.parametrize(
    "case", [(truncate, "truncated"), (flip_a_bit, "checksum"), (remove, "missing")], ids=lambda c: c[1]
)
def test_damaged_files(
    tmp_path: Path,
    make_store: StoreMaker,
    target: Path,
    samples: list[Sample],
    case: tuple[Callable[[Path], None], str],
) -> None:
    store = make_store(samples[:64])
    bad = sorted((store / "shards").glob("*.safetensors"))[2]
    bad.chmod(0o644)
    damage, reason = case
    damage(bad)
    good = samples[:16] + samples[24:64]
    check_skipped(tmp_path, store, target, good=good, reason=reason, shard=bad.name)


def test_nan(
    tmp_path: Path,
    make_store: StoreMaker,
    target: Path,
    samples: list[Sample],
    meta: ShardMeta,
) -> None:
    store = make_store(samples[:48])
    states = samples[50].hidden_states.copy()
    states[7, 1, 3] = np.nan
    poisoned = [*samples[48:50], replace(samples[50], hidden_states=states), *samples[51:56]]
    # The writer refuses NaN too: what is tested here is a shard that some other writer made.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("taphouse.shards.writer.check_values", lambda *_: None)
        bad = add_shard(store, poisoned, meta)
    for start in (56, 64):
        add_shard(store, samples[start : start + 8], meta)
    good = samples[:48] + samples[56:72]
    check_skipped(tmp_path, store, target, good=good, reason="not-finite", shard=bad.name)


def test_other_weights(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample], meta: ShardMeta
) -> None:
    store = make_store(samples[:48])
    for key in ("final_norm", "config"):
        other = meta.model_copy(update={"fingerprint": {**meta.fingerprint, key: "0" * 64}})
        add_shard(store, samples[48:56], other)
    without = {k: v for k, v in meta.fingerprint.items() if k != "final_norm"}
    add_shard(store, samples[56:64], meta.model_copy(update={"fingerprint": without}))
    add_shard(store, samples[64:72], meta)
    train(tmp_path, store, target, held_out_fraction=0)
    assert Counter(seen(tmp_path / "out")) == {(0, s.id): 1 for s in samples[:48] + samples[64:72]}
    assert [r["reason"] for r in refused(store)] == ["fingerprint"] * 3


def test_other_layers(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample], meta: ShardMeta
) -> None:
    store = make_store(samples[:48])

    def with_layers(
        chosen: list[Sample], columns: list[int], layers: tuple[int, ...], num_layers: int
    ) -> None:
        cut = [replace(s, hidden_states=np.ascontiguousarray(s.hidden_states[:, columns])) for s in chosen]
        add_shard(store, cut, meta.model_copy(update={"layers": layers, "num_layers": num_layers}))

    with_layers(samples[48:56], [0, 1, 3], (1, 2, LAYERS), LAYERS)  # lacks layer 3
    with_layers(samples[48:56], [0, 1, 2], (1, 2, 3), LAYERS)  # lacks the final stream
    with_layers(samples[48:56], [0, 1, 2, 3], (1, 2, 3, 5), 5)  # a deeper model
    with_layers(
        samples[56:64], [3, 2, 1, 0], (LAYERS, 3, 2, 1), LAYERS
    )  # the same layers in another order: fine
    train(tmp_path, store, target, held_out_fraction=0)
    assert Counter(seen(tmp_path / "out")) == {(0, s.id): 1 for s in samples[:48] + samples[56:64]}
    assert [r["reason"] for r in refused(store)] == ["layers"] * 3


def test_tokens_the_target_does_not_have(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample], meta: ShardMeta
) -> None:
    store = make_store(samples[:48])
    ids = samples[48].token_ids.copy()
    ids[5] = 128
    bad = add_shard(store, [replace(samples[48], token_ids=ids)], meta)
    check_skipped(tmp_path, store, target, good=samples[:48], reason="tokens", shard=bad.name)


def test_a_shard_that_changes_after_it_was_examined(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample]
) -> None:
    store = make_store(samples[:64])
    bad = sorted((store / "shards").glob("*.safetensors"))[5]
    bad.chmod(0o644)

    local = LocalStore(store)
    gate, entry = ShardGate(local, read_verifier(target)), Ledger(local).entry(6)
    assert entry is not None
    assert gate.examine(entry) is not None
    flip_a_bit(bad)
    with pytest.raises(ShardDamaged) as caught:
        for index in range(8):
            gate.read(entry, index)
    assert caught.value.reason == "checksum"


def test_other_stores_shard_under_the_same_name(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample], meta: ShardMeta
) -> None:
    """A valid shard, but not the one the ledger recorded."""
    store = make_store(samples[:64])
    other = LocalStore(tmp_path / "other")
    write_shard(other, shard_name("job", 2), samples[72:80], meta.model_copy(update={"batch": 2}))
    name = shard_name("job", 2)
    victim = store / "shards" / name
    victim.unlink()
    victim.write_bytes(other.local_path(f"shards/{name}").read_bytes())
    good = samples[:16] + samples[24:64]
    check_skipped(tmp_path, store, target, good=good, reason="checksum", shard=name)


def test_a_store_that_nobody_began_or_of_another_version(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample]
) -> None:
    """A mount point without its disk would be followed for ever."""
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(WrongStore, match=r"there is no store at .*empty yet"):
        train(tmp_path, empty, target)
    with pytest.raises(NotInStore, match="there is no store at"):
        train(tmp_path, tmp_path / "none", target)
    store = make_store(samples[:8])
    (store / "store.json").write_text('{"format":"taphouse-store","id":"","version":2}')
    with pytest.raises(WrongStore, match="is of version 2; this program reads version 3"):
        train(tmp_path, store, target)
    (store / "store.json").unlink()
    with pytest.raises(WrongStore, match=r"was used, and no store\.json"):
        train(tmp_path, store, target)
    assert list(empty.iterdir()) == [] and not (tmp_path / "none").exists()
    assert not (store / "consumers").exists()
