"""What a store says of itself, once, for all that lies in it: one file at its root.

    store.json     {"format":"taphouse-store","id":"<32 hex digits>","version":3}

It is written when an empty directory is first used. Every process reads it at its start, and leaves a store
of another version alone.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from taphouse.errors import NotInStore, WrongStore
from taphouse.store.documents import put_json_new, read_json
from taphouse.store.protocol import Store

__all__ = ["Identity", "begin", "begun", "identity"]

PATH = "store.json"
VERSION = 3
USED = ("jobs", "moves", "shards", "ledger", "consumers", "governor")
"""Directories, any of which means that a store was used."""


class Identity(BaseModel):
    """The file: `version` is that of all records but shards and ledger entries, which say their own."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["taphouse-store"]
    version: Literal[3]
    id: str = Field(pattern=r"^[0-9a-f]{32}$")


def identity(store: Store) -> Identity | None:
    """What a store is; None while it was never used. Raises `WrongStore`, and other `StoreError`s."""
    try:
        found = read_json(store, PATH)
    except NotInStore:
        if not any(store.exists(name) for name in USED):
            return None
        found = _of_used(store)  # another process may have begun it between the two looks
    try:
        return Identity.model_validate(found)
    except ValidationError as error:
        version = found.get("version") if isinstance(found, dict) else None
        what = f"is of version {version!r:.20}" if version != VERSION else f"has a {PATH} that can't be read"
        raise WrongStore(
            f"the store at {_place(store)} {what}; this program reads version {VERSION}",
            path=PATH,
            advice="Run the version that wrote it, or give this one an empty directory",
        ) from error


def begin(store: Store) -> Identity:
    """What a store is; one that was never used gets its file now. Raises as `identity`."""
    found = identity(store)
    if found is None:
        put_json_new(
            store, PATH, {"format": "taphouse-store", "version": VERSION, "id": secrets.token_hex(16)}
        )
        found = identity(store)  # another process may have been first
    assert found is not None
    return found


def begun(store: Store) -> Identity:
    """What a store is. Raises `WrongStore` for one that was never used, and as `identity`."""
    found = identity(store)
    if found is None:
        raise WrongStore(
            f"there is no store at {_place(store)} yet: it has no {PATH}",
            path=PATH,
            advice="Is its disk mounted? The extractor's API makes a new one when it starts: start it first",
        )
    return found


def _of_used(store: Store) -> Any:
    """What the file of a store that was used holds. Raises `WrongStore` where there is none."""
    try:
        return read_json(store, PATH)
    except NotInStore as error:
        raise WrongStore(
            f"the store at {_place(store)} was used, and no {PATH} says of which version it is",
            path=PATH,
            advice="An earlier version wrote it, or the file was lost. Run that version or restore the "
            "file; or give this one an empty directory",
        ) from error


def _place(store: Store) -> str:
    return str(store.local_path(PATH).parent)
