"""The engine's end and the writer's own process, over the real socket and the real memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.tap.worker_fakes import admitted, area, marks_at, opened, raw, rows_at, template, tokens_at

from taphouse.slices import OptIn, join_slices, read_trailer
from taphouse_tap.errors import WriterFailed
from taphouse_tap.rank import link as link_module
from taphouse_tap.rank.area import Word
from taphouse_tap.rank.breaker import Breaker
from taphouse_tap.rank.link import Link
from taphouse_tap.rank.messages import (
    MAX_BYTES,
    Admit,
    Fail,
    FailAll,
    Finish,
    Message,
    Step,
    decode,
    encode,
)


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class Bench:
    """The engine's end of a writer process; the rows come from `step`."""

    def __init__(self, tmp_path: Path, rows: int = 64) -> None:
        self.start, self.area, self.breaker = opened(tmp_path), area(rows, 40), Breaker()
        self.link = Link(self.area, self.start.directory, template(self.start), self.breaker)
        self.link.start()

    def capture(self, prompt_len: int = 4, max_rows: int = 8) -> tuple[OptIn, int]:
        opt_in = admitted(self.start, prompt_len, max_rows)
        number = self.link.admit(opt_in, 0, tokens_at(range(prompt_len)).tolist())
        self.link.flush()
        assert number is not None
        return opt_in, number

    def step(self, number: int, first: int, count: int, *, arrives: bool = True) -> bool:
        at = self.link.take_rows(count)
        assert at is not None
        self.area.rows[at : at + count] = raw(rows_at(range(first, first + count)))
        self.area.marks[at : at + count] = marks_at(range(first, first + count))
        arrival = int(self.area.words[Word.ARRIVED]) + 1
        if arrives:
            self.area.words[Word.ARRIVED] = arrival
        return self.link.step(Step(at, arrival, [(number, count, None)]))

    def put(self, message: Any) -> None:
        self.link.put(message)
        self.link.flush()

    def error(self, opt_in: OptIn) -> str | None:
        until(lambda: self.start.slice_paths(opt_in.tag))
        return read_trailer(self.start.slice_paths(opt_in.tag)[0]).error


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.link.close()


def test_rows_go_through_the_process_into_a_sealed_slice(bench: Bench) -> None:
    opt_in, number = bench.capture()
    assert bench.link.admit(opt_in, 0, []) is None  # a replay
    for first, count in ((0, 3), (3, 2)):
        assert bench.step(number, first, count)
    bench.put(Finish(number))
    assert bench.error(opt_in) is None
    states = join_slices(bench.start.slice_paths(opt_in.tag), tokens_at(range(5)))
    assert np.array_equal(states, rows_at(range(5)))
    until(lambda: (bench.link.in_flight, bench.link.rows_used) == (0, 0))
    assert bench.area.words[Word.SEALED] == 1 and not bench.breaker.tripped


def test_rows_are_not_looked_at_before_they_have_arrived(bench: Bench) -> None:
    opt_in, number = bench.capture()
    bench.step(number, 0, 4, arrives=False)
    bench.put(Finish(number))
    time.sleep(0.1)
    assert bench.start.slice_paths(opt_in.tag) == [] and bench.link.rows_used == 4
    bench.area.words[Word.ARRIVED] += 1
    assert bench.error(opt_in) is None


def test_memory_for_rows_and_prompts_is_bounded_and_comes_back(bench: Bench) -> None:
    os.kill(bench.link.process.pid, signal.SIGSTOP)
    captures = [bench.capture(prompt_len=30, max_rows=31) for _ in range(2)]
    assert bench.link.take_rows(60) == 0 and bench.link.take_rows(5) is None
    os.kill(bench.link.process.pid, signal.SIGCONT)
    (_, whole), (opt_in, _) = captures
    assert "memory for prompts" in str(bench.error(opt_in))
    assert read_trailer(bench.start.slice_paths(opt_in.tag)[0]).retry
    bench.link.step(Step(0, 0, []))
    bench.put(Finish(whole))
    until(lambda: (bench.link.in_flight, bench.link.rows_used) == (0, 0))
    assert bench.link.take_rows(64) == 0


def test_a_full_socket_refuses_steps_and_loses_nothing_else(bench: Bench) -> None:
    opt_in, number = bench.capture()
    until(lambda: bench.area.words[Word.HANDLED] == 1)
    os.kill(bench.link.process.pid, signal.SIGSTOP)
    while bench.link.step(Step(0, 0, [(99, 0, None)] * 500)):
        pass
    for _ in range(100):  # more than fits any more, and more than one packet
        bench.put(Fail(98, "x" * 5000))
    bench.put(Fail(number, "no room in the socket", retry=True))
    assert bench.link.take_rows(64) == 0
    assert not bench.link.step(Step(0, 0, [(number, 64, None)]))
    assert not any(isinstance(message, Step) for message, _ in bench.link._unsent)
    handled = bench.link._sent + len(bench.link._unsent)
    os.kill(bench.link.process.pid, signal.SIGCONT)
    until(lambda: bench.link.look() or bench.start.slice_paths(opt_in.tag))  # type: ignore[func-returns-value]
    assert bench.error(opt_in) == "no room in the socket" and not bench.breaker.tripped
    until(lambda: bench.area.words[Word.HANDLED] == handled)
    assert bench.link.rows_used == 64  # until the next message, behind which nothing of the lost step moves
    bench.put(Fail(98, "next"))
    until(lambda: bench.link.rows_used == 0)


def test_what_is_admitted_behind_a_fail_all_that_waits_is_not_ended_by_it(bench: Bench) -> None:
    one, _ = bench.capture()
    until(lambda: bench.area.words[Word.HANDLED] == 1)
    os.kill(bench.link.process.pid, signal.SIGSTOP)
    while bench.link.step(Step(0, 0, [(99, 0, None)] * 500)):
        pass
    while not bench.link._unsent:
        bench.put(Fail(98, "x" * 3000))
    bench.link.fail_all("the weights changed")
    two, number = bench.capture()
    os.kill(bench.link.process.pid, signal.SIGCONT)
    until(lambda: bench.link.look() or bench.start.slice_paths(one.tag))  # type: ignore[func-returns-value]
    assert bench.error(one) == "the weights changed"
    until(lambda: bench.area.words[Word.HANDLED] == bench.link._sent)
    assert bench.link.in_flight == 1 and bench.link.admit(two, 0, []) is None
    bench.step(number, 0, 4)
    bench.put(Finish(number))
    assert bench.error(two) is None


def test_memory_of_a_step_comes_back_with_the_step_and_not_with_its_packet(bench: Bench) -> None:
    """Three messages of one packet: rows that have not arrived stay taken, whatever stands before them."""
    _, number = bench.capture()
    bench.link.put(Fail(98, "one"))
    bench.link.put(Fail(97, "two"))
    bench.step(number, 0, 4, arrives=False)
    until(lambda: bench.area.words[Word.HANDLED] == 3)
    assert bench.link.rows_used == 4 and bench.link._sent == 4
    bench.area.words[Word.ARRIVED] += 1
    until(lambda: bench.link.rows_used == 0)
    assert bench.area.words[Word.HANDLED] == 4


def test_a_message_too_long_for_a_packet_is_cut_or_refused(bench: Bench) -> None:
    opt_in, number = bench.capture()
    assert bench.link.take_rows(3) == 0
    assert not bench.link.step(Step(0, 1, [(number, 0, None)] * 20_000))
    bench.put(Fail(number, "y" * (1 << 20)))
    assert bench.error(opt_in) == "y" * 4000 and not bench.breaker.tripped
    until(lambda: (bench.link.in_flight, bench.link.rows_used) == (0, 0))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_writer_fails_what_is_in_flight_and_turns_capture_off(
    bench: Bench, how: signal.Signals
) -> None:
    (one, number), (two, _), (gone, _) = (bench.capture() for _ in range(3))
    bench.step(number, 0, 3)
    until(lambda: list(bench.start.directory.glob("*.part")))
    bench.start.release(gone.tag)
    bench.link.process.send_signal(how)
    for opt_in in (one, two):
        assert f"error in writer: WriterFailed: the writer process is gone (signal {how.value})" in str(
            bench.error(opt_in)
        )
    assert bench.breaker.tripped and not list(bench.start.directory.glob("*.part"))
    assert bench.start.slice_paths(gone.tag) == []
    late, _ = bench.capture()  # admitted by a step that had begun
    bench.link.fail_all("capture is off")
    assert bench.error(late) == "capture is off"
    assert not bench.step(number, 3, 1) and bench.link.in_flight == 0


def test_a_writer_that_stopped_answering_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    opt_in, _ = bench.capture()
    os.kill(bench.link.process.pid, signal.SIGSTOP)
    bench.link.look()
    assert not bench.breaker.tripped
    monkeypatch.setattr(link_module, "_SILENT_S", -1.0)
    bench.link.look()
    assert "did not answer" in str(bench.error(opt_in))
    assert bench.breaker.trip_record is not None and bench.breaker.trip_record["where"] == "writer"


def test_an_error_in_the_writer_trips_the_breaker_and_the_process_stays(bench: Bench) -> None:
    opt_in, number = bench.capture()
    bench.put(Step(0, 0, [(number, "many", None)]))  # type: ignore[arg-type,list-item]
    assert "error in writer: TypeError" in str(bench.error(opt_in))
    until(lambda: bench.breaker.tripped)
    assert "TypeError" in str(bench.breaker.reason) and bench.link.process.poll() is None
    until(lambda: bench.link.in_flight == 0)


def test_a_process_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, breaker = opened(tmp_path), Breaker()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WriterFailed, match="exit status 1"):
        Link(area(), start.directory, template(start), breaker).start()


ENGINE = """
import sys, time
from pathlib import Path
from tests.unit.tap.test_writer_process import Bench
bench = Bench(Path(sys.argv[1]))
_, number = bench.capture()
bench.step(number, 0, 3)
while not list(bench.start.directory.glob("*.part")):
    time.sleep(0.01)
print(bench.link.process.pid, flush=True)
time.sleep(600)
"""


def test_the_writer_ends_with_its_engine_however_that_dies(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    ) as engine:
        assert engine.stdout is not None
        writer = int(engine.stdout.readline())
        until(lambda: bool(list((tmp_path / "slices").glob("start-*/*.part"))))  # it is at work
        engine.kill()
    until(lambda: _ended(writer))
    opened(tmp_path).close()  # the next start sweeps the dead one
    assert list((tmp_path / "slices").glob("start-*")) == []


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


numbers = st.integers(0, 1 << 60)
texts = st.text(max_size=50)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Admit, numbers, texts, numbers, numbers, numbers, numbers, numbers),
    st.builds(Step, numbers, numbers, st.lists(st.tuples(numbers, numbers))),
    st.builds(Finish, numbers),
    st.builds(Fail, numbers, texts, st.booleans()),
    st.builds(FailAll, texts),
)


@given(st.lists(messages, max_size=5))
def test_messages_come_back_as_they_were(sent: list[Message]) -> None:
    back = decode(b"".join(encode(message) for message in sent))
    for number, message in enumerate(back):
        if isinstance(message, Step):
            back[number] = Step(message.at, message.arrival, [tuple(part) for part in message.parts])
    assert back == sent


def test_what_waits_goes_together_in_packets_that_fit(bench: Bench) -> None:
    captures = [bench.capture(prompt_len=2, max_rows=3) for _ in range(3)]
    sent: list[int] = []
    real = bench.link._socket

    class Watched:
        def send(self, packet: bytes, *flags: int) -> int:
            sent.append(len(packet))
            return real.send(packet, *flags)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    bench.link._socket = Watched()  # type: ignore[assignment]
    for _, number in captures:
        bench.step(number, 0, 2)
        bench.link.put(Finish(number))
    for _ in range(40):
        bench.link.put(Fail(98, "x" * 5000))
    assert len(sent) == 3  # each step takes the finish before it along
    bench.link.flush()
    assert len(sent) == 5 and max(sent) <= MAX_BYTES
    assert [bench.error(opt_in) for opt_in, _ in captures] == [None] * 3


def test_the_socket_keeps_packets_apart() -> None:
    """What the protocol relies on: one `send` is one `recv`."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        one.send(b"a")
        one.send(b"bc")
        assert (two.recv(9), two.recv(9)) == (b"a", b"bc")
