"""Who is registered as a consumer of the ledger: whoever has a record `consumers/<name>.json`."""

from __future__ import annotations

from pydantic import ValidationError

from taphouse.errors import StoreError
from taphouse.store import Store, read_json
from taphouse.wire import Consumer

__all__ = ["registered"]


def registered(store: Store) -> list[Consumer]:
    """All of them, also those that ended: they may go on. Raises `StoreError` when one can't be read."""
    found = []
    for name in store.list("consumers"):
        if name.endswith(".json"):
            path = f"consumers/{name}"
            try:
                said = {"name": name.removesuffix(".json"), **read_json(store, path)}
                found.append(Consumer.model_validate(said))
            except (ValidationError, TypeError) as error:
                raise StoreError(f"{path} is no consumer's record", path=path) from error
    return found
