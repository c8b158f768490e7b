"""Tokens: whose they are, from a file that changes; and the settings that name it."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from taphouse_extractor import tokens as module
from taphouse_extractor.settings import Settings
from taphouse_extractor.tokens import ANONYMOUS, Caller, Role, Tokens


def write_tokens(file: Path, *tokens: tuple[str, str, str, str | None]) -> Path:
    """A file of (name, token, role, tenant)."""
    listed = [
        {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), "role": role, "tenant": tenant}
        for name, token, role, tenant in tokens
    ]
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"tokens": listed}))
    new.replace(file)
    return file


def test_a_caller_is_told_by_the_token(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "t", ("a", "one", "read", None), ("b", "two", "submit", "acme"))
    known = Tokens("three", file)
    assert known.caller("one") == Caller("a", Role.READ)
    assert known.caller("two") == Caller("b", Role.SUBMIT, "acme")
    assert known.caller("three") == Caller("token", Role.ADMIN)
    for wrong in ("", "One", "four", "\udcff", hashlib.sha256(b"one").hexdigest()):
        assert known.caller(wrong) is None
    assert not known.open and not Tokens(None, file).open and Tokens().open


@given(st.lists(st.text(max_size=8), min_size=1, max_size=6, unique=True), st.text(max_size=8))
def test_every_token_is_compared_whatever_is_sent(several: list[str], sent: str) -> None:
    compared: list[bytes] = []

    def counting(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return hmac.compare_digest(left, right)

    known = Tokens()
    known._known = [(module.digest(token), Caller(token, Role.READ)) for token in several]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "hmac", type("hmac", (), {"compare_digest": staticmethod(counting)}))
        found = known.caller(sent)
    assert compared == [module.digest(token) for token in several]
    assert (found.name if found else None) == (sent if sent in several else None)


def test_tokens_come_and_go_with_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_tokens(tmp_path / "t", ("a", "one", "read", None))
    known = Tokens(None, file)
    write_tokens(file, ("b", "two", "read", None))
    assert known.caller("one") is None and known.caller("two") is not None
    file.write_text('{"tokens": "secret-in-a-broken-file"}')
    assert known.caller("two") is not None
    file.unlink()
    assert known.caller("two") is not None
    assert "stay as they were" in caplog.text and "secret-in" not in caplog.text
    write_tokens(file)
    assert known.caller("two") is None and not known.open


GOOD: dict[str, Any] = {"name": "a", "sha256": "0" * 64, "role": "read"}


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([{**GOOD, "sha256": "abc"}], "tokens.0.sha256"),
        ([{**GOOD, "name": "a\nb"}], "tokens.0.name"),
        ([{**GOOD, "role": "root"}], "tokens.0.role"),
        ([{**GOOD, "token": "clear"}], "tokens.0.token"),
        ([GOOD, {**GOOD, "name": "b"}], "a sha256 is there twice"),
        ([GOOD, {**GOOD, "sha256": "1" * 64}], "a name is there twice"),
        ([{**GOOD, "name": "anonymous"}], "anonymous is taken"),
    ],
)
def test_a_bad_file_is_refused_by_the_settings(tmp_path: Path, tokens: list[Any], why: str) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"tokens": tokens}))
    with pytest.raises(ValidationError, match=why):
        Settings(store=tmp_path, tokens_file=file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=os.strerror(2)):
        Settings(store=tmp_path, tokens_file=tmp_path / "none")


def test_a_tokens_file_opens_the_host(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "t")
    assert not Settings(store=tmp_path, host="0.0.0.0", tokens_file=file).tokens().open


@pytest.mark.parametrize("mine", Role)
@pytest.mark.parametrize("wanted", Role)
def test_roles_include_the_ones_before(mine: Role, wanted: Role) -> None:
    order = [Role.READ, Role.SUBMIT, Role.ADMIN]
    assert mine.includes(wanted) == (order.index(mine) >= order.index(wanted))
    assert ANONYMOUS.role.includes(wanted)
