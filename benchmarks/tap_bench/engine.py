"""One engine in a process of its own: takes commands as JSON lines and answers each with one.

python -m tap_bench.engine '{"kind": "tapped", ...}'
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from .shapes import DRAFT_TOKENS, SHAPES, Shape, eagle3_config


def options(spec: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return what `vllm.LLM` is given for this kind of engine."""
    kind = spec["kind"]
    chosen: dict[str, Any] = {
        "model": _model(spec, "model", dict(shape.config)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_num_seqs": 64,
        "max_model_len": shape.max_model_len,
        "max_num_batched_tokens": shape.max_num_batched_tokens,
        "enforce_eager": shape.enforce_eager,
        "tensor_parallel_size": spec["tp"],
        "enable_prefix_caching": True,
        "worker_extension_cls": "tap_bench.worker.StepTimes",
    }
    if spec["profile"]:
        chosen["gpu_memory_utilization"] = 0.9
    else:  # a fixed size: engines on one card must not profile memory against each other
        chosen["kv_cache_memory_bytes"] = int(spec["kv_gib"] * (1 << 30))
        chosen["gpu_memory_utilization"] = 0.01
    if spec["tp"] > 1:  # the tap refuses this pass, so no engine has it
        chosen["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if spec["nccl_only"]:
        chosen["disable_custom_all_reduce"] = True
    if kind == "peer":
        chosen |= _peer(spec, shape)
    elif not kind.startswith("untapped"):
        from taphouse_tap import __version__

        chosen["worker_extension_cls"] = "tap_bench.worker_tapped.TappedStepTimes"
        chosen["additional_config"] = {
            "taphouse": {"version": __version__, "layers": list(shape.layers)},
        }
    if kind == "sleeper":
        chosen["enable_sleep_mode"] = True
    elif kind == "eagle3":
        draft = _model(spec, "draft", eagle3_config(shape.config))
        chosen["speculative_config"] = {
            "method": "eagle3",
            "model": draft,
            "num_speculative_tokens": DRAFT_TOKENS,
        }
    elif kind == "ngram":
        chosen["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": DRAFT_TOKENS,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    if kind in ("eagle3", "ngram"):
        chosen["disable_log_stats"] = False
    return chosen


def _model(spec: dict[str, Any], name: str, config: dict[str, Any]) -> str:
    directory = Path(spec["work"]) / f"{spec['shape']}-{spec['kind']}-{name}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def _peer(spec: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """vLLM's own extraction of hidden states."""
    Path(spec["peer_dir"]).mkdir(parents=True, exist_ok=True)
    ids = {"eagle_aux_hidden_state_layer_ids": list(shape.layers)}
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(shape.max_num_batched_tokens, shape.max_model_len),
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": ids},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": spec["peer_dir"]},
        },
    }


class Commands:
    """What the driver can ask of an engine."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        from .load import Load

        shape = SHAPES[spec["shape"]].with_experts(spec["experts"])
        began = time.perf_counter()
        self.spec, self.shape = spec, shape
        self.llm = LLM(**options(spec, shape))
        self.captures = None
        if spec["kind"] != "peer" and not spec["kind"].startswith("untapped"):
            from .captures import Captures

            self.captures = Captures(self.llm, shape.row_bytes)
        self.load = Load(self.llm, shape, self.captures)
        self.load.add(self.load.prompts([64], 0)[0], 8)
        self.load.finish()
        self.started = {"seconds": round(time.perf_counter() - began, 1), "kv_tokens": self._kv_tokens()}

    def _kv_tokens(self) -> int | None:
        cache = self.llm.llm_engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else None

    def run(self, command: dict[str, Any]) -> Any:
        """Carry out one command."""
        arguments = {k: v for k, v in command.items() if k != "do"}
        if command["do"] == "prefill" and self.spec["kind"] == "peer":
            return self._peer_prefill(**arguments)
        own = getattr(self, f"do_{command['do']}", None)
        return (own or getattr(self.load, command["do"]))(**arguments)

    def do_record(self) -> list[dict[str, Any]]:
        """What every rank says of itself, once it has published its latest counters."""
        assert self.captures is not None
        time.sleep(3.2)
        keys = ("tp_rank", "capture", "reason", "mode", "counters", "memory", "layers", "versions")
        return [{k: record.get(k) for k in keys} for record in self.captures.start.records()]

    def do_d2h(self) -> list[dict[str, Any]]:
        """The rate of the tap's way to host memory, every rank at once."""
        return self.llm.collective_rpc("bench_d2h")

    def do_traffic(self, **arguments: Any) -> dict[str, Any]:
        """Production's chats for a longer time, captures beside them or not."""
        from .traffic import Traffic

        return Traffic(self.load, self.shape, self.captures).run(**arguments)

    def do_metrics(self) -> dict[str, float]:
        """Speculative decoding's counters."""
        return {m.name: getattr(m, "value", None) for m in self.llm.get_metrics() if "spec_decode" in m.name}

    def do_sleep(self) -> dict[str, float]:
        """Put the engine to sleep and wake it up."""
        began = time.perf_counter()
        self.llm.sleep(level=1)
        slept = time.perf_counter()
        self.llm.wake_up()
        return {"sleep_s": slept - began, "wake_s": time.perf_counter() - slept}

    def _peer_prefill(self, prompts: int, capture: bool, seed: int) -> dict[str, Any]:
        """As `Load.prefill`, until the peer has written its files (each as large as a prompt's states)."""
        del capture
        whole = int(0.9 * self.shape.prompt_length * self.shape.row_bytes)
        before = self._peer_files(whole)
        self.load.lead_in(seed + 1)
        self._peer_wait(whole, before + 1)
        began = time.perf_counter()
        rate = self.load.prefill(prompts, False, seed, lead=False)["value"]
        self._peer_wait(whole, before + 1 + prompts)
        tokens = prompts * self.shape.prompt_length
        return {"value": tokens / (time.perf_counter() - began), "engine_tok_s": rate}

    def _peer_wait(self, size: int, count: int) -> None:
        deadline = time.monotonic() + 60
        while self._peer_files(size) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the peer wrote {self._peer_files(size)} of {count} files")
            time.sleep(0.002)

    def _peer_files(self, size: int) -> int:
        return sum(
            entry.name.endswith(".safetensors") and entry.stat().st_size >= size
            for entry in os.scandir(self.spec["peer_dir"])
        )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes to the log

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        commands = Commands(json.loads(sys.argv[1]))
        answer(ok=True, value=commands.started)
    except Exception as error:
        traceback.print_exc()
        answer(ok=False, error=f"{type(error).__name__}: {error}")
        return
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        try:
            answer(ok=True, value=commands.run(command))
        except Exception as error:
            traceback.print_exc()
            answer(ok=False, error=f"{type(error).__name__}: {error}")
    answers.close()


if __name__ == "__main__":
    main()
