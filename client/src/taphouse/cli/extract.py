"""`taphouse extract`: a few prompts, answered at once as one shard file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taphouse.cli import sampling
from taphouse.cli.exits import CliError, UsageProblem
from taphouse.cli.session import Session, with_session

if TYPE_CHECKING:
    from taphouse.wire import Row

__all__ = ["extract", "template_arguments"]


@with_session()
def extract(
    session: Session,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prompts. Without any and without -f: one a line from stdin.", show_default=False
        ),
    ] = None,
    *,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="JSONL",
            help="Rows with messages, prompt or text, one JSON object a line; - for stdin.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send each prompt as a user's message, through the chat template."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Shard file to write. Default: extract-<sha256>.safetensors here.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    ignore_eos: sampling.IgnoreEos = False,
    layers: sampling.Layers = None,
    priority: sampling.Priority = None,
    chat_template_kwargs: sampling.ChatTemplateKwargs = None,
) -> None:
    """Extract the hidden states of a few prompts at once, into one shard file.

    A prompt is sent as it stands, without a chat template: see --chat.

    taphouse extract "The capital of France is"
    taphouse extract --chat "What is the capital of France?" --max-tokens 64
    taphouse extract -f rows.jsonl --max-tokens 64 --out few.safetensors
    """
    from taphouse.cli import render
    from taphouse.cli.terminal import items_bar

    options = sampling.job_options(
        layers,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        priority=priority,
        chat_template_kwargs=template_arguments(chat_template_kwargs),
    )
    rows = _rows(prompts, file, chat)
    with _staged(out, force) as staged:
        with session.client() as client, items_bar(session.err, f"extracting {len(rows)} rows", None):
            body = client.extract(rows, options)
        path = out or Path(f"extract-{hashlib.sha256(body).hexdigest()[:12]}.safetensors")
        _write(staged, body, path)
    facts = shard_facts(path)
    session.show(facts, lambda: render.extract_summary(facts))


def _rows(prompts: list[str] | None, file: str | None, chat: bool) -> list[Row]:
    from taphouse.cli.dataset import rows_of

    if prompts and file:
        raise UsageProblem("prompts and a file of rows are given", "give one of them")
    if file and chat:
        raise UsageProblem("--chat is for prompts, and a file of rows is given", "write messages in its rows")
    if file:
        return rows_of(file)
    if not prompts:
        if sys.stdin.isatty():
            raise UsageProblem(
                "there are no prompts", "give them as arguments, on stdin or with -f rows.jsonl"
            )
        prompts = [line.rstrip("\r\n") for line in sys.stdin]
    rows = [_row(prompt, chat) for prompt in prompts if prompt.strip()]
    try:
        "".join(prompts).encode()
    except UnicodeEncodeError as error:
        raise UsageProblem("a prompt is not UTF-8", "give text, in the terminal's encoding") from error
    if not rows:
        raise UsageProblem("all prompts are empty", "give at least one that holds text")
    return rows


def _row(prompt: str, chat: bool) -> Row:
    from taphouse.wire import Row

    return Row(messages=[{"role": "user", "content": prompt}]) if chat else Row(prompt=prompt)


@contextmanager
def _staged(out: Path | None, force: bool) -> Iterator[Path]:
    """An empty file beside the shard's place, made before anything is sent and gone afterwards.

    Raises:
        UsageProblem: the place is taken, or nothing can be written there.
    """
    place = Path(os.path.realpath(out or "extract"))  # what a link points to is what is written
    try:
        if out is not None and out.exists() and not (force and out.is_file()):
            raise UsageProblem(f"{out} exists already", "give another --out, or --force for a file")
        descriptor, staged = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    except OSError as error:
        raise UsageProblem(
            f"{out or 'the shard'} can't be written into {place.parent}: {error.strerror}",
            "give another place with --out",
        ) from error
    os.close(descriptor)
    try:
        yield Path(staged)
    finally:
        Path(staged).unlink(missing_ok=True)


def template_arguments(text: str | None) -> dict[str, Any] | None:
    """The JSON object of --chat-template-kwargs.

    Raises:
        UsageProblem: it is no JSON object.
    """
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=_no_constant)
        text.encode()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageProblem(
            "--chat-template-kwargs is no JSON object", """write it as '{"enable_thinking": false}'"""
        )
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _write(staged: Path, body: bytes, path: Path) -> None:
    """Write the staged file and rename it, so that a file with this name is always whole."""
    try:
        with staged.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        staged.chmod(0o666 & ~umask)
        staged.replace(os.path.realpath(path))
    except OSError as error:
        raise CliError(f"{path} can't be written: {error.strerror}", "give another --out") from error


def shard_facts(path: Path) -> dict[str, Any]:
    """The document about a shard file: what a ledger entry says, without a place in a ledger."""
    from taphouse.shards import describe_shard

    return describe_shard(path).model_dump(mode="json") | {"path": str(path)}
