"""Consoles and progress bars. Bars are drawn on stderr, and only when a person looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment

from taphouse.cli.clean import clean
from taphouse.cli.streams import discard

__all__ = ["SafeConsole", "Step", "bytes_bar", "consoles", "items_bar"]

Step = Callable[[int], None]
"""Of a bar of bytes: called with how many more are done. Of a bar of items: with how many are done in all."""

PIPE_WIDTH = 250
"""Columns of a table whose reader is a program: wide enough that nothing is cut."""


class SafeConsole(Console):
    """A console that sends a terminal its own control codes and nobody else's: all text is cleaned here.

    When the reader of its `file` goes away, `BrokenPipeError` is raised; one of `notes` falls silent instead.
    """

    def __init__(self, file: IO[str], width: int | None = None, *, notes: bool = False) -> None:
        super().__init__(file=file, width=width, highlight=False)
        self._notes = notes

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is printed, in pieces; rich's control codes are pieces of their own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text))

    def on_broken_pipe(self) -> None:
        """What rich calls then."""
        discard(self.file)
        if not self._notes:
            raise BrokenPipeError


def consoles() -> tuple[SafeConsole, SafeConsole]:
    """Consoles on stdout and stderr as they are now."""
    out = SafeConsole(sys.stdout)
    if not out.is_terminal:
        out = SafeConsole(sys.stdout, PIPE_WIDTH)
    return out, SafeConsole(sys.stderr, notes=True)


@contextmanager
def bytes_bar(console: Console, what: str, total: int | None) -> Iterator[Step]:
    """A bar of bytes; without `total` a spinner with the bytes so far."""
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
    if total is not None:
        columns += [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    else:
        columns += [DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn()]
    with _bar(console, columns, what, total) as (progress, task):
        yield lambda more: progress.advance(task, more)


@contextmanager
def items_bar(console: Console, what: str, total: int | None) -> Iterator[Step]:
    """A bar of things that are counted."""
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
    columns += [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with _bar(console, columns, what, total) as (progress, task):
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _bar(
    console: Console, columns: list[ProgressColumn], what: str, total: int | None
) -> Iterator[tuple[Progress, TaskID]]:
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(what, total=total)
