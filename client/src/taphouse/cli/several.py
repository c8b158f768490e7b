"""One thing done to several: each is tried, each error is told, and the worst is the command's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from taphouse.cli.boundary import describe, say

__all__ = ["Tried"]

T = TypeVar("T")


class Tried:
    """What became of each: `errors` are those that failed, in the order they were tried."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def each(self, names: Iterable[str], act: Callable[[str], T]) -> list[T]:
        """The answers of those that worked; the same name is tried once, none after the service went away."""
        from taphouse.errors import TaphouseError, Unreachable

        answers = []
        different = list(dict.fromkeys(names))
        for name in different:
            try:
                answers.append(act(name))
            except TaphouseError as error:
                self.errors.append(error)
                if isinstance(error, Unreachable):
                    break
                if len(different) > 1 and name not in error.message:
                    error.message = f"{name}: {error.message}"
        return answers

    def end(self) -> None:
        """Tell every error; the one with the highest exit code is raised, so that it ends the command."""
        worst = max(self.errors, key=lambda error: describe(error)[2], default=None)
        for error in self.errors:
            if error is not worst:
                say(error)
        if worst is not None:
            raise worst
