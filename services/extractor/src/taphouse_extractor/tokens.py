"""Who may come in: bearer tokens by their SHA-256, each with a name, a role and perhaps a tenant.

The file is JSON, and is read again whenever it changes, so a token is given or taken away without a restart::

    {"tokens": [{"name": "ci", "sha256": "<64 hex digits>", "role": "submit", "tenant": "acme"}]}

It holds no token, only digests: tokens have to be random (`openssl rand -hex 32`), since a digest of a word
can be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

__all__ = ["ANONYMOUS", "Caller", "Role", "TokenFile", "Tokens", "digest", "read_tokens"]

log = logging.getLogger(__name__)
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_Stamp = tuple[int, int, int]


class Role(str, Enum):
    """What a token is for. Each role may all that the ones before it may."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        """Whether this role may what `other` may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class Caller:
    """Who asks. A caller of a tenant sees that tenant's jobs and shards, and nothing else."""

    name: str
    role: Role
    tenant: str | None = None


ANONYMOUS = Caller("anonymous", Role.ADMIN)
"""Everybody, where the service has no tokens."""


class _Token(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    role: Role
    tenant: str | None = Field(default=None, pattern=NAME)


class TokenFile(BaseModel):
    """The file of tokens, as it stands above. Names and digests are each there once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: tuple[_Token, ...]

    @model_validator(mode="after")
    def _once(self) -> TokenFile:
        for field in ("name", "sha256"):
            values = [getattr(token, field) for token in self.tokens]
            if len(set(values)) != len(values):
                raise ValueError(f"a {field} is there twice")
        if any(token.name == ANONYMOUS.name for token in self.tokens):
            raise ValueError(f"the name {ANONYMOUS.name} is taken")
        return self


def read_tokens(file: Path) -> TokenFile:
    """Read a file of tokens; raises ValueError, with what is wrong and no content of the file."""
    try:
        return TokenFile.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{file}: {where or 'file'}: {first['msg']}") from error


class Tokens:
    """Tells callers by their tokens. Safe to share between threads.

    `single` is the one token of a simple service, and an admin's. Without it and without a file everybody is
    `ANONYMOUS`; a file without tokens lets nobody in. A file that turns bad leaves the tokens as they were.
    """

    def __init__(self, single: str | None = None, file: Path | None = None) -> None:
        self._single = [(digest(single), Caller("token", Role.ADMIN))] if single else []
        self._file = file
        self._lock = threading.Lock()
        self._stamp = _stamp(file) if file else None
        self._known = self._single + (_callers(read_tokens(file)) if file else [])

    @property
    def open(self) -> bool:
        """True where nobody needs a token."""
        return not self._single and self._file is None

    def caller(self, token: str) -> Caller | None:
        """Whose token it is, None when it is nobody's. Takes as long for either, and for any of them."""
        given, found = digest(token), None
        for expected, caller in self._current():
            if hmac.compare_digest(given, expected):
                found = caller
        return found

    def _current(self) -> list[tuple[bytes, Caller]]:
        if self._file is None:
            return self._known
        with self._lock:
            stamp = _stamp(self._file)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._known = self._single + _callers(read_tokens(self._file))
                    log.info("%d tokens read from %s", len(self._known), self._file)
                except ValueError as error:
                    log.error("the tokens stay as they were: %s", error)
            return self._known


def digest(token: str) -> bytes:
    """SHA-256 of a token as it was sent."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _callers(file: TokenFile) -> list[tuple[bytes, Caller]]:
    return [(bytes.fromhex(t.sha256), Caller(t.name, t.role, t.tenant)) for t in file.tokens]


def _stamp(file: Path) -> _Stamp | None:
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size
