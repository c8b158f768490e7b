"""The opt-in of one request: made and signed by the tap's endpoint, verified on every worker rank."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import BadOptIn

EXTRA_ARGS_KEY = "taphouse"
"""Key of the opt-in in `SamplingParams.extra_args`."""

_TAG = re.compile(r"[0-9a-f]{32}")


def new_tag() -> str:
    """Return a fresh tag: 32 hex digits, the only string that ever becomes part of a slice's file name."""
    return secrets.token_hex(16)


def is_tag(value: object) -> bool:
    """Tell whether `value` has the form of a tag."""
    return isinstance(value, str) and _TAG.fullmatch(value) is not None


@dataclass(frozen=True)
class OptIn:
    """What a request that wants its states captured carries.

    `max_rows` bounds the rows kept (prompt + `max_tokens` - 1); `prompt_len` is in tokens.
    """

    tag: str
    prompt_len: int
    max_rows: int

    def signed(self, secret: bytes) -> dict[str, Any]:
        """Return the value for `SamplingParams.extra_args[EXTRA_ARGS_KEY]`."""
        return {
            "tag": self.tag,
            "prompt_len": self.prompt_len,
            "max_rows": self.max_rows,
            "sig": _signature(secret, self),
        }


def verify_opt_in(secret: bytes, value: object) -> OptIn:
    """Return the opt-in in `value` if it is well formed and signed with `secret`; raise `BadOptIn` if not."""
    if not isinstance(value, Mapping):
        raise BadOptIn("the opt-in is not a mapping")
    tag, prompt_len, max_rows = value.get("tag"), value.get("prompt_len"), value.get("max_rows")
    if not isinstance(tag, str) or not is_tag(tag):
        raise BadOptIn("the opt-in's tag is not 32 hex digits")
    if type(prompt_len) is not int or type(max_rows) is not int or not 0 < prompt_len <= max_rows:
        raise BadOptIn(
            "the opt-in's prompt_len and max_rows must be integers with 0 < prompt_len <= max_rows"
        )
    opt_in = OptIn(tag, prompt_len, max_rows)
    signature = value.get("sig")
    if not isinstance(signature, str) or not hmac.compare_digest(
        signature.encode("utf-8", "replace"), _signature(secret, opt_in).encode()
    ):
        raise BadOptIn("the opt-in is not signed by this engine start")
    return opt_in


def _signature(secret: bytes, opt_in: OptIn) -> str:
    message = f"{opt_in.tag}|{opt_in.prompt_len}|{opt_in.max_rows}".encode()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def canonical_json(value: object) -> str:
    """Return `value` as JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def fingerprint_id(fingerprint: Mapping[str, Any]) -> str:
    """Return 32 hex digits that name a fingerprint (the weights, tokenizer and template behind states)."""
    return hashlib.sha256(canonical_json(dict(fingerprint)).encode()).hexdigest()[:32]
