"""Who is registered as a consumer of the ledger: whoever has a record `consumers/<name>.json`."""

from __future__ import annotations

from pydantic import ValidationError

from taphouse.errors import StoreError
from taphouse.store import Store, read_json
from taphouse.wire import Consumer

__all__ = ["names", "read", "registered"]


def names(store: Store) -> list[str]:
    """Names of all that have a record."""
    return [name.removesuffix(".json") for name in store.list("consumers") if name.endswith(".json")]


def read(store: Store, name: str) -> Consumer:
    """One consumer's record. Raises `StoreError` when it can't be read."""
    path = f"consumers/{name}.json"
    try:
        return Consumer.model_validate({"name": name, **read_json(store, path)})
    except (ValidationError, TypeError) as error:
        raise StoreError(f"{path} is no consumer's record", path=path) from error


def registered(store: Store) -> list[Consumer]:
    """All of them, also those that ended: they may go on. Raises `StoreError` when one can't be read."""
    return [read(store, name) for name in names(store)]
