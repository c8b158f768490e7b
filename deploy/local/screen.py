"""What a person sees while the demo runs: the steps, and bars of the one at hand."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

_PLAIN_EVERY_S = 15.0


class Screen:
    """Steps with live bars on a terminal, and a plain line every quarter of a minute in a pipe."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.current = "start"
        self._began = time.monotonic()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """A step of the story; the last one entered is `current`, also after it failed."""
        self.current = title
        self.say(f"[bold]{title}[/]")
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}"),
        )
        self._tasks, self._said = {}, {}
        plain = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=plain) as self._progress:
            yield
        self._progress = None

    def say(self, text: str) -> None:
        """A line that stays, with the time since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self.console.print(f"[dim]{minutes:2d}:{seconds:02d}[/] {text}", highlight=False, soft_wrap=True)

    def bar(self, name: str, done: float, total: float | None, note: str = "") -> None:
        """Shows how far something has come; `total` None when nobody knows. In a pipe a line says `note`, or
        the numbers.
        """
        if not self.console.is_terminal:
            if time.monotonic() - self._said.setdefault(name, time.monotonic()) >= _PLAIN_EVERY_S:
                self._said[name] = time.monotonic()
                self.say(f"  {name}: {note or _how_far(done, total)}")
            return
        if self._progress is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, note=note)
        self._progress.update(self._tasks[name], completed=done, total=total, note=note)


def _how_far(done: float, total: float | None) -> str:
    return f"{done:g}" if total is None else f"{done:g} of {total:g}"
