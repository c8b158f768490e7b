"""Tiny checkpoints of models that are not captured: made once under `.cache/`."""

from __future__ import annotations

from pathlib import Path

from tests.engine.checkpoints import COMMON, LAYERS, made, save


def tiny_lfm2() -> Path:
    """An LFM2 of 5 layers, all but one of them short convolutions: a hybrid."""
    return made("lfm2", _make_lfm2)


def tiny_gpt2() -> Path:
    """A GPT-2 of 5 layers, whose stack goes by other names and has no plain residual stream."""
    return made("gpt2", _make_gpt2)


def _make_lfm2(directory: Path) -> None:
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        **{**COMMON, "tie_word_embeddings": True},
        num_attention_heads=4,
        num_key_value_heads=2,
        block_auto_adjust_ff_dim=False,
        block_dim=COMMON["hidden_size"],
        conv_dim=COMMON["hidden_size"],
        layer_types=["full_attention" if n == 2 else "conv" for n in range(LAYERS)],
    )
    save(Lfm2ForCausalLM(config), directory)


def _make_gpt2(directory: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=COMMON["vocab_size"],
        n_embd=COMMON["hidden_size"],
        n_layer=LAYERS,
        n_head=4,
        n_positions=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    save(GPT2LMHeadModel(config), directory)
