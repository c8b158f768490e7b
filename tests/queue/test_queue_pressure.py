"""Extraction waits for a consumer that is behind, goes on by itself, and loses nothing to pruning."""

from __future__ import annotations

from functools import partial

from tests.queue.conftest import Cluster, wait_for

from taphouse.store import put_json
from taphouse.wire import PruneRequest


def test_it_waits_for_a_consumer_and_goes_on(cluster: Cluster) -> None:
    cluster.settings = {
        "TAPHOUSE_EXTRACTOR_MAX_UNCONSUMED_BYTES": "1",
        "TAPHOUSE_EXTRACTOR_MAX_QUEUED": "1",
        "TAPHOUSE_EXTRACTOR_FEEDER_INTERVAL_S": "0.1",
    }

    def reached(cursor: int) -> None:
        said = {"name": "t", "cursor": cursor, "acknowledged": cursor}
        put_json(cluster.store, "consumers/t.json", said)

    cluster.start(workers=2)
    reached(0)
    job = cluster.enqueue(40, batch_size=4)
    wait_for("it waits", lambda: "consumer t has not" in (cluster.client.queue().paused or ""))

    def nothing_runs() -> bool:
        depth = cluster.client.queue().depth
        return depth.queued == depth.running == 0 and depth.pending > 0

    wait_for("what was queued ends", nothing_runs)
    assert 2 <= cluster.ledger.head() < 10
    assert not cluster.client.job(job.id).state.final
    ids = list[str]()
    while len(ids) < 40:
        ids += wait_for("a shard", partial(cluster.sample_ids, after=len(ids) // 4))
        reached(len(ids) // 4)
        cluster.client.prune_shards(PruneRequest())
    cluster.wait_done(job.id)
    assert all(entry.gone for entry in list(cluster.ledger.entries())[:5])
    assert sorted(ids, key=lambda name: int(name[4:])) == [f"row-{n}" for n in range(40)]
    assert cluster.client.job(job.id).succeeded == 40
    reached(0)  # one that ended without a word, far behind
    second = cluster.enqueue(20, batch_size=4)
    wait_for("it waits again", lambda: "consumer t has not" in (cluster.client.queue().paused or ""))
    cluster.client.forget_consumer("t")
    wait_for("all of it waits for nobody", lambda: "no consumer" in (cluster.client.queue().paused or ""))
    put_json(cluster.store, "consumers/new.json", {"name": "new", "cursor": 1000})
    cluster.wait_done(second.id)
