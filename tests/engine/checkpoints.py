"""Tiny float32 checkpoints with a byte-level tokenizer and a chat template, made once under `.cache/`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "engine-tests-2"
LAYERS = 5
VOCABULARY = 1024
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_llama() -> Path:
    """A Llama of 5 layers, hidden 256, 4 heads."""
    return _made("llama", _make_llama)


def tiny_deepseek() -> Path:
    """A DeepseekV3 (MLA, shared and routed experts) of 5 layers, hidden 256."""
    return _made("deepseek", _make_deepseek)


def _made(name: str, make: Any) -> Path:
    directory = CACHE / name
    if not directory.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = CACHE / f".{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        make(temporary)
        _tokenizer(temporary)
        temporary.rename(directory)
    return directory


def _make_llama(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**_COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    _save(LlamaForCausalLM(config), directory)


def _make_deepseek(directory: Path) -> None:
    import json

    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        **_COMMON,
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
    _save(DeepseekV3ForCausalLM(config), directory)
    # transformers leaves out what it takes for granted, and vLLM's defaults differ.
    path = directory / "config.json"
    more = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def _save(model: Any, directory: Path) -> None:
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


def _tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
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
