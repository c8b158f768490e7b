"""Modes in which capture was not proven right: refused with a reason, one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from taphouse_tap import compat
from taphouse_tap.errors import CaptureRefused


def worker(**changes: Any) -> Any:
    """A worker of an engine in a mode that is captured, but for `changes` ("part.attribute")."""
    values: dict[str, Any] = {
        "parallel_config.tensor_parallel_size": 2,
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.use_ubatching": False,
        "parallel_config.prefill_context_parallel_size": 1,
        "parallel_config.decode_context_parallel_size": 1,
        "parallel_config.use_sequence_parallel_moe": False,
        "parallel_config.enable_expert_parallel": False,
        "parallel_config.nnodes": 1,
        "parallel_config.distributed_executor_backend": "mp",
        "compilation_config.pass_config": SimpleNamespace(fuse_allreduce_rms=False),
        "compilation_config.use_inductor_graph_partition": False,
        "model_config.runner_type": "generate",
        "model_config.is_encoder_decoder": False,
        "model_config.is_hybrid": False,
        "model_config.is_attention_free": False,
        "model_config.uses_mrope": False,
        "model_config.enable_prompt_embeds": False,
        ".lora_config": None,
        ".kv_transfer_config": None,
        **changes,
    }
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
    )
    for path, value in values.items():
        part, name = path.split(".")
        setattr(getattr(config, part) if part else config, name, value)
    return SimpleNamespace(vllm_config=config, use_v2_model_runner=False)


def test_the_mode_that_ran_is_not_refused() -> None:
    compat.check_mode(worker(), allow_unknown_version=False)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("parallel_config.pipeline_parallel_size", 2, "pipeline"),
        ("parallel_config.use_ubatching", True, "dual-batch"),
        ("parallel_config.prefill_context_parallel_size", 2, "prefill context"),
        ("parallel_config.decode_context_parallel_size", 2, "decode context"),
        ("parallel_config.use_sequence_parallel_moe", True, "sequence-parallel MoE"),
        ("parallel_config.enable_expert_parallel", True, "expert"),
        ("parallel_config.nnodes", 2, "several hosts"),
        ("parallel_config.distributed_executor_backend", "ray", "Ray"),
        (
            "compilation_config.pass_config",
            SimpleNamespace(enable_sp=True, fuse_allreduce_rms=False),
            "enable_sp",
        ),
        (
            "compilation_config.pass_config",
            SimpleNamespace(enable_sp=False, fuse_allreduce_rms=True),
            "fuse_allreduce_rms",
        ),
        ("compilation_config.use_inductor_graph_partition", True, "graph partition"),
        ("model_config.runner_type", "pooling", "generating"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("model_config.is_hybrid", True, "hybrid"),
        ("model_config.is_attention_free", True, "hybrid"),
        ("model_config.uses_mrope", True, "rope"),
        ("model_config.enable_prompt_embeds", True, "prompt embeddings"),
        (".lora_config", object(), "LoRA"),
        (".kv_transfer_config", object(), "KV connectors"),
    ],
)
def test_refused_with_the_reason(path: str, value: Any, says: str) -> None:
    with pytest.raises(CaptureRefused, match=says):
        compat.check_mode(worker(**{path: value}), allow_unknown_version=True)


def test_an_unknown_version_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: "99.0")
    with pytest.raises(CaptureRefused, match=r"vLLM 99\.0 on cpu with the V1 model runner never ran"):
        compat.check_mode(worker(), allow_unknown_version=False)
    compat.check_mode(worker(), allow_unknown_version=True)


def test_a_runner_that_never_ran_is_refused() -> None:
    other = worker()
    other.use_v2_model_runner = True
    with pytest.raises(CaptureRefused, match="V2"):
        compat.check_mode(other, allow_unknown_version=False)


@pytest.mark.parametrize("additional", [{}, {"taphouse": 3}, {"other": {}}, object()])
def test_without_its_part_of_the_configuration_capture_is_refused(additional: Any) -> None:
    with pytest.raises(CaptureRefused, match="launch-args"):
        compat.tap_config(SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional)))
