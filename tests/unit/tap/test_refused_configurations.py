"""Modes that capture is refused in, as vLLM itself describes them once it has read its own flags."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from taphouse_tap import compat
from taphouse_tap.errors import CaptureRefused

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2}
EXPERTS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
}
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}


def check(directory: Path, config: dict[str, Any], **flags: Any) -> None:
    """What the tap says to an engine of this configuration and these flags."""
    (directory / "config.json").write_text(json.dumps(COMMON | config))
    read = EngineArgs(
        model=str(directory), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **flags
    ).create_engine_config()
    worker: Any = SimpleNamespace(vllm_config=read, use_v2_model_runner=False)
    compat.check_mode(worker, allow_unknown_version=False)


@pytest.mark.parametrize("config", [LLAMA, EXPERTS], ids=["llama", "experts"])
def test_what_ran_is_not_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    check(
        tmp_path,
        config,
        tensor_parallel_size=2,
        compilation_config={"pass_config": {"fuse_allreduce_rms": False}},
    )


@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        (LLAMA, {"pipeline_parallel_size": 2}, "pipeline"),
        (EXPERTS, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "expert parallelism"),
        (
            EXPERTS,
            {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
            "sequence-parallel MoE",
        ),
        (EXPERTS, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode context"),
        (EXPERTS, {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"}, "dual-batch"),
        (LLAMA, {"enable_lora": True}, "LoRA"),
        (LLAMA, {"enable_prompt_embeds": True}, "prompt embeddings"),
        (
            LLAMA,
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connectors",
        ),
        (LLAMA, {"compilation_config": {"use_inductor_graph_partition": True}}, "graph partition"),
        (LLAMA, {"tensor_parallel_size": 2, "nnodes": 2}, "several hosts"),
        (LLAMA, {"runner": "pooling"}, "generating"),
        (HYBRID, {}, "hybrid"),
    ],
)
def test_refused(tmp_path: Path, config: dict[str, Any], flags: dict[str, Any], says: str) -> None:
    with pytest.raises(CaptureRefused, match=says):
        check(tmp_path, config, **flags)
