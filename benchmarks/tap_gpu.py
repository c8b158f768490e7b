"""The tap on a GPU engine: are captured states right inside CUDA graphs, and what does the tap cost?

    python benchmarks/tap_gpu.py                # Llama-8B shape, dummy weights, V1 and V2 runner
    python benchmarks/tap_gpu.py --tiny         # the same logic on a CPU engine, tiny shape

One process an engine, untapped (A) and tapped (B) in the order A B of each runner and back again, so that
drift shows. A tapped engine first proves its captures: `lm_head(norm(h[num_layers]))` of sealed slices must
give every greedy token, for prompts of several lengths among requests that did not opt in. Prints one JSON
line a result as it comes, and a table at the end. Engines that no longer fit `--budget-s` are left out, and
named.

The tap runs as in production: through the worker extension class, signed opt-ins and sealed slices.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = LLAMA_8B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}


@dataclass(frozen=True)
class Plan:
    """What one engine runs; lengths in tokens."""

    config: dict[str, Any]
    engine: dict[str, Any]
    check_lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    decode_tokens: int
    prefill_prompts: int
    prefill_length: int


def plan(tiny: bool) -> Plan:
    if tiny:
        engine = {"max_model_len": 2048, "max_num_batched_tokens": 256, "enforce_eager": True}
        return Plan(TINY, engine, (17, 100, 900), (1, 4), 16, 4, 200)
    engine = {"max_model_len": 12288, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9}
    return Plan(LLAMA_8B, engine, (17, 300, 9000), (1, 16, 64), 160, 32, 2048)


class Bench:
    """One engine, in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.plan = plan(args.tiny)
        self.repeats = args.repeats
        self.label = {"runner": args.runner, "engine": args.engine, "turn": args.turn}
        self.random = random.Random(args.turn)
        model = Path(args.work) / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(self.plan.config))
        options = {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_num_seqs": 64,
            "tensor_parallel_size": args.tensor_parallel_size,
            "enable_prefix_caching": True,
            **self.plan.engine,
        }
        if args.tensor_parallel_size > 1:  # the tap refuses this pass, so neither engine has it
            options["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        if args.engine == "tapped":
            from taphouse_tap import __version__

            options["worker_extension_cls"] = "taphouse_tap.worker.HiddenStatesExtension"
            options["additional_config"] = {"taphouse": {"version": __version__}}
        began = time.perf_counter()
        self.llm = LLM(**options)
        self.emit("start", seconds=round(time.perf_counter() - began, 1), kv_tokens=self.kv_tokens())
        self.generate([self.prompt(64)], 8)

    def emit(self, what: str, **values: Any) -> None:
        print(json.dumps({"result": what, **self.label, **values}), flush=True)

    def kv_tokens(self) -> int | None:
        cache = self.llm.llm_engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else None

    def prompt(self, length: int) -> dict[str, list[int]]:
        return {
            "prompt_token_ids": [
                self.random.randrange(10, self.plan.config["vocab_size"] - 10) for _ in range(length)
            ]
        }

    def generate(
        self, prompts: Sequence[dict[str, list[int]]], tokens: int, opt_ins: Sequence[Any] | None = None
    ) -> tuple[float, list[Any]]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                max_tokens=tokens,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                extra_args={"taphouse": opt_in} if opt_in else None,
                skip_reading_prefix_cache=True if opt_in else None,
            )
            for opt_in in (opt_ins or [None] * len(prompts))
        ]
        began = time.perf_counter()
        outputs = self.llm.generate(list(prompts), parameters, use_tqdm=False)
        return time.perf_counter() - began, outputs

    def decode(self) -> None:
        for size in self.plan.batch_sizes:
            samples = []
            for _ in range(self.repeats):
                prompts = [self.prompt(32) for _ in range(size)]
                first, _ = self.generate(prompts, 1)
                whole, _ = self.generate(prompts, self.plan.decode_tokens)
                samples.append(1e3 * (whole - first) / (self.plan.decode_tokens - 1))
            self.emit("itl_ms", batch=size, median=statistics.median(samples), samples=samples)

    def prefill(self) -> None:
        self._prefill("prefill_tok_s", lambda prompts: self.generate(prompts, 1)[0])

    def _prefill(self, what: str, run: Callable[[list[dict[str, list[int]]]], float], **more: Any) -> None:
        tokens = self.plan.prefill_prompts * self.plan.prefill_length
        samples = []
        for _ in range(self.repeats):
            prompts = [self.prompt(self.plan.prefill_length) for _ in range(self.plan.prefill_prompts)]
            samples.append(tokens / run(prompts))
        self.emit(what, median=statistics.median(samples), samples=samples, **more)


class TappedBench(Bench):
    """A tapped engine, with the directory its slices come out in."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        from taphouse.slices import open_start

        answer = self.llm.collective_rpc("taphouse_start")
        self.emit("tap", ranks=answer)
        if any(rank["capture"] != "on" for rank in answer):
            raise SystemExit("capture is off")
        self.start = open_start(Path(answer[0]["start_dir"]).parent, answer[0]["start_id"])
        self.ranks = len(answer)

    def opt_in(self, prompt: dict[str, list[int]], tokens: int) -> tuple[str, dict[str, Any]]:
        from taphouse.slices import Claim, OptIn, new_tag

        tag, length = new_tag(), len(prompt["prompt_token_ids"])
        rows = length + tokens - 1
        record = self.start.records()[0]
        row_bytes = len(record["layers"]) * record["hidden_size"] * 2
        self.start.reserve(Claim(tag, rows * row_bytes, time.time(), length, rows), 1 << 40)
        return tag, OptIn(tag, length, rows).signed(self.start.secret)

    def wait(self, tags: Sequence[str]) -> None:
        """Wait until every rank sealed every tag."""
        deadline = time.monotonic() + 60
        left = set(tags)
        while left:
            left = {tag for tag in left if len(self.start.slice_paths(tag)) < self.ranks}
            if left and time.monotonic() > deadline:
                raise SystemExit(f"{len(left)} captures were not sealed: {self.start.records()}")
            if left:
                time.sleep(0.002)

    def check(self, tokens: int = 9) -> None:
        """Greedy tokens of captures among requests that did not opt in, all in one batch."""
        from taphouse.slices import check_slices
        from taphouse_tap.verdict import combine

        prompts = [self.prompt(length) for length in self.plan.check_lengths]
        opted = [self.opt_in(prompt, tokens) for prompt in prompts]
        others = [self.prompt(50) for _ in range(5)]
        _, outputs = self.generate([*prompts, *others], tokens, [o for _, o in opted] + [None] * 5)
        self.wait([tag for tag, _ in opted])
        for length, (tag, _), output in zip(self.plan.check_lengths, opted, outputs, strict=False):
            token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            rows = check_slices(self.start.slice_paths(tag))[0].rows
            answers = self.llm.collective_rpc("taphouse_check", args=(tag, token_ids, len(token_ids) - 1))
            self.start.release(tag)
            verdict = combine(answers)
            self.emit("check", prompt=length, generated=tokens, rows=rows, **verdict)

    def prefill_captured(self) -> None:
        from taphouse.slices import check_slices

        failed: list[str] = []

        def run(prompts: list[dict[str, list[int]]]) -> float:
            opted = [self.opt_in(prompt, 1) for prompt in prompts]
            began = time.perf_counter()
            self.generate(prompts, 1, [opt_in for _, opt_in in opted])
            self.wait([tag for tag, _ in opted])
            took = time.perf_counter() - began
            for tag, _ in opted:
                try:
                    check_slices(self.start.slice_paths(tag))
                except Exception as error:
                    failed.append(str(error))
                self.start.release(tag)
            return took

        self._prefill("prefill_captured_tok_s", run, failed=failed)
        time.sleep(2.5)
        for record in self.start.records():
            chosen = ("capture", "reason", "mode", "counters", "memory", "layers", "versions")
            self.emit("record", rank=record["tp_rank"], **{key: record[key] for key in chosen})


def run_engine(args: argparse.Namespace) -> None:
    if args.engine == "tapped":
        tapped = TappedBench(args)
        tapped.check()
        tapped.decode()
        tapped.prefill()
        tapped.prefill_captured()
    else:
        bench = Bench(args)
        bench.decode()
        bench.prefill()


def run_all(args: argparse.Namespace) -> int:
    began, results, left_out, longest = time.monotonic(), [], [], 0.0
    there = [(runner, engine) for runner in args.runners.split(",") for engine in ("untapped", "tapped")]
    status = 0
    with tempfile.TemporaryDirectory() as work:
        for turn, (runner, engine) in enumerate([*there, *reversed(there)][: args.engines]):
            spent = time.monotonic() - began
            if spent + longest > args.budget_s:
                left_out.append(f"{runner} {engine}")
                continue
            code = _spawn(args, work, turn, (runner, engine), results)
            longest = max(longest, time.monotonic() - began - spent)
            if code:
                status = 1
                print(
                    json.dumps({"result": "failed", "runner": runner, "engine": engine, "code": code}),
                    flush=True,
                )
    if left_out:
        print(json.dumps({"result": "left_out", "engines": left_out}), flush=True)
    table(results)
    checks = [r for r in results if r["result"] == "check"]
    return status or int(not checks or not all(r["ok"] for r in checks))


def _spawn(
    args: argparse.Namespace, work: str, turn: int, which: tuple[str, str], results: list[dict[str, Any]]
) -> int:
    runner, engine = which
    command = [sys.executable, __file__, "--engine", engine, "--runner", runner, "--turn", str(turn)]
    command += ["--work", work, "--repeats", str(args.repeats)]
    command += ["--tensor-parallel-size", str(args.tensor_parallel_size), *(["--tiny"] if args.tiny else [])]
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TAPHOUSE_TAP_SLICE_DIR": "/dev/shm/taphouse-bench",
        "TAPHOUSE_TAP_PINNED_LIMIT_BYTES": str((1 << 28) if args.tiny else (4 << 30)),
        **os.environ,
    }
    if not args.tiny:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    else:
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    log = Path(work) / f"{turn}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"result"'):
                print(line, end="", flush=True)
                results.append(json.loads(line))
        code = process.wait()
    if code:
        print(log.read_text()[-6000:], flush=True)
    return code


def table(results: list[dict[str, Any]]) -> None:
    """Medians over an engine's turns, with the ratio tapped / untapped."""
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    for r in results:
        if r["result"] in ("itl_ms", "prefill_tok_s", "prefill_captured_tok_s"):
            figure = f"itl_ms batch {r['batch']}" if r["result"] == "itl_ms" else r["result"]
            rows.setdefault((r["runner"], figure), {}).setdefault(r["engine"], []).extend(r["samples"])
        if r["result"] == "start" and r["kv_tokens"]:
            rows.setdefault((r["runner"], "kv_tokens"), {}).setdefault(r["engine"], []).append(r["kv_tokens"])
    print(f"\n{'runner':7} {'figure':24} {'untapped':>12} {'tapped':>12} {'ratio':>8}")
    for (runner, figure), engines in rows.items():
        base = "prefill_tok_s" if figure == "prefill_captured_tok_s" else figure
        untapped = rows.get((runner, base), {}).get("untapped")
        tapped = engines.get("tapped")
        a = statistics.median(untapped) if untapped else None
        b = statistics.median(tapped) if tapped else None
        ratio = f"{b / a:8.4f}" if a and b else " " * 8
        print(f"{runner:7} {figure:24} {_number(a)} {_number(b)} {ratio}")
    checks = [r for r in results if r["result"] == "check"]
    good = sum(r["checked"] for r in checks if r["ok"])
    print(f"\ngreedy tokens reproduced from captured states: {good} of {sum(r['generated'] for r in checks)}")


def _number(value: float | None) -> str:
    return f"{value:12.3f}" if value is not None else " " * 11 + "-"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shape on a CPU engine: a dry run")
    parser.add_argument("--runners", default=None, help="model runners, comma separated (V1,V2)")
    parser.add_argument("--engines", type=int, default=8, help="how many engines to start at most")
    parser.add_argument(
        "--budget-s", type=float, default=520, help="start no engine that would not end in this"
    )
    parser.add_argument("--repeats", type=int, default=3, help="samples a figure and engine")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--engine", choices=["untapped", "tapped"], help=argparse.SUPPRESS)
    parser.add_argument("--runner", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.runners = args.runners or ("V1" if args.tiny else "V1,V2")
    if args.engine:
        run_engine(args)
        return 0
    return run_all(args)


if __name__ == "__main__":
    raise SystemExit(main())
