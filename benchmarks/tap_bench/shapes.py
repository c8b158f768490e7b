"""The models measured: configurations without weights (vLLM fills them with fixed random values)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_LLAMA: dict[str, Any] = {
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
_TINY = _LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}
_KIMI: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.827,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
}
_INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
_KIMI_INT4 = _KIMI | {
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": _INT4_WEIGHTS,
            }
        },
    },
}
DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Shape:
    """A model and what is run on it. Lengths in tokens, `kv_gib` a card; `layers` are the tapped ids."""

    config: Mapping[str, Any]
    layers: tuple[int, ...]
    kv_gib: float
    max_model_len: int = 12288
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = False
    check_lengths: tuple[int, ...] = (17, 300, 9000)
    logprob_lengths: tuple[int, ...] = (17, 64, 200, 400)
    batch_sizes: tuple[int, ...] = (1, 16, 64)
    prompt_length: int = 2048
    mixed_length: int = 1024
    mixed_streams: int = 16

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's captured states, over all ranks."""
        return len(self.layers) * int(self.config["hidden_size"]) * 2

    def with_experts(self, experts: int | None) -> Shape:
        """Return the shape with another number of routed experts."""
        if experts is None or "n_routed_experts" not in self.config:
            return self
        chosen = min(int(self.config["num_experts_per_tok"]), experts)
        more = {"n_routed_experts": experts, "num_experts_per_tok": chosen}
        return replace(self, config={**self.config, **more})


SHAPES = {
    "llama-8b": Shape(_LLAMA, (2, 16, 29, 32), kv_gib=4.0),
    "kimi-k2.5": Shape(_KIMI, (2, 30, 58, 61), kv_gib=2.5),
    "kimi-k2.5-int4": Shape(_KIMI_INT4, (2, 30, 58, 61), kv_gib=2.5),
    "tiny": Shape(
        _TINY,
        (2, 4, 5, 8),
        kv_gib=0.25,
        max_model_len=2048,
        max_num_batched_tokens=256,
        enforce_eager=True,
        check_lengths=(17, 100, 900),
        logprob_lengths=(17, 64, 100),
        batch_sizes=(1, 4),
        prompt_length=64,
        mixed_length=32,
        mixed_streams=4,
    ),
}


def eagle3_config(target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a one-layer EAGLE-3 draft for `target`, with random weights to be."""
    hidden = int(target["hidden_size"])
    heads = int(target["num_attention_heads"])
    return {
        **_LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": int(target["intermediate_size"]),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": int(target["num_key_value_heads"]),
        "head_dim": int(target.get("head_dim", 128)),
        "vocab_size": int(target["vocab_size"]),
        "draft_vocab_size": min(32000, int(target["vocab_size"])),
    }
