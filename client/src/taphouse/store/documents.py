"""JSON objects in a store."""

from __future__ import annotations

import json
from typing import Any

from taphouse.errors import StoreError
from taphouse.store.protocol import Store


def read_json(store: Store, path: str) -> Any:
    """A JSON object in the store. Raises `NotInStore`, or `StoreError` when it is no JSON."""
    try:
        return json.loads(store.read(path))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no JSON ({error})", path=path) from error


def put_json(store: Store, path: str, value: Any, *, durable: bool = True) -> None:
    """Create or replace a JSON object, keys sorted."""
    store.put(path, to_json(value), durable=durable)


def put_json_new(store: Store, path: str, value: Any) -> bool:
    """Create a JSON object, keys sorted. False when there is one."""
    return store.put_new(path, to_json(value))


def to_json(value: Any) -> bytes:
    """How JSON lies in a store: keys sorted, no spaces, a newline at the end."""
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()
