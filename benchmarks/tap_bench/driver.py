"""The driver: which engines are up when, and what they are asked."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import report, sections
from .process import Engine
from .shapes import SHAPES
from .wave import Wave, emitter

_EXTRA = ("link", "sleep", "kv")
_RESERVE_S = 12.0
"""Kept of the budget for ending engines and printing."""


class Driver:
    """One run: waves one after the other, within the budget."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.shape = SHAPES[args.shape].with_experts(args.experts)
        self.began = time.monotonic()
        self.results: list[dict[str, Any]] = []
        self.emit = emitter(self.began, self.results)
        self.start_s = 25.0 if args.shape == "tiny" else 80.0
        self.shared = Path("/dev/shm") / f"taphouse-bench-{os.getpid()}"
        self.launched: list[Engine] = []

    def run(self) -> int:
        """Run all waves; return 0 if every check was right."""
        args = self.args
        self.emit("run", arguments=vars(args), config=dict(self.shape.config))
        if "link" in args.sections:
            self._link()
        plans = [self._plan(number) for number in range(len(args.runners))]
        for number, runner in enumerate(args.runners):
            if not plans[number].steps():
                continue
            needs = [self.start_s + sum(step.guess_s for step in plan.steps()) for plan in plans[number:]]
            share = (self._left() - self._later_s()) * needs[0] / sum(needs)
            self._runner(runner, plans[number], share)
        if args.draft and self._fits("draft", self.start_s + 10):
            self._drafts()
        if "sleep" in args.sections and self._fits("sleep", self.start_s + 15):
            self._sleep()
        if "kv" in args.sections:
            self._kv()
        report.tables(self.results)
        checks = [c for r in self.results if r["result"] == "check" for c in r["verdicts"]]
        return int(bool(checks) and not all(c["ok"] for c in checks))

    def close(self) -> None:
        """End whatever still runs and remove what was written."""
        for engine in self.launched:
            if engine.alive:
                engine.close(grace_s=2.0)
        shutil.rmtree(self.shared, ignore_errors=True)
        shutil.rmtree(f"{self.shared}-peer", ignore_errors=True)

    def _left(self) -> float:
        return self.args.budget_s - _RESERVE_S - (time.monotonic() - self.began)

    def _later_s(self) -> float:
        """Seconds that the waves after the runners' need."""
        drafts = self.start_s + 15 if self.args.draft else 0.0
        asleep = self.start_s + 20 if "sleep" in self.args.sections else 0.0
        return drafts + asleep + (2 * self.start_s if "kv" in self.args.sections else 0.0)

    def _fits(self, what: str, seconds: float) -> bool:
        if self._left() >= seconds:
            return True
        self.emit("left_out", runner=self.args.runners[0], steps={what: 1})
        return False

    def _wave(self, runner: str, seconds: float) -> Wave:
        label = {"runner": runner}
        return Wave(label, self.shape, self.args, self.emit, time.monotonic() + seconds, self._launch)

    def _plan(self, number: int) -> sections.Plan:
        """The runner's plan; the sections of `--once` are the first runner's only."""
        wanted = [s for s in self.args.sections if number == 0 or s not in self.args.once]
        engines = [*self.args.engines, *(["peer"] if "peer" in wanted else [])]
        return sections.Plan(self.args, self.shape, engines, wanted)

    def _runner(self, runner: str, plan: sections.Plan, seconds: float) -> None:
        kinds = list(plan.engines)
        wave = self._wave(runner, seconds)
        wave.longest_start = self.start_s
        try:
            steps = plan.steps()
            up = [] if self.args.one_by_one else wave.start(kinds)
            missing = {"untapped", "tapped"} & set(kinds) - set(up)
            if missing:
                why = (
                    "asked for" if self.args.one_by_one else f"{sorted(missing)} did not start beside others"
                )
                self.emit("one_by_one", **wave.label, reason=why)
                wave.close()
                wave.one_by_one(steps)
            else:
                self.start_s = wave.longest_start
                time.sleep(2.0)
                wave.together([step for step in steps if step.engine in up])
        finally:
            self._checks(wave)
            report.summarize(wave)
            wave.close()

    def _checks(self, wave: Wave) -> None:
        for step, answer in wave.answers:
            if step.section == "check":
                self.emit("check", **wave.label, engine=step.engine, verdicts=answer)

    def _drafts(self) -> None:
        """Engines that serve with drafts of their own, checked over many generated tokens."""
        wave = self._wave(self.args.runners[0], self._left())
        try:
            for kind in wave.start(self.args.draft):
                repeat = kind == "ngram"
                verdicts = wave.ask(kind, {"do": "check", "tokens": 60, "seed": 5, "repeat": repeat})
                if verdicts is not None:
                    self.emit("check", **wave.label, engine=kind, verdicts=verdicts)
                metrics = wave.ask(kind, {"do": "metrics"})
                record = wave.ask(kind, {"do": "record"})
                modes = [part["mode"] for part in record or []]
                self.emit("draft", **wave.label, engine=kind, metrics=metrics, mode=modes[:1])
        finally:
            wave.close()

    def _sleep(self) -> None:
        """A capture before and after the engine slept."""
        wave = self._wave(self.args.runners[0], self._left())
        command = {"do": "check", "tokens": 9, "repeat": False}
        try:
            if wave.start(["sleeper"]):
                before = wave.ask("sleeper", {**command, "seed": 6})
                slept = wave.ask("sleeper", {"do": "sleep"})
                after = wave.ask("sleeper", {**command, "seed": 7})
                self.emit("sleep", **wave.label, slept=slept, before=before, after=after)
                verdicts = [*(before or []), *(after or [])]
                self.emit("check", **wave.label, engine="sleeper", verdicts=verdicts)
        finally:
            wave.close()

    def _kv(self) -> None:
        """KV-cache tokens when vLLM sizes the cache itself: engines alone, one after another."""
        tokens: dict[str, int] = {}
        kinds = ["untapped", "tapped", *(["peer"] if "peer" in self.args.sections else [])]
        for kind in kinds:
            if not self._fits(f"kv {kind}", self.start_s):
                continue
            wave = self._wave(self.args.runners[0], self._left())
            wave.label = {**wave.label, "profile": True}
            try:
                wave.start([kind])
            finally:
                wave.close()
            started = [r for r in self.results if r["result"] == "start" and r.get("profile")]
            tokens |= {r["engine"]: r["kv_tokens"] for r in started}
        base = tokens.get("untapped")
        ratios = {kind: round(n / base, 4) for kind, n in tokens.items() if base}
        self.emit("kv_tokens", runner=self.args.runners[0], tokens=tokens, ratios=ratios)

    def _link(self) -> None:
        command = [sys.executable, "-m", "tap_bench.link", str(self.args.tp)]
        environment = self._environment({})
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment, timeout=120
        )
        try:
            self.emit("link", **json.loads(done.stdout))
        except ValueError:
            self.emit("link", error=done.stderr[-600:])

    def _launch(self, kind: str, label: dict[str, Any]) -> Engine:
        args = self.args
        spec = {
            "name": f"{label['runner']}-{kind}",
            "kind": kind,
            "shape": args.shape,
            "experts": args.experts,
            "tp": args.tp,
            "kv_gib": args.kv_gib or self.shape.kv_gib,
            "nccl_only": args.nccl_only,
            "profile": bool(label.get("profile")),
            "work": str(self.work),
            "peer_dir": f"{self.shared}-peer",
        }
        more = {"VLLM_CACHE_ROOT": str(self.work / f"cache-{kind}")}
        if args.shape == "tiny":
            more |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        else:
            v2 = label["runner"] == "V2" and kind not in ("peer", "ngram")  # V2 has neither in 0.22.1
            more["VLLM_USE_V2_MODEL_RUNNER"] = "1" if v2 else "0"
        self.work.mkdir(parents=True, exist_ok=True)
        log = self.work / f"{len(self.launched):02}-{spec['name']}.log"
        engine = Engine(spec, self._environment(more), log)
        self.launched.append(engine)
        return engine

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        here = str(Path(__file__).resolve().parent.parent)
        path = os.environ.get("PYTHONPATH")
        pinned = (1 << 28) if self.args.shape == "tiny" else (4 << 30)
        return {
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TAPHOUSE_TAP_SLICE_DIR": str(self.shared),
            "TAPHOUSE_TAP_PINNED_LIMIT_BYTES": str(pinned),
            **os.environ,
            **more,
            **dict(pair.split("=", 1) for pair in self.args.env),
            "PYTHONPATH": f"{here}{os.pathsep}{path}" if path else here,
        }


def main(description: str) -> int:
    """Parse the command line and run."""
    args = _parser(description).parse_args()
    if args.tiny:
        args.shape, args.runners = "tiny", args.runners or "V1"
    args.runners = (args.runners or "V1,V2").split(",")
    args.sections = [] if args.sections == "none" else list(dict.fromkeys(args.sections.split(",")))
    args.engines, args.once = args.engines.split(","), args.once.split(",")
    args.draft = args.draft.split(",") if args.draft else []
    unknown = set(args.sections) - {*sections.SECTIONS, *_EXTRA}
    if unknown:
        raise SystemExit(f"unknown sections {sorted(unknown)}; known are {[*sections.SECTIONS, *_EXTRA]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as work:
        driver = Driver(args, Path(args.cache or work))
        try:
            return driver.run()
        finally:
            driver.close()


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    default = ",".join([s for s in sections.SECTIONS if s not in ("peer", "traffic")])
    add("--tiny", action="store_true", help="tiny shape on a CPU engine: a dry run")
    add("--shape", choices=[s for s in SHAPES if s != "tiny"], default="llama-8b")
    add("--experts", type=int, help="another number of routed experts")
    add("--tp", "--tensor-parallel-size", type=int, default=1)
    add("--runners", help="model runners, comma separated (default V1,V2)")
    add("--engines", default="untapped,tapped,untapped2", help="which engines are up; untapped2 is for A/A")
    add(
        "--sections",
        default=default,
        help=f"comma separated (none: no section), of {', '.join([*sections.SECTIONS, *_EXTRA])}",
    )
    add("--once", default="peer,mixed,steady,traffic", help="sections that only the first runner takes")
    add("--draft", help="also check engines that serve with drafts: eagle3, ngram or both")
    add("--rounds", type=int, default=10, help="rounds of decode, prefill and captured")
    add("--peer-rounds", type=int, default=3)
    add("--decode-s", type=float, default=0.5, help="seconds of one decode sample")
    add("--prefill-s", type=float, default=0.8, help="seconds of one prefill sample")
    add("--steady-s", type=float, default=60.0, help="seconds of one steady window")
    add("--steady-windows", type=int, default=1, help="steady windows of each engine")
    add("--traffic-s", type=float, default=120.0, help="seconds of one replay of the chats")
    add("--traffic-rate", type=float, default=6.0, help="chats a second")
    add("--mixed-s", type=float, default=4.0, help="seconds of one mixed window")
    add(
        "--mixed-rounds",
        type=int,
        default=2,
        help="rounds of four mixed windows: idle, captured, captured, idle",
    )
    add("--budget-s", type=float, default=540.0, help="leave out what no longer fits")
    add("--kv-gib", type=float, help="KV cache of each engine and card")
    add("--nccl-only", action="store_true", help="no custom all-reduce: all of it goes through NCCL")
    add("--cache", help="directory for compiled graphs: runs of the same code start faster with it")
    add("--one-by-one", action="store_true", help="never more than one engine on the cards")
    add("--env", action="append", default=[], metavar="KEY=VALUE", help="for every engine; may be repeated")
    return parser
