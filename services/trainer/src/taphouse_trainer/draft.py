"""The EAGLE-3 draft model: the only file that imports speculators.

Model, losses and checkpoint format are speculators'; what it would fetch by itself (the target's config
through ``AutoConfig``, the target's weights by suffix) is passed in instead, so that a target whose config
needs remote code, or whose checkpoint is hundreds of gigabytes, is no different from any other.

Trained are the fusion layer, the decoder layers and the norms. Embeddings and the output layer are the
target's, frozen. vLLM takes the embeddings from its own target, so checkpoints leave them out.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import LlamaConfig

from taphouse_trainer.batches import Batch
from taphouse_trainer.errors import CheckpointError, SettingsConflict, TargetError
from taphouse_trainer.verifier import RawTensor, Verifier
from taphouse_trainer.vocabulary import Vocabulary

_NOT_SAVED = ("verifier_lm_head.", "verifier_norm.", "embed_tokens.")
_MLA_HEAD_DIM = 128
_COPIED_ROPES = frozenset({"default", "linear", "dynamic", "llama3", "yarn"})


@dataclass(frozen=True)
class DraftShape:
    """What a draft is made of.

    ``layers``: ids of the auxiliary layers, in the order they are fused. ``num_layers``: its own decoder
    layers. ``generation``: "3" is the EAGLE-3 of the paper; "3.1" norms what is fused and what is fed back,
    which needs a vLLM that knows both (0.32 does). ``sliding_window``: rows a layer can look back, ``None``
    for all.
    """

    layers: tuple[int, ...]
    num_layers: int = 1
    ttt_steps: int = 3
    generation: Literal["3", "3.1"] = "3"
    sliding_window: int | None = None


@dataclass(frozen=True)
class Objective:
    """A speculators loss (a name, or JSON of names and weights), and the factor on each further step's.

    Raises:
        SettingsConflict: speculators knows no such loss, or a weight is no number to multiply with.
    """

    loss: str = "kl_div"
    step_decay: float = 1.0

    def __post_init__(self) -> None:
        try:
            weights = [weight for _, weight in resolve_loss_config(self.loss, "eager").values()]
        except (ValueError, RecursionError) as e:
            raise SettingsConflict(f"loss: {e}") from e
        if not all(math.isfinite(weight) for weight in weights):
            raise SettingsConflict(f"loss: {self.loss} has a weight that is not finite")


@dataclass(frozen=True)
class Outcome:
    """Loss (with its graph) of a batch, and how often the draft was right.

    ``accuracy[k]``: share of trained rows where all of the first ``k + 1`` proposals are the target's first
    choice among the draft's tokens. ``1 + sum(accuracy)`` estimates the acceptance length of greedy
    decoding.
    """

    loss: torch.Tensor
    accuracy: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        """Expected tokens a target step yields with as many proposals as steps were trained."""
        return 1.0 + sum(self.accuracy)


class Draft:
    """A draft model with the target's frozen tensors in place, on one device."""

    def __init__(
        self,
        verifier: Verifier,
        vocabulary: Vocabulary,
        shape: DraftShape,
        objective: Objective,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Build with fresh weights from torch's current seed; parameters are float32.

        ``autocast``: compute dtype, ``None`` for float32 throughout.

        Raises:
            TargetError: the target's ``config.json`` lacks what a draft follows, or says it wrongly.
        """
        self.shape = shape
        self.vocabulary = vocabulary
        self.device = device
        self._autocast = autocast
        # Fused losses are Triton kernels: CUDA only.
        kind = "fused" if device.type == "cuda" else "eager"
        self._call: dict[str, Any] = {
            "ttt_steps": shape.ttt_steps,
            "ttt_step_loss_decay": objective.step_decay,
            "loss_config": resolve_loss_config(objective.loss, kind),
        }
        attention = "simple_flex_attention" if kind == "fused" else "sdpa"
        try:
            config = _draft_config(verifier, vocabulary, shape, attention)
        except Exception as e:  # whatever the libraries make of a value that is none
            raise TargetError(f"{verifier.path}: config.json makes no draft ({type(e).__name__}: {e})") from e
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.model = Eagle3DraftModel(config)
        _place_frozen(self.model, verifier, vocabulary)
        self.model.to(device)

    def trainable(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that are trained."""
        return ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def evaluate(self, batch: Batch) -> Outcome:
        """Loss and accuracy of a batch, without gradients."""
        with torch.no_grad():
            return self.loss(batch)

    def loss(self, batch: Batch) -> Outcome:
        """Forward over all unrolled steps. Loss is the mean over trained rows, summed over steps."""
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            _, loss, metrics = self.model(
                hidden_states=batch.hidden_states,
                input_ids=batch.input_ids,
                document_ids=batch.document_ids,
                loss_mask=batch.loss_mask,
                position_ids=batch.position_ids,
                verifier_last_hidden_states=batch.last_hidden_states,
                **self._call,
            )
        accuracy = tuple(
            float(metrics[f"full_acc_{k}_sum"]) / max(1.0, float(metrics[f"full_acc_{k}_total"]))
            for k in range(self.shape.ttt_steps)
        )
        return Outcome(loss, accuracy)

    def save_servable(self, directory: Path, dtype: torch.dtype) -> None:
        """Write config and weights as vLLM and speculators read them, floats in ``dtype``."""
        _write_config(self.model.config, directory / "config.json", dtype)
        tensors = {
            name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
            for name, t in self.model.state_dict().items()
            if not name.startswith(_NOT_SAVED)
        }
        file = directory / "model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the engine that serves it may run as another user

    def save_exact(self, file: Path) -> None:
        """Write the trained parameters as they are, for an exact resume."""
        save_file({n: p.detach().cpu().contiguous() for n, p in self.trainable()}, file)

    def load_exact(self, file: Path) -> None:
        """Take over what ``save_exact`` wrote.

        Raises:
            CheckpointError: the file holds other parameters than this draft has.
        """
        stored, own = load_file(file, device=str(self.device)), dict(self.trainable())
        if stored.keys() != own.keys() or any(stored[n].shape != p.shape for n, p in own.items()):
            raise CheckpointError(f"{file} holds the weights of a draft of another shape")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(stored[name])


def library_mapping(
    frequencies: dict[int, int], draft_size: int, target_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The most frequent tokens as (``d2t`` offsets int64, ``t2d`` mask bool), by speculators' own helper."""
    d2t, t2d = build_vocab_mappings_from_distribution(frequencies, draft_size, target_size)
    return d2t.numpy(), t2d.numpy()


def _draft_config(verifier: Verifier, vocabulary: Vocabulary, shape: DraftShape, attention: str) -> Any:
    layer_config = LlamaConfig(**_layer_config(verifier, shape))
    layer_config._attn_implementation = attention
    newer = shape.generation == "3.1"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=vocabulary.draft_size,
        norm_before_residual=True,
        norm_before_fc=newer,
        norm_output=newer,
        eagle_aux_hidden_state_layer_ids=list(shape.layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(verifier.path), architectures=list(verifier.architectures)
            ),
        ),
    )


def _layer_config(verifier: Verifier, shape: DraftShape) -> dict[str, Any]:
    """A Llama decoder layer of the target's width.

    Heads follow the target's. Targets with latent attention (MLA) have no head size that a plain layer
    could take over (hidden / heads is 112 for Kimi-K2's 7168 / 64): theirs is 128, with default rotary
    embeddings.
    """
    config = verifier.config
    is_mla = "kv_lora_rank" in config
    heads = int(config["num_attention_heads"])
    head_dim = _MLA_HEAD_DIM if is_mla else int(config.get("head_dim") or verifier.hidden_size // heads)
    kind = "full_attention" if shape.sliding_window is None else "sliding_attention"
    return {
        "vocab_size": verifier.vocab_size,
        "hidden_size": verifier.hidden_size,
        "intermediate_size": int(config.get("intermediate_size") or 3 * verifier.hidden_size),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "hidden_act": config.get("hidden_act") or config.get("hidden_activation") or "silu",
        "max_position_embeddings": int(config.get("max_position_embeddings") or 4096),
        "initializer_range": float(config.get("initializer_range") or 0.02),
        "rms_norm_eps": float(config.get("rms_norm_eps") or 1e-6),
        "rope_parameters": _rope(config, is_mla),
        "tie_word_embeddings": False,
        "layer_types": [kind] * shape.num_layers,
        "sliding_window": shape.sliding_window,
        "use_sliding_window": shape.sliding_window is not None,
    }


def _rope(config: Any, is_mla: bool) -> dict[str, Any]:
    """The target's rotary embedding where a Llama layer has the same, else the default one with its base."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(given.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    if is_mla or kind not in _COPIED_ROPES or "mrope_section" in given:
        return {"rope_type": "default", "rope_theta": theta}
    given.pop("type", None)
    given.pop("partial_rotary_factor", None)
    return {"rope_type": kind, "rope_theta": theta, **given}


def _place_frozen(model: Any, verifier: Verifier, vocabulary: Vocabulary) -> None:
    """Put the target's embeddings, output rows and final norm where speculators would have loaded them."""
    t2d = torch.from_numpy(vocabulary.target_to_draft)
    model.load_vocab_mappings(t2d, torch.from_numpy(vocabulary.draft_to_target))
    head = _float32(verifier.lm_head)[t2d]
    norm = _float32(verifier.final_norm)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(_float32(verifier.embed))
        model.lm_head.weight.copy_(head)
        model.verifier_lm_head.weight.copy_(head)
        model.verifier_norm.weight.copy_(norm)
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        module.weight.requires_grad_(False)


def _float32(tensor: RawTensor) -> torch.Tensor:
    return torch.from_numpy(tensor.as_float32())


def _write_config(config: Any, file: Path, dtype: torch.dtype) -> None:
    """The config as speculators and vLLM read it, with the dtype that the weights are stored in.

    Not by ``save_pretrained``: that adds a copy of the library's source and an ``auto_map`` to it.
    """
    fields = {k: v for k, v in json.loads(config.to_json_string()).items() if k != "auto_map"}
    file.write_text(json.dumps({**fields, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")
