"""What Redis holds beside the queue itself. All of it may be lost at any time: the store is the truth.

<prefix>:lease:<job>:<batch>     who runs the batch; short-lived, renewed while it runs
<prefix>:tries:<job>:<batch>     runs that ended badly, and how long it waits for the next
<prefix>:worker:<name>           a worker process that is alive
<prefix>:leader                  the feeder that feeds
<prefix>:known                   absent in a Redis that is new or was wiped
<prefix>:probe                   written to see whether Redis takes writes

Redis ends a key by its wall clock. When that is set back, a key lives longer than whoever made it can have
meant; who sees it cuts it down to its length, so that nobody who died holds on to anything.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from pydantic import BaseModel, ConfigDict

from taphouse_extractor.errors import BatchBusy
from taphouse_extractor.records import BatchRef
from taphouse_extractor.trouble import Trouble

__all__ = ["PRESENCE_TTL_S", "Client", "Leases", "Tries", "Waits", "connect", "keep_renewing"]

log = logging.getLogger(__name__)
Client = Any
"""redis-py's client: whether it answers in text or bytes is decided when it is made."""

TRIES_TTL_S = 7 * 86400
PRESENCE_TTL_S = 20.0
DROP_IF_MINE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
KEEP_IF_MINE = """
local holder = redis.call('get', KEYS[1])
if holder and holder ~= ARGV[1] then
  if redis.call('pttl', KEYS[1]) > tonumber(ARGV[2]) then redis.call('pexpire', KEYS[1], ARGV[2]) end
  return 0
end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
return 1
"""
CUT_DOWN = """
for _, key in ipairs(KEYS) do
  if redis.call('pttl', key) > tonumber(ARGV[1]) then redis.call('pexpire', key, ARGV[1]) end
end
"""


def connect(url: str, *, text: bool = True, timeout_s: float = 3.0) -> Client:
    """A client that gives up after `timeout_s`; its answers are text, or bytes, which the queue wants."""
    client: Client = redis.Redis
    return client.from_url(
        url, decode_responses=text, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
    )


class Tries(BaseModel):
    """Runs of a batch that ended badly. It waits `delay_s` before the next: see `Waits`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    bad: int = 0
    waits: int = 0
    delay_s: float = 0.0
    reason: str = ""

    def again(self, reason: str, delay_s: float, **counted: int) -> Tries:
        """These, one more counted."""
        update = {"reason": reason[:500], "delay_s": delay_s, **counted}
        return self.model_copy(update=update)


class Waits:
    """Which batches wait for their next run, by this process's own monotonic clock.

    A wait begins when it is first seen here: wall clocks jump, and those of workers differ from ours. A
    process that starts anew waits anew. Safe to share between threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[BatchRef, tuple[Tries, float]] = {}
        self._lock = threading.Lock()

    def look(self, tries: dict[BatchRef, Tries]) -> set[BatchRef]:
        """Those of `tries` (all that there are) that still wait."""
        now = self._clock()
        with self._lock:
            known = self._seen
            self._seen = {
                ref: known[ref] if ref in known and known[ref][0] == found else (found, now)
                for ref, found in tries.items()
            }
            return {ref for ref, (found, since) in self._seen.items() if now - since < found.delay_s}


class Leases:
    """Reads and writes the keys above; raises `redis.RedisError`s. Safe to share between threads."""

    def __init__(self, client: Client, *, prefix: str, ttl_s: float) -> None:
        self._redis, self._prefix, self._ttl_ms = client, prefix, int(ttl_s * 1000)
        self.renew_every_s = ttl_s / 5
        self._waits = Waits()

    @contextmanager
    def hold(self, ref: BatchRef, holder: str, *, deadline_s: float) -> Iterator[None]:
        """Hold a batch's lease, renewed in the background for at most `deadline_s`.

        Raises `BatchBusy` when another worker holds it. A lease that Redis lost is taken again, unless
        another worker has it by then: both go on, which is harmless.
        """
        key, value = self._key("lease", ref), json.dumps({"worker": holder})
        if not self._redis.eval(KEEP_IF_MINE, 1, key, value, self._ttl_ms):
            raise BatchBusy(f"batch {ref} is with {self._redis.get(key)}")
        stop_at = time.monotonic() + deadline_s

        def renew() -> None:
            if time.monotonic() < stop_at:
                self._redis.eval(KEEP_IF_MINE, 1, key, value, self._ttl_ms)

        try:
            with keep_renewing(f"the lease of {ref}", renew, self.renew_every_s):
                yield
        finally:
            self.drop(ref, holder)

    def drop(self, ref: BatchRef, holder: str) -> None:
        """Let go of a lease, if `holder` has it. Errors are logged: it ends by itself."""
        try:
            self._redis.eval(DROP_IF_MINE, 1, self._key("lease", ref), json.dumps({"worker": holder}))
        except redis.RedisError as error:
            log.warning("lease of %s could not be dropped: %s", ref, error)

    def running(self) -> dict[BatchRef, str]:
        """Batches that are being run, and by which worker."""
        held = {}
        for key, value in self._scan("lease", self._ttl_ms):
            try:
                held[BatchRef.parse(key)] = str(json.loads(value)["worker"])
            except (ValueError, KeyError, TypeError):
                log.warning("ignored a lease that nobody here made: %r", key)
        return held

    def tries(self) -> dict[BatchRef, Tries]:
        """Batches that ran badly and are not finished."""
        found = {}
        for key, value in self._scan("tries", TRIES_TTL_S * 1000):
            try:
                found[BatchRef.parse(key)] = Tries.model_validate_json(value)
            except ValueError:
                log.warning("ignored tries that nobody here counted: %r", key)
        return found

    def waiting(self, tries: dict[BatchRef, Tries]) -> set[BatchRef]:
        """Those of `tries` whose wait is not over."""
        return self._waits.look(tries)

    def tries_of(self, ref: BatchRef) -> Tries:
        """One batch's."""
        value = self._redis.get(self._key("tries", ref))
        return Tries.model_validate_json(value) if value else Tries()

    def count_bad(self, ref: BatchRef, reason: str, *, delay_s: float = 0.0) -> None:
        """A run ended in a crash or time-out: count it, and let it run again after `delay_s`."""
        tries = self.tries_of(ref)
        self._put(ref, tries.again(reason, delay_s, bad=tries.bad + 1))

    def count_wait(self, ref: BatchRef, reason: str, *, delay_s: float) -> None:
        """A run ended because something is away that the batch needs: let it run again after `delay_s`."""
        tries = self.tries_of(ref)
        self._put(ref, tries.again(reason, delay_s, waits=tries.waits + 1))

    def _put(self, ref: BatchRef, tries: Tries) -> None:
        self._redis.set(self._key("tries", ref), tries.model_dump_json(), ex=TRIES_TTL_S)

    def forget(self, ref: BatchRef) -> None:
        """The batch is finished."""
        self._redis.delete(self._key("tries", ref))

    def present(self, name: str, facts: dict[str, Any]) -> None:
        """Say that a worker process is alive, for `PRESENCE_TTL_S`."""
        self._redis.set(f"{self._prefix}:worker:{name}", json.dumps(facts), px=int(PRESENCE_TTL_S * 1000))

    def absent(self, name: str) -> None:
        """A worker process ends in good order."""
        self._redis.delete(f"{self._prefix}:worker:{name}")

    def workers(self) -> dict[str, dict[str, Any]]:
        """Worker processes that are alive, by name."""
        found = {}
        for name, value in self._scan("worker", int(PRESENCE_TTL_S * 1000)):
            try:
                found[name] = dict(json.loads(value))
            except (ValueError, TypeError):
                log.warning("ignored a worker's sign of life that nobody here gave: %r", name)
        return found

    def lead(self, name: str) -> bool:
        """Become or stay the one feeder that feeds."""
        return bool(self._redis.eval(KEEP_IF_MINE, 1, f"{self._prefix}:leader", name, self._ttl_ms))

    def stop_leading(self, name: str) -> None:
        """Let another feeder lead at once."""
        self._redis.eval(DROP_IF_MINE, 1, f"{self._prefix}:leader", name)

    def was_wiped(self) -> bool:
        """True once in a Redis that is new or was wiped."""
        return bool(self._redis.set(f"{self._prefix}:known", "1", nx=True))

    def probe(self) -> None:
        """Write something: raises when Redis is away, full, or can't write its log."""
        self._redis.set(f"{self._prefix}:probe", "1", px=self._ttl_ms)

    def _key(self, kind: str, ref: BatchRef) -> str:
        return f"{self._prefix}:{kind}:{ref}"

    def _scan(self, kind: str, ttl_ms: int) -> Iterator[tuple[str, str]]:
        """Names and values of all keys of a kind, which none of them outlives by more than `ttl_ms`."""
        start = f"{self._prefix}:{kind}:"
        keys = list(self._redis.scan_iter(match=f"{start}*", count=1000))
        if keys:
            self._redis.eval(CUT_DOWN, len(keys), *keys, ttl_ms)
        for key, value in zip(keys, self._redis.mget(keys) if keys else (), strict=True):
            if value is not None:
                yield key[len(start) :], value


@contextmanager
def keep_renewing(what: str, renew: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `renew` now and every `every_s` seconds on a thread, whatever Redis said the time before.

    `what` is renewed, and named in the log while Redis is away.
    """
    stop, trouble = threading.Event(), Trouble(log, what)

    def loop() -> None:
        while True:
            try:
                renew()
                trouble.over()
            except redis.RedisError as error:
                trouble.met(error)
            if stop.wait(every_s):
                return

    thread = threading.Thread(target=loop, name="renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=every_s)
