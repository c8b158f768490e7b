"""The `taphouse` command: its groups, the options before a command's name, and what `--help` says first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from taphouse.cli import consumers, doctor, enqueue, extract, governor, jobs, queue, samples, shards, watch
from taphouse.cli.boundary import Boundary
from taphouse.cli.exits import ExitCode
from taphouse.cli.options import ApiUrl, Config, Debug, Output, OutputForm, Timeout, Token, TokenFile
from taphouse.cli.session import META

__all__ = ["app"]

EPILOG = "Exit codes:\n" + "\n".join(f"{code.value:>5}  {code.meaning}" for code in ExitCode)

app = typer.Typer(
    name="taphouse",
    cls=Boundary,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
app.command("extract")(extract.extract)
app.command("enqueue")(enqueue.enqueue)
app.add_typer(jobs.app, name="jobs")
app.command("queue")(queue.queue)
app.add_typer(shards.app, name="shards")
app.add_typer(samples.app, name="samples")
app.add_typer(consumers.app, name="consumers")
app.command("watch")(watch.watch)
app.command("governor", context_settings={"ignore_unknown_options": True})(
    governor.governor
)  # pin -1 is a number
app.command("doctor")(doctor.doctor)


@app.callback()
def root(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", show_default=False)
    ] = False,
    output: Output = None,
    debug: Debug = False,
    api_url: ApiUrl = None,
    token: Token = None,
    token_file: TokenFile = None,
    timeout_s: Timeout = None,
    config: Config = None,
) -> None:
    """Hidden states of a live vLLM server: extract them, queue datasets, watch them become a draft model.

    Settings: options, else environment (TAPHOUSE_*), else configuration file, else defaults.
    """
    if version:
        from taphouse import __version__

        typer.echo(f"taphouse {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
    given: dict[str, str | float | bool | Path | OutputForm | None] = {
        "output": output,
        "debug": debug,
        "api_url": api_url,
        "token": token,
        "token_file": token_file,
        "timeout_s": timeout_s,
        "config": config,
    }
    context.meta[META] = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
