"""The slice writer alone: how many bytes a second one rank's writer process seals.

    python -m benchmarks.writer --ranks 1 --chunks 8192,mixed

A stand-in of each rank's engine tells a real writer process of rows that lie in the shared memory already (on
a GPU the copy engine puts them there), and a consumer, a process of its own, takes sealed slices away. Needs
numpy and our packages alone: no GPU, no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import numpy as np

from taphouse.slices import (
    CaptureFailed,
    Claim,
    DirectoryFull,
    OptIn,
    Start,
    Trailer,
    check_slices,
    new_tag,
    open_start,
    release,
)
from taphouse_tap.rank.area import MARK_BYTES, Area, Layout, Word
from taphouse_tap.rank.breaker import Breaker
from taphouse_tap.rank.link import Link
from taphouse_tap.rank.messages import Finish, Step

LAYERS = 4
STEP_ROWS = 8192
MIXED = (300, 2000)
"""The shortest and longest prompt of a mixed run; steps of 8,192 rows are filled with them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="writer processes at once")
    parser.add_argument("--chunks", default="8192,mixed", help="rows of a capture; mixed: 300 to 2,000")
    parser.add_argument("--width", type=int, default=4096, help="columns of a rank (bf16, 4 layers)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run, after warm-up")
    parser.add_argument("--warm-up", type=float, default=3.0)
    parser.add_argument("--host-bytes", type=int, default=1 << 30, help="the area of a rank")
    parser.add_argument("--dir-bytes", type=int, default=8 << 30, help="limit of the slice directory")
    parser.add_argument("--slice-dir", type=Path, default=Path("/dev/shm/taphouse-bench"))
    arguments = parser.parse_args()
    for chunks in arguments.chunks.split(","):
        print(json.dumps({"chunks": chunks, **run(arguments, chunks)}), flush=True)


def run(arguments: argparse.Namespace, chunks: str) -> dict[str, Any]:
    """Run all ranks and the consumer; return rates in GB/s a rank, and shares of the measured seconds."""
    start = open_start(arguments.slice_dir, f"bench-{os.getpid()}-{chunks}")
    start.spares.allow(arguments.dir_bytes // 2)
    context = multiprocessing.get_context("spawn")
    ready, ended = context.Barrier(arguments.ranks), context.Event()
    answers: Any = context.Queue()
    consumer = context.Process(target=consume, args=(start.directory, ended))
    ranks = [
        context.Process(target=engine, args=(arguments, start.start_id, (chunks, rank), ready, answers))
        for rank in range(arguments.ranks)
    ]
    for process in (consumer, *ranks):
        process.start()
    found = [answers.get() for _ in ranks]
    for process in ranks:
        process.join()
    ended.set()
    consumer.join()
    start.close()
    if consumer.exitcode:
        raise RuntimeError("the consumer failed")
    rates = sorted(answer.pop("rate") for answer in found)
    mean = {key: round(sum(answer[key] for answer in found) / len(found), 3) for key in found[0]}
    return {"ranks": len(found), "gb_s": [round(1e-9 * rate, 2) for rate in rates], **mean}


def consume(directory: Path, ended: Event) -> None:
    """Take sealed slices away; each capture of this benchmark has one."""
    while not ended.is_set():
        for entry in os.scandir(directory):
            if entry.name.endswith(".slice"):
                with contextlib.suppress(CaptureFailed):
                    check_slices([Path(entry.path)])
                release(directory, entry.name.split(".", 1)[0])
        time.sleep(0.002)


def engine(
    arguments: argparse.Namespace, start_id: str, which: tuple[str, int], ready: Barrier, answers: Any
) -> None:
    """Stand in for the engine process of one rank: `which` is (chunks, rank)."""
    chunks, rank = which
    start, breaker = open_start(arguments.slice_dir, start_id), Breaker()
    row_bytes = LAYERS * arguments.width * 2
    rows = arguments.host_bytes // (row_bytes + MARK_BYTES)
    area = Area.create(Layout(rows, row_bytes, 1 << 20))
    block = np.random.default_rng(rank).integers(0, 0x7F00, (64, row_bytes // 2), np.uint16)
    for at in range(0, rows, 64):
        area.rows[at : at + 64] = block.view(np.uint8)[: rows - at]
    link = Link(area, start.directory, _template(start, arguments.width), breaker)
    link.start()
    steps = Steps(start, area, link, _lengths(chunks, rank), arguments.dir_bytes)
    ready.wait()
    steps.run_for(arguments.warm_up, breaker)
    began, before = time.monotonic(), area.words.copy()
    steps.run_for(arguments.seconds, breaker)
    seconds, spent = time.monotonic() - began, area.words - before
    shares = {
        f"{word.name.lower()}_share": float(1e-9 * spent[word] / seconds)
        for word in (Word.WAIT, Word.WRITE, Word.CHECKSUM, Word.COPY, Word.SEAL)
    }
    answers.put(
        {"rate": float(spent[Word.BYTES] / seconds), "failed": int(area.words[Word.FAILED]), **shares}
    )
    link.close()
    start.close()


class Steps:
    """Steps of an engine, as fast as the area has room for their rows."""

    def __init__(self, start: Start, area: Area, link: Link, lengths: Iterator[int], limit: int) -> None:
        self._start, self._area, self._link, self._limit = start, area, link, limit
        self._step_rows = min(STEP_ROWS, area.layout.rows)
        self._lengths = lengths

    def run_for(self, seconds: float, breaker: Breaker) -> None:
        """Run for some seconds. Raises `RuntimeError` when the breaker trips."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if breaker.tripped:
                raise RuntimeError(breaker.reason)
            self._step()

    def _step(self) -> None:
        lengths = [next(self._lengths)]
        while sum(lengths) + (length := next(self._lengths)) <= self._step_rows:
            lengths.append(length)
        while (at := self._link.take_rows(sum(lengths))) is None:
            time.sleep(2e-4)
        parts = [(self._admit(length), length) for length in lengths]
        marks = np.concatenate([np.arange(length) for length in lengths])
        self._area.marks[at : at + len(marks)] = marks[:, None]
        self._area.words[Word.ARRIVED] += 1
        while not self._link.step(Step(at, int(self._area.words[Word.ARRIVED]), parts)):
            self._link.flush()
            time.sleep(2e-4)
        for number, _ in parts:
            self._link.put(Finish(number))

    def _admit(self, length: int) -> int:
        opt_in = OptIn(new_tag(), length, length)
        claim = Claim(opt_in.tag, length * self._area.layout.row_bytes, time.time(), length, length)
        while True:
            try:
                self._start.reserve(claim, self._limit)
                break
            except DirectoryFull:
                time.sleep(1e-3)  # the consumer is behind
        number = self._link.admit(opt_in, 0, np.arange(length, dtype=np.int32))
        assert number is not None
        return number


def _lengths(chunks: str, seed: int) -> Iterator[int]:
    """Rows of one capture after the other."""
    chosen = random.Random(seed)
    while True:
        yield chosen.randint(*MIXED) if chunks == "mixed" else int(chunks)


def _template(start: Start, width: int) -> Trailer:
    """Ranks have captures of their own here: each is the whole of its captures."""
    return Trailer(
        tag="",
        start_id=start.start_id,
        tap_version="bench",
        tp_rank=0,
        tp_size=1,
        dp_rank=0,
        layers=tuple(range(LAYERS)),
        dtype="bfloat16",
        hidden_size=width,
        column_offset=0,
        width=width,
        rows=0,
        prompt_len=0,
        weights_epoch=0,
        crc32=0,
        token_crc32=0,
    )


if __name__ == "__main__":
    main()
