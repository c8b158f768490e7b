"""The options that say how rows become samples, shared by `extract` and `enqueue`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from taphouse.cli.exits import UsageProblem

if TYPE_CHECKING:
    from taphouse.wire import JobOptions

__all__ = [
    "ChatTemplateKwargs",
    "IgnoreEos",
    "Layers",
    "MaxLength",
    "MaxTokens",
    "Priority",
    "Seed",
    "Stop",
    "Temperature",
    "TopP",
    "job_options",
]

PANEL = "What to capture"

MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="1 (default) captures the tokens given. More: the target generates the answer, captured too.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
Temperature = Annotated[
    float | None, typer.Option(help="Of the generated answer; 0 is greedy.", rich_help_panel=PANEL)
]
TopP = Annotated[float | None, typer.Option(help="Of the generated answer.", rich_help_panel=PANEL)]
Seed = Annotated[int | None, typer.Option(help="Of the generated answer.", rich_help_panel=PANEL)]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop string of the answer; repeatable.", rich_help_panel=PANEL)
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Generate all of --max-tokens.", rich_help_panel=PANEL)
]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="IDS",
        help="Layer ids in the order wanted, as 2,15,27,30; id i is the stream entering decoder layer i "
        '(the "output of layer j" is j+1). Default: all tapped layers.',
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
MaxLength = Annotated[
    int | None, typer.Option(help="Skip rows whose prompt has more tokens.", rich_help_panel=PANEL)
]
Priority = Annotated[
    int | None,
    typer.Option(
        help="vLLM's priority, lower first (needs --scheduling-policy priority).", rich_help_panel=PANEL
    ),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON", help="Arguments of the chat template, as a JSON object.", rich_help_panel=PANEL
    ),
]


def job_options(layers: str | None = None, **given: Any) -> JobOptions:
    """Options that were given, as the service takes them; None counts as not given.

    Raises:
        UsageProblem: one of them is outside its range.
    """
    from pydantic import ValidationError

    from taphouse.cli.words import told
    from taphouse.wire import JobOptions

    fields = {name: value for name, value in given.items() if value not in (None, [])}
    if layers is not None:
        fields["layers"] = _layer_ids(layers)
    try:
        return JobOptions(**fields)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        what = _FORMS.get(str(first["loc"][0]) if first["type"] == "string_pattern_mismatch" else "")
        raise UsageProblem(f"{option}: {what or told(first)}", f"give another {option}") from error


_FORMS = {"output_prefix": "it must be letters, digits, . _ and -, at most 64, the first a letter or digit"}
"""What a text has to be whose pattern says nothing to people."""


def _layer_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageProblem(
            f"--layers: {text!r} is no list of layer ids", "write numbers with commas, as --layers 2,15,27,30"
        ) from None
