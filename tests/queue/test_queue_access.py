"""Redis behind TLS and the ACL of docs/access.md; logs, audit and metrics keep quiet."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import redis
from tests.queue.conftest import ROOT, TOKEN, Cluster, wait_for
from tests.queue.tls import make_certificate, tls_before
from tests.unit.extractor.test_tokens import write_tokens

from taphouse.client import Taphouse
from taphouse.errors import Unauthorized
from taphouse.wire import JobOptions

PASSWORD = "redis-pass/word-of-the-test"
ENGINE_KEY = "engine-key-of-the-test"
PROMPT = "PROMPT-OF-THE-TEST"


def documented_acl() -> list[str]:
    """The rules of docs/access.md's user, with this test's password."""
    [line] = re.findall(r"^user taphouse .*$", (ROOT / "docs" / "access.md").read_text(), re.M)
    assert ">PASSWORD" in line
    return line.replace("PASSWORD", PASSWORD).split()[2:]


def test_redis_with_acl_and_tls_and_nothing_said_that_should_not_be(cluster: Cluster, tmp_path: Path) -> None:
    acl = tmp_path / "users.acl"
    acl.write_text(f"user default off\nuser taphouse {' '.join(documented_acl())}\n")
    cluster.redis = redis.Redis(port=cluster.redis_port, username="taphouse", password=PASSWORD)
    cluster.start_redis("--aclfile", str(acl))
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=cluster.redis_port).ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        cluster.redis.flushall()
    certificate = make_certificate(tmp_path)
    with tls_before(cluster.redis_port, certificate) as port:
        url = tmp_path / "redis.url"
        quoted = PASSWORD.replace("/", "%2F")
        url.write_text(f"rediss://taphouse:{quoted}@127.0.0.1:{port}/0?ssl_ca_certs={certificate}\n")
        tokens = write_tokens(tmp_path / "tokens.json", ("ci", "ci-token-of-the-test", "submit", "acme"))
        cluster.settings |= {
            "TAPHOUSE_EXTRACTOR_REDIS_URL_FILE": str(url),
            "TAPHOUSE_EXTRACTOR_TOKENS_FILE": str(tokens),
            "TAPHOUSE_EXTRACTOR_ENGINE_KEY": ENGINE_KEY,
            "TAPHOUSE_EXTRACTOR_LOG_FORMAT": "json",
            "TAPHOUSE_EXTRACTOR_AUDIT_LOG": str(tmp_path / "audit.jsonl"),
            "TAPHOUSE_EXTRACTOR_MAX_ATTEMPTS": "1",
        }
        cluster.start_engine()
        cluster.start_api()
        worker = cluster.start_worker()
        said = exercise(cluster)
        wait_for("the worker is seen", lambda: cluster.client.queue().workers)
        cluster.stop(worker)
        metrics = httpx.get(f"{base(cluster)}/metrics").text
    assert 'taphouse_rejected_rows_total{reason="row_refused"} 1.0' in metrics

    logs = {name: cluster.log(name) for name in ("api", "worker")}
    lines = {name: [json.loads(line) for line in text.splitlines()] for name, text in logs.items()}
    [serves] = [line for line in lines["api"] if line["event"] == "serves"]
    assert (serves["address"], serves["governor"]) == (base(cluster), "on")
    assert (serves["store"], serves["engines"]) == (
        str(cluster.store.root),
        [f"http://127.0.0.1:{cluster.engine_port}"],
    )
    sealed = [line for line in lines["worker"] if "rows sealed" in line["event"]]
    assert [(line["job"], line["batch"]) for line in sealed] == [(said, 0)]
    rejected = [line for line in lines["worker"] if line["event"] == "a row made no sample"]
    assert {(line["job"], line["batch"], line["sample"]) for line in rejected} == {
        (said, 0, "refused"),
        (said, 0, "none"),
    }
    audit = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert {"who": "ci", "what": "POST /v1/jobs", "job": said, "rows": 4}.items() <= audit[0].items()
    everything = "\n".join([*logs.values(), metrics, json.dumps(audit)])
    for secret in (PROMPT, PASSWORD, quoted, ENGINE_KEY, TOKEN, "ci-token-of-the-test", "wrong-token"):
        assert secret not in everything, secret


def base(cluster: Cluster) -> str:
    return f"http://127.0.0.1:{cluster.api_port}"


def exercise(cluster: Cluster) -> str:
    """Good rows, bad rows, bad requests, wrong tokens; the id of the job."""
    rows = [
        {"id": "good", "prompt": PROMPT},
        {"id": "refused", "prompt": f"{PROMPT} REFUSE"},
        {"id": "none", "other": PROMPT},
        {"id": "chat", "messages": [{"role": "user", "content": PROMPT}]},
    ]
    with Taphouse(base(cluster), token="ci-token-of-the-test") as client:
        job = client.enqueue([json.dumps(row).encode() + b"\n" for row in rows], JobOptions())
    done = cluster.wait_done(job.id)
    assert (done.succeeded, done.failed) == (2, 2)
    with Taphouse(base(cluster), token="wrong-token") as stranger, pytest.raises(Unauthorized):
        stranger.enqueue([b"{}\n"])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for path, kind, body in (
        ("v1/jobs", "application/x-ndjson", f'{{"prompt": "{PROMPT}'),
        ("v1/extract", "application/json", f'{{"rows": [{{"prompt": ["{PROMPT}"]}}]}}'),
        ("v1/extract", "application/json", f'{{"rows": [{{"prompt": "{PROMPT} BROKEN"}}]}}'),
        ("v1/extract", "application/json", f'{{"rows": [{{"messages": [{{"role": "{PROMPT}"}}]}}]}}'),
    ):
        url = f"{base(cluster)}/{path}"
        answer = httpx.post(url, content=body, headers={**headers, "Content-Type": kind})
        assert answer.status_code in (422, 502), answer.text
    return job.id
