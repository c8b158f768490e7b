"""What every command has: settings, two consoles, an output form, the client, and the options for them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import typer

from taphouse.cli.clean import clean
from taphouse.cli.options import CONNECTION, OUTPUT, OutputForm

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console, RenderableType

    from taphouse.cli.settings import Settings
    from taphouse.client import Taphouse

__all__ = ["META", "Connect", "Session", "with_session"]

P = ParamSpec("P")
Connect = Callable[["Settings"], "Taphouse"]
META = "taphouse.cli.options"


@dataclass(frozen=True)
class Session:
    """One run of the command."""

    settings: Settings
    form: OutputForm
    out: Console
    err: Console
    connect: Connect

    @property
    def json(self) -> bool:
        """True when stdout carries JSON."""
        return self.form is OutputForm.JSON

    @contextmanager
    def client(self) -> Iterator[Taphouse]:
        """The client of the configured service, closed at the end."""
        with self.connect(self.settings) as client:
            yield client

    def show(self, document: BaseModel | dict[str, Any], renderable: Callable[[], RenderableType]) -> None:
        """Write the answer: `document` as JSON, or what `renderable` makes."""
        if self.json:
            self.write_json(document)
        else:
            self.out.print(renderable())

    def write_json(self, document: BaseModel | dict[str, Any], indent: int | None = 2) -> None:
        """Write one JSON document and a line end to stdout."""
        data = document if isinstance(document, dict) else document.model_dump(mode="json")
        plain = not self.out.encoding.startswith("utf")
        self.out.file.write(json.dumps(data, indent=indent, ensure_ascii=plain) + "\n")
        self.out.file.flush()

    def line(self, text: str) -> None:
        """Write one line to stdout at once, neither wrapped nor read as markup."""
        self.out.file.write(f"{clean(' '.join(text.split()))}\n")
        self.out.file.flush()

    def note(self, text: str) -> None:
        """A line on stderr for the person at the terminal."""
        self.err.print(text, markup=False, highlight=False, soft_wrap=True)


def with_session(
    local: bool = False,
) -> Callable[[Callable[Concatenate[Session, P], None]], Callable[..., None]]:
    """Give a command a `Session` as first argument, and the options that every command has.

    `local` commands never talk to the service and have no connection options.
    """
    options = OUTPUT if local else {**OUTPUT, **CONNECTION}

    def decorate(command: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        common = [_parameter(name, annotation) for name, annotation in options.items()]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

        @functools.wraps(command)
        def run(**given: Any) -> None:
            session = _session(given.pop("context"), {name: given.pop(name) for name in options})
            command(session, **given)  # type: ignore[call-arg]

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + common + [context]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    default = False if name == "debug" else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _session(context: typer.Context, options: dict[str, Any]) -> Session:
    """Options of the command itself outrank those given before the command's name."""
    from taphouse.cli.settings import load_settings
    from taphouse.cli.terminal import consoles

    before: dict[str, Any] = context.meta.get(META, {})
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    chosen = {**before, **given}
    form = chosen.pop("output", None) or OutputForm.TABLE
    chosen.pop("debug", None)
    if "token" in options or "token_file" in options:
        chosen = _own_token_first(chosen, options)
    if "api_url" in chosen:
        chosen["url"] = chosen.pop("api_url")
    out, err = consoles()
    return Session(load_settings(chosen), form, out, err, context.obj or _connect)


def _own_token_first(chosen: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    if options.get("token") and not options.get("token_file"):
        chosen.pop("token_file", None)
    if options.get("token_file") and not options.get("token"):
        chosen.pop("token", None)
    return chosen


def _connect(settings: Settings) -> Taphouse:
    from taphouse.client import Taphouse

    return Taphouse(str(settings.url).rstrip("/"), token=settings.bearer(), timeout=settings.timeout_s)
