"""vLLM's internals on the workers' side; `compat_model` has its models', `compat_server` its API server's.

What is touched, by engine version; "ran" is what was really run with this tap, everything else is refused.

=========  ========  =======  ==========================================================================
version    platform  runners  ran
=========  ========  =======  ==========================================================================
0.32.0     cpu       V1       TP 1 and 2, DP 2, eager and compiled; Llama, DeepseekV3, KimiK25; EAGLE-3
                              and n-gram drafts, preemption, prefix caching, reloaded weights
0.22.1     cuda      V1, V2   TP 1 (V1 also TP 2), FULL_AND_PIECEWISE CUDA graphs, async scheduling;
                              Llama (both), DeepseekV3 with bfloat16 and INT4 experts (V1), an EAGLE-3
                              draft beside Llama (both), sleep and wake (V1)
=========  ========  =======  ==========================================================================

====================================================  ==================================================
touched                                               for
====================================================  ==================================================
`gpu_worker.Worker.load_model`, `.execute_model`      wrapped when the extension is imported
`direct_register_custom_op`                           the taps' two ops
`runner.get_model()`                                  the model that is tapped
`runner.model_memory_usage`                           the tap's device memory counts as the model's
`worker.use_v2_model_runner`, `vllm_config`:          which runner; the start's id; the tap's settings;
`.instance_id`, `.additional_config`,                 drafts; modes that are refused
`.num_speculative_tokens`, `.parallel_config`, ...
V1 `runner.input_batch.req_ids`                       order of requests in the batch, after a forward
V2 `runner.execute_model_state.input_batch.req_ids`   the same; valid until tokens are sampled
`SchedulerOutput`: `scheduled_new_reqs`,              who is new, how many rows each has, where they
`scheduled_cached_reqs`, `num_scheduled_tokens`,      begin, who is gone
`total_num_scheduled_tokens`, `finished_req_ids`,
`preempted_req_ids`
`reload_weights`, `reset_weights`, `sleep`,           wrapped: the fingerprint follows the weights
`discard`, `wake_up`, `start_weight_update`,
`finish_weight_update`, `._weight_update_active`
====================================================  ==================================================

vLLM grows an `aux_output_connector`; when hidden states come that way, this file is where it plugs in.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.worker.gpu_worker import Worker

from .errors import CaptureRefused

CONFIG_KEY = "taphouse"
"""Key of the tap's part of `--additional-config`."""

RAN: dict[tuple[str, str], frozenset[str]] = {
    ("0.32.0", "cpu"): frozenset({"V1"}),
    ("0.22.1", "cuda"): frozenset({"V1", "V2"}),
}
"""Runners that ran with this tap, by (vLLM version, platform)."""


@dataclass(frozen=True)
class Ranks:
    """Where this worker stands."""

    tp_rank: int
    tp_size: int
    dp_rank: int


@dataclass(frozen=True)
class NewRequest:
    """A request that the scheduler sends for the first time (or, on V2, again after a preemption)."""

    request_id: str
    extra_args: dict[str, Any]
    token_ids: Sequence[int]


def version() -> str:
    """Return vLLM's version without a local suffix."""
    return str(vllm.__version__).split("+", 1)[0]


@dataclass(frozen=True)
class WorkerHooks:
    """What of ours is called in a worker. None of them may raise.

    `load_model(worker)` after the load; `before` and `after(worker, output)` around every step, with the
    scheduler's output; `weights_changing` and `weights_changed(worker, method)` around a method that changes
    the loaded weights; the first alone before one that puts them away, the second alone once they are back.
    """

    load_model: Callable[[Any], None]
    before: Callable[[Any, Any], None]
    after: Callable[[Any, Any], None]
    weights_changing: Callable[[Any, str], None]
    weights_changed: Callable[[Any, str], None]


CHANGES_WEIGHTS = ("reload_weights", "reset_weights")
PUTS_WEIGHTS_AWAY = ("sleep", "discard", "start_weight_update")
BRINGS_WEIGHTS_BACK = ("wake_up", "finish_weight_update")
"""Methods of vLLM's `Worker` that touch the weights; those that a version lacks are left out.

`update_weights` is one of many calls between a start and a finish, and refused outside of them.
"""


def wrap_worker(hooks: WorkerHooks) -> None:
    """Have `hooks` called by vLLM's workers. Idempotent."""
    if hasattr(Worker, "_taphouse_wrapped"):
        return
    original_load, original_execute = Worker.load_model, Worker.execute_model

    @functools.wraps(original_load)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original_load(self, *args, **kwargs)
        hooks.load_model(self)
        return result

    @functools.wraps(original_execute)
    def execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        hooks.before(self, scheduler_output)
        result = original_execute(self, scheduler_output, *args, **kwargs)
        hooks.after(self, scheduler_output)
        return result

    Worker.load_model, Worker.execute_model, Worker._taphouse_wrapped = load, execute, True
    for name in CHANGES_WEIGHTS + PUTS_WEIGHTS_AWAY + BRINGS_WEIGHTS_BACK:
        if hasattr(Worker, name):
            setattr(Worker, name, _around_weights(name, getattr(Worker, name), hooks))


def _around_weights(name: str, original: Callable[..., Any], hooks: WorkerHooks) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name not in BRINGS_WEIGHTS_BACK:
            hooks.weights_changing(self, name)
        try:
            return original(self, *args, **kwargs)
        except Exception:
            if name == "start_weight_update" and not getattr(self, "_weight_update_active", False):
                hooks.weights_changed(self, name)  # refused: nothing changes, and no finish will follow
            raise
        finally:
            tags = args[0] if args else kwargs.get("tags")
            back = name in BRINGS_WEIGHTS_BACK and (not tags or "weights" in tags)
            if back or name in CHANGES_WEIGHTS:
                hooks.weights_changed(self, name)

    return call


def register_op(name: str, op: Callable[..., None], mutates: list[str], fake: Callable[..., None]) -> None:
    """Register `torch.ops.vllm.<name>`, opaque to Dynamo, recorded by CUDA graphs. Idempotent."""
    if not hasattr(torch.ops.vllm, name):
        direct_register_custom_op(name, op, mutates_args=mutates, fake_impl=fake)


def ranks(worker: Any) -> Ranks:
    """Return this worker's ranks."""
    parallel = worker.vllm_config.parallel_config
    # Engines of a model without experts are made independent: each one's data_parallel_rank is set to 0.
    return Ranks(
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
        int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)),
    )


def instance_id(worker: Any) -> str:
    """Return the id that all processes of one engine start share (with a `_dp<N>` suffix)."""
    return str(worker.vllm_config.instance_id)


def tap_config(worker: Any) -> dict[str, Any]:
    """Return the tap's part of `--additional-config`; raise `CaptureRefused` if there is none."""
    additional = worker.vllm_config.additional_config
    config = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    if not isinstance(config, dict):
        raise CaptureRefused(
            f"--additional-config has no {CONFIG_KEY!r} object: start with the flags that "
            "`python -m taphouse_tap launch-args` prints"
        )
    return config


def mark_untapped(worker: Any) -> None:
    """Change this worker's compile-cache key: a graph without the tap must not be found by a tapped start."""
    additional = worker.vllm_config.additional_config
    if isinstance(additional, dict) and isinstance(additional.get(CONFIG_KEY), dict):
        additional[CONFIG_KEY] = {**additional[CONFIG_KEY], "untapped": True}


def runner_name(worker: Any) -> str:
    """Return which of vLLM's model runners this worker uses: V1 or V2."""
    return "V2" if getattr(worker, "use_v2_model_runner", False) else "V1"


def mode(worker: Any) -> dict[str, Any]:
    """Return how this engine runs, for the status."""
    config = worker.vllm_config
    return {
        "runner": runner_name(worker),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "compilation": getattr(config.compilation_config.mode, "name", str(config.compilation_config.mode)),
        "cudagraph": getattr(
            config.compilation_config.cudagraph_mode, "name", str(config.compilation_config.cudagraph_mode)
        ),
        "device": str(worker.device),
    }


def check_mode(worker: Any, *, allow_unknown_version: bool) -> None:
    """Raise `CaptureRefused` for an engine version, platform or mode where capture is not proven right."""
    platform = "cuda" if current_platform.is_cuda() else "cpu" if current_platform.is_cpu() else "other"
    runners = RAN.get((version(), platform))
    if not allow_unknown_version and (runners is None or runner_name(worker) not in runners):
        raise CaptureRefused(
            f"vLLM {version()} on {platform} with the {runner_name(worker)} model runner never ran with this "
            "tap; TAPHOUSE_TAP_ALLOW_UNKNOWN_VERSION=true lets the canary decide"
        )
    for reason, refused in _mode_checks(worker.vllm_config):
        if refused:
            raise CaptureRefused(reason)


def _mode_checks(config: Any) -> Iterator[tuple[str, bool]]:
    parallel, model, passes = (
        config.parallel_config,
        config.model_config,
        config.compilation_config.pass_config,
    )
    tp = parallel.tensor_parallel_size
    yield "pipeline parallelism splits the layers over stages", parallel.pipeline_parallel_size > 1
    yield "dual-batch overlap reorders rows", bool(parallel.use_ubatching)
    yield "prefill context parallelism splits rows over ranks", parallel.prefill_context_parallel_size > 1
    yield "decode context parallelism never ran with a tap", parallel.decode_context_parallel_size > 1
    yield "sequence-parallel MoE shards rows over ranks", bool(parallel.use_sequence_parallel_moe)
    enable_sp = getattr(passes, "enable_sp", False)  # 0.32 has no such pass
    yield "sequence parallelism (enable_sp) shards rows over ranks", bool(tp > 1 and enable_sp)
    yield "expert parallelism never ran with a tap", bool(parallel.enable_expert_parallel)
    yield (
        "fuse_allreduce_rms never ran with a tap; start with "
        """--compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}'""",
        bool(tp > 1 and passes.fuse_allreduce_rms),
    )
    yield "tensor parallelism over several hosts: slices lie on each host", parallel.nnodes > 1
    yield "the Ray executor never ran with a tap", parallel.distributed_executor_backend == "ray"
    yield "LoRA never ran with a tap", config.lora_config is not None
    yield "KV connectors never ran with a tap", config.kv_transfer_config is not None
    yield "only generating models have states to capture", model.runner_type != "generate"
    yield "encoder-decoder models never ran with a tap", bool(model.is_encoder_decoder)
    yield "hybrid models never ran with a tap", bool(model.is_hybrid or model.is_attention_free)
    yield "multi-dimensional rope positions do not place rows", bool(model.uses_mrope)
    yield "with prompt embeddings not every row has a token id", bool(model.enable_prompt_embeds)
    yield (
        "Inductor's graph partition never ran with a tap",
        bool(config.compilation_config.use_inductor_graph_partition),
    )


@dataclass(frozen=True)
class ModelFacts:
    """What the tap needs to know of the model: sizes in elements and tokens."""

    hidden_size: int
    dtype: torch.dtype
    max_num_batched_tokens: int
    max_model_len: int


def model_facts(worker: Any) -> ModelFacts:
    """Return the sizes that the tap's memory follows from."""
    config = worker.vllm_config
    return ModelFacts(
        int(config.model_config.get_hidden_size()),
        config.model_config.dtype,
        int(config.scheduler_config.max_num_batched_tokens),
        int(config.model_config.max_model_len),
    )


def model(worker: Any) -> nn.Module:
    """Return the loaded model."""
    return worker.model_runner.get_model()


def account_device_memory(worker: Any, nbytes: int) -> None:
    """Count the tap's device memory as the model's, so that vLLM sizes its KV cache around it."""
    runner = worker.model_runner
    runner.model_memory_usage = getattr(runner, "model_memory_usage", 0) + nbytes


def new_requests(scheduler_output: Any) -> Iterator[NewRequest]:
    """Yield new requests that carry extra arguments."""
    for new in scheduler_output.scheduled_new_reqs:
        extra = new.sampling_params.extra_args if new.sampling_params is not None else None
        if extra:
            yield NewRequest(new.req_id, extra, new.prompt_token_ids or ())


def finished(scheduler_output: Any) -> Iterable[str]:
    """Return the ids of requests that ended (done or aborted) since the last step."""
    return scheduler_output.finished_req_ids


def preempted(scheduler_output: Any) -> Iterable[str]:
    """Return the ids of requests preempted in this step, where the runner is told."""
    return scheduler_output.preempted_req_ids or ()


def scheduled(scheduler_output: Any) -> Iterable[str]:
    """Return the ids of requests that have rows in this step."""
    return scheduler_output.num_scheduled_tokens.keys()


def row_count(scheduler_output: Any) -> int:
    """Return how many rows this step's forward computes (without padding)."""
    return int(scheduler_output.total_num_scheduled_tokens)


def batch_rows(worker: Any, scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (request id, first row, rows) in the order of the batch that was just run."""
    runner = worker.model_runner
    holder = runner.execute_model_state if runner_name(worker) == "V2" else runner
    counts, first = scheduler_output.num_scheduled_tokens, 0
    for request_id in holder.input_batch.req_ids:
        count = counts.get(request_id, 0)
        if count:
            yield request_id, first, count
        first += count
    if first != scheduler_output.total_num_scheduled_tokens:
        raise RuntimeError(
            f"the batch has {first} rows and the scheduler says {scheduler_output.total_num_scheduled_tokens}"
        )


def first_positions(worker: Any, scheduler_output: Any) -> dict[str, int]:
    """Return the position of each request's first row in this step, as the scheduler counts.

    Empty beside drafts: there it counts ahead, before it knows how many were accepted.
    """
    if worker.vllm_config.num_speculative_tokens:
        return {}
    cached = scheduler_output.scheduled_cached_reqs
    known = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return known | {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}


def config_file(model: str, revision: str | None) -> Path | None:
    """Return the `config.json` vLLM read for `model`: a directory's own, or the hub cache's; else None."""
    local = Path(model) / "config.json"
    if local.is_file():
        return local
    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def identity(worker: Any) -> dict[str, str | None]:
    """Return the config's, revision's, architecture's and quantisation's part of the fingerprint."""
    config = worker.vllm_config.model_config
    file = config_file(config.model, config.revision)
    if file is not None:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    else:
        canonical = json.dumps(config.hf_config.to_dict(), sort_keys=True, separators=(",", ":"), default=str)
        digest = hashlib.sha256(canonical.encode()).hexdigest()
    return {
        "config": digest,
        "revision": config.revision,
        "architecture": str(config.architecture),
        "quantization": None if config.quantization is None else str(config.quantization),
    }
