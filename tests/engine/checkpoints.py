"""Tiny float32 checkpoints with a byte-level tokenizer and a chat template, made once under `.cache/`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "engine-tests-2"
LAYERS = 5
VOCABULARY = 1024
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MEDIA = ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
_MEDIA_PAD = len(_SPECIAL) + MEDIA.index("<|media_pad|>")
_PATCH = 14
_VISION_HIDDEN = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BLOCK = "vision_tower.encoder.blocks.0"
_VISION_WEIGHTS: dict[str, tuple[int, ...]] = {
    "vision_tower.patch_embed.proj.weight": (_VISION_HIDDEN, 3, _PATCH, _PATCH),
    "vision_tower.patch_embed.proj.bias": (_VISION_HIDDEN,),
    "vision_tower.patch_embed.pos_emb.weight": (8, 8, _VISION_HIDDEN),
    f"{_BLOCK}.norm0.weight": (_VISION_HIDDEN,),
    f"{_BLOCK}.norm0.bias": (_VISION_HIDDEN,),
    f"{_BLOCK}.norm1.weight": (_VISION_HIDDEN,),
    f"{_BLOCK}.norm1.bias": (_VISION_HIDDEN,),
    f"{_BLOCK}.mlp.fc0.weight": (_VISION_HIDDEN, _VISION_HIDDEN),
    f"{_BLOCK}.mlp.fc0.bias": (_VISION_HIDDEN,),
    f"{_BLOCK}.mlp.fc1.weight": (_VISION_HIDDEN, _VISION_HIDDEN),
    f"{_BLOCK}.mlp.fc1.bias": (_VISION_HIDDEN,),
    f"{_BLOCK}.wqkv.weight": (3 * _VISION_HIDDEN, _VISION_HIDDEN),
    f"{_BLOCK}.wqkv.bias": (3 * _VISION_HIDDEN,),
    f"{_BLOCK}.wo.weight": (_VISION_HIDDEN, _VISION_HIDDEN),
    f"{_BLOCK}.wo.bias": (_VISION_HIDDEN,),
    "vision_tower.encoder.final_layernorm.weight": (_VISION_HIDDEN,),
    "vision_tower.encoder.final_layernorm.bias": (_VISION_HIDDEN,),
    "mm_projector.pre_norm.weight": (_VISION_HIDDEN,),
    "mm_projector.pre_norm.bias": (_VISION_HIDDEN,),
    "mm_projector.proj.0.weight": (4 * _VISION_HIDDEN, 4 * _VISION_HIDDEN),
    "mm_projector.proj.0.bias": (4 * _VISION_HIDDEN,),
    "mm_projector.proj.2.weight": (COMMON["hidden_size"], 4 * _VISION_HIDDEN),
    "mm_projector.proj.2.bias": (COMMON["hidden_size"],),
}


def tiny_llama() -> Path:
    """A Llama of 5 layers, hidden 256, 4 heads."""
    return made("llama", _make_llama)


def short_llama() -> Path:
    """`tiny_llama` with 2 layers, which compiles sooner."""
    return made("short-llama", lambda directory: _make_llama(directory, layers=2))


MLA = [
    *("--compilation-config", '{"custom_ops": ["none"], "pass_config": {"fuse_allreduce_rms": false}}'),
    *("--attention-backend", "CPU_MLA"),
]
"""Flags for models with MLA on a CPU.

Without vLLM's own kernels, which compute MLA wrong when eager, tapped or not; and with the attention that
takes float32: where a CPU has AMX vLLM prefers one that takes bfloat16 alone, and the engine does not start.
"""


def tiny_deepseek() -> Path:
    """A DeepseekV3 (MLA, shared and routed experts) of 5 layers, hidden 256."""
    return made("deepseek", _make_deepseek)


def tiny_kimi() -> Path:
    """A KimiK25ForConditionalGeneration: the text weights of `tiny_deepseek`, a vision tower of one layer.

    An image becomes at most 16 tokens of `<|media_pad|>`.
    """
    return made("kimi", _make_kimi, MEDIA)


def tiny_draft() -> Path:
    """An EAGLE-3 draft for `tiny_llama` with random weights: the target accepts next to nothing of it."""
    return made("draft", _make_draft)


def made(name: str, make: Any, more_special: Sequence[str] = ()) -> Path:
    """The checkpoint of this name: `make(directory)` once, and a tokenizer beside it."""
    directory = CACHE / name
    if not directory.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = CACHE / f".{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        make(temporary)
        _tokenizer(temporary, more_special)
        temporary.rename(directory)
    return directory


def _make_llama(directory: Path, layers: int = LAYERS) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {**COMMON, "num_hidden_layers": layers}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    save(LlamaForCausalLM(config), directory)


def _make_deepseek(directory: Path) -> None:
    import json

    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        **COMMON,
        moe_intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_shared_experts=1,
        n_routed_experts=8,
        routed_scaling_factor=2.5,
        kv_lora_rank=512,
        q_lora_rank=96,
        qk_rope_head_dim=64,
        v_head_dim=64,
        qk_nope_head_dim=64,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        rope_scaling=None,
        num_nextn_predict_layers=0,
    )
    save(DeepseekV3ForCausalLM(config), directory)
    # transformers leaves out what it takes for granted, and vLLM's defaults differ.
    path = directory / "config.json"
    more = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def _make_kimi(directory: Path) -> None:
    import json

    import torch
    from safetensors.torch import load_file, save_file

    text = tiny_deepseek()
    directory.mkdir()
    torch.manual_seed(1)
    weights = {
        f"language_model.{name}": tensor for name, tensor in load_file(text / "model.safetensors").items()
    }
    for name, shape in _VISION_WEIGHTS.items():
        one = "norm" in name and name.endswith("weight")
        weights[name] = torch.randn(shape) * 0.06 + (1.0 if one else 0.0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "torch_dtype": "float32",
        "image_token_id": _MEDIA_PAD,
        "use_unified_vision_chunk": True,
        "tie_word_embeddings": False,
        "text_config": {**json.loads((text / "config.json").read_text()), "model_type": "kimi_k2"},
        "vision_config": {
            "patch_size": _PATCH,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "pos_emb_time": 4,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "hidden_size": _VISION_HIDDEN,
            "intermediate_size": _VISION_HIDDEN,
            "merge_kernel_size": [2, 2],
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "KimiK25VisionProcessor",
        "media_proc_cfg": {
            "patch_size": _PATCH,
            "merge_kernel_size": 2,
            "in_patch_limit": 64,
            "patch_limit_on_one_side": 8,
            "in_patch_limit_each_frame": 16,
            "in_patch_limit_video": 64,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "sample_fps": 2.0,
            "max_num_frames_each_video": 4,
            "temporal_merge_kernel_size": 4,
        },
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


def _make_draft(directory: Path) -> None:
    import json

    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    hidden, inner, keys, vocabulary = 256, 512, 128, 512
    torch.manual_seed(2)
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.06
        for name, shape in shapes.items()
    }
    weights["d2t"] = torch.arange(vocabulary, dtype=torch.int64)  # Draft token i is the target's 2 i.
    weights["t2d"] = torch.arange(VOCABULARY) % 2 == 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        **COMMON,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "draft_vocab_size": vocabulary,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],  # The default of 5 layers is (2, 2, 2): only one.
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))


def save(model: Any, directory: Path) -> None:
    """Spread the weights so that every layer changes the stream and no two logits are close."""
    import torch

    model = model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 0.06)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.05)
    model.save_pretrained(directory)


def _tokenizer(directory: Path, more_special: Sequence[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [*_SPECIAL, *more_special]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<|unused{i}|>" for i in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=special[3:],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
