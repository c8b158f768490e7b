"""Dataset rows on this side of the wire: reading, checking, cutting. One JSON object a line.

Rows are read one line at a time; nothing holds a dataset in memory.
"""

from __future__ import annotations

import codecs
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from taphouse.cli.exits import UsageProblem
from taphouse.cli.rows import kind_of, parse_row
from taphouse.wire import Row

__all__ = [
    "ROW_BYTES",
    "DatasetReport",
    "RowProblem",
    "checked",
    "inspect_rows",
    "lines_of",
    "open_dataset",
    "refuse_bad",
    "rows_of",
    "take",
]

STDIN = "-"
PROBLEMS_KEPT = 20
PROBLEMS_NAMED = 3
BLOCK_BYTES = 1 << 18
LINE_BYTES = 64 << 20
"""A line over this is no row anywhere, and isn't read whole."""
ROW_BYTES = 4 << 20
"""What a service takes of one row, unless its `TAPHOUSE_EXTRACTOR_MAX_ROW_BYTES` says otherwise."""

SEND_ANYWAY = (
    "correct them, or send them with --allow-bad-rows: they fail one by one, but a line that is no "
    "JSON object is always refused"
)
PACKED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
"""How files of these kinds begin; no row does."""


@dataclass(frozen=True)
class RowProblem:
    """A line that is no row: `line` counts from 1 in the file."""

    line: int
    reason: str


@dataclass
class DatasetReport:
    """What a dataset holds. `kinds` counts rows by the field that is taken; `problems` are the first ones.

    `long` counts lines over `ROW_BYTES`, `first_long` is the number of the first (from 1; 0: there is none).
    """

    rows: int = 0
    bytes: int = 0
    bad: int = 0
    long: int = 0
    first_long: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[RowProblem] = field(default_factory=list)


@contextmanager
def open_dataset(source: str) -> Iterator[tuple[BinaryIO, int | None]]:
    """The bytes of a file, or of stdin for `-`, and their number where it is known.

    Raises:
        UsageProblem: the file can't be opened.
    """
    if source == STDIN:
        yield sys.stdin.buffer, None
        return
    path = Path(source)
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageProblem(
            f"the dataset {source} can't be read: {error.strerror}",
            "give a JSONL file of this machine, or `-` for stdin",
        ) from error
    with file:
        yield file, path.stat().st_size if path.is_file() else None


def lines_of(file: BinaryIO, progress: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Lines of a dataset, without the byte order mark that some editors begin a file with.

    `progress` is told the number of bytes read since it was last told, now and then.

    Raises:
        UsageProblem: a line is over `LINE_BYTES`, or the dataset is compressed.
    """
    number = untold = 0
    while line := file.readline(LINE_BYTES + 1):
        number, untold = number + 1, untold + len(line)
        packed = next((kind for head, kind in PACKED.items() if number == 1 and line.startswith(head)), None)
        if packed is not None:
            raise UsageProblem(
                f"the dataset is compressed ({packed})",
                "unpack it: `zcat FILE | taphouse enqueue -`",
            )
        if len(line) > LINE_BYTES:
            raise UsageProblem(
                f"line {number} is over {LINE_BYTES} bytes", "write one JSON object a line, and shorter ones"
            )
        if progress is not None and untold >= BLOCK_BYTES:
            progress(untold)
            untold = 0
        yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    if progress is not None:
        progress(untold)


def take(lines: Iterable[bytes], limit: int | None) -> Iterator[bytes]:
    """The first `limit` rows (None: all) in blocks of some lines; blank lines are left out."""
    block = bytearray()
    for line in islice((line for line in lines if line.strip()), limit):
        block += line if line.endswith(b"\n") else line + b"\n"
        if len(block) >= BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def inspect_rows(lines: Iterable[bytes], limit: int | None = None, generate: bool = False) -> DatasetReport:
    """Check every row (the first `limit`), counting what is there."""
    report = DatasetReport()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and report.rows + report.bad >= limit:
            break
        report.bytes += len(line)
        if len(line.rstrip(b"\r\n")) > ROW_BYTES:
            report.long += 1
            report.first_long = report.first_long or number
        try:
            report.kinds[str(kind_of(parse_row(line, generate)))] += 1
            report.rows += 1
        except ValueError as error:
            report.bad += 1
            if len(report.problems) < PROBLEMS_KEPT:
                report.problems.append(RowProblem(number, str(error)))
    return report


def refuse_bad(report: DatasetReport, source: str) -> None:
    """Nothing for a dataset whose rows are all usable.

    Raises:
        UsageProblem: some are not, with the first of them named, or there is none at all.
    """
    if report.bad:
        named = "; ".join(f"line {p.line}: {p.reason}" for p in report.problems[:PROBLEMS_NAMED])
        more = f"; and {report.bad - PROBLEMS_NAMED} more" if report.bad > PROBLEMS_NAMED else ""
        raise UsageProblem(
            f"{report.bad} of {report.bad + report.rows} rows can't be used: {named}{more}", SEND_ANYWAY
        )
    if not report.rows:
        raise UsageProblem(f"{source} holds no rows", "write one JSON object a line")


def checked(lines: Iterable[bytes], generate: bool = False) -> Iterator[bytes]:
    """The same lines, for a dataset that can be read only once.

    Raises:
        UsageProblem: at the first line that is no row.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                parse_row(line, generate)
            except ValueError as error:
                raise UsageProblem(f"line {number} is no row: {error}", SEND_ANYWAY) from error
        yield line


def rows_of(source: str, limit: int | None = None) -> list[Row]:
    """All rows of a small file, or of stdin for `-`.

    Raises:
        UsageProblem: a line is no row, or there is none.
    """
    rows: list[Row] = []
    with open_dataset(source) as (file, _):
        for number, line in enumerate(lines_of(file), start=1):
            if limit is not None and len(rows) >= limit:
                break
            if not line.strip():
                continue
            try:
                rows.append(parse_row(line))
            except ValueError as error:
                raise UsageProblem(f"{source} line {number}: {error}", "correct the line") from error
    if not rows:
        raise UsageProblem(f"{source} holds no rows", "write one JSON object a line")
    return rows
