"""Who is registered as a consumer of the ledger: whoever has a record `consumers/<name>.json`.

One at a time goes by a name: it holds `consumers/<name>.lock` as long as it runs.
"""

from __future__ import annotations

import logging
import re

from pydantic import ValidationError

from taphouse.errors import NotInStore, StoreBusy, StoreError
from taphouse.store import Store, read_json
from taphouse.wire import Consumer
from taphouse_extractor.errors import Conflict, NotFound

__all__ = ["forget", "named", "names", "read", "readable", "registered"]

log = logging.getLogger(__name__)
SILENT_S = 300.0
"""A consumer that runs writes every few seconds."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def names(store: Store) -> list[str]:
    """Names of all that have a record."""
    return [name.removesuffix(".json") for name in store.list("consumers") if name.endswith(".json")]


def read(store: Store, name: str) -> Consumer:
    """One consumer's record. Raises `StoreError` when it can't be read."""
    path = f"consumers/{name}.json"
    try:
        return Consumer.model_validate({**read_json(store, path), "name": name})
    except (ValidationError, TypeError) as error:
        raise StoreError(f"{path} is no consumer's record", path=path) from error


def readable(store: Store, head: int) -> tuple[list[Consumer], dict[str, StoreError]]:
    """What trainers say of themselves, with how many of `head` ledger entries they have before them.

    And why the others' records can't be read, by their names. Raises `StoreError` where there can be no list.
    """
    found, unread = [], {}
    for name in names(store):
        try:
            consumer = read(store, name)
        except NotInStore:
            continue  # it was forgotten meanwhile
        except StoreError as error:
            unread[name] = error
            continue
        lag = None if consumer.cursor is None else max(0, head - consumer.cursor)
        found.append(consumer.model_copy(update={"lag": lag}))
    return found, unread


def registered(store: Store) -> list[Consumer]:
    """All of them, also those that ended: they may go on. Raises `StoreError` when one can't be read."""
    return [read(store, name) for name in names(store)]


def forget(store: Store, name: str) -> Consumer:
    """Take away a consumer's record, and return it: nothing waits for it any more.

    One that comes back is registered again, where it stood. Raises `NotFound`, and `Conflict` while it runs.
    """
    path = f"consumers/{name}.json"
    if not _NAME.fullmatch(name) or not store.exists(path):
        raise NotFound(f"there is no consumer {name!r:.80}", param="consumer")
    try:
        with store.lock(f"consumers/{name}.lock", wait=False):
            try:
                gone = read(store, name)
            except StoreError:  # nothing is known of it: one more reason to be rid of it
                gone = Consumer(name=name)
            store.delete(path)
    except StoreBusy as error:
        raise Conflict(f"consumer {name} is running: stop it first", param="consumer") from error
    log.warning("consumer %s was forgotten at cursor %s", name, gone.cursor)
    return gone


def named(consumers: list[Consumer], now: float) -> str:
    """Consumers by name, for a sentence on what they hold; with those that won't move by themselves marked.

    `now` is in seconds since the epoch.
    """
    return " and ".join(_named(consumer, now) for consumer in sorted(consumers, key=lambda c: c.name))


def _named(consumer: Consumer, now: float) -> str:
    age = now - (consumer.updated_at or 0.0)
    if consumer.ended is not None:
        return f"{consumer.name} (ended: `taphouse consumers forget {consumer.name}` if for good)"
    if consumer.updated_at is not None and age > SILENT_S:
        return f"{consumer.name} (silent for {age:.0f} s)"
    return consumer.name
