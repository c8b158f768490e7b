"""What vLLM's models look like inside: the decoder stack, the arguments of its layers, the output head.

The part of `taphouse_tap.compat` that depends on models and not on the engine.

====================================================  ==================================================
touched                                               for
====================================================  ==================================================
`get_language_model()` of multimodal wrappers         the model that has the stack
`embed_tokens`, `layers`, `norm` side by side         the stack: the longest such list of layers
layers' `input_layernorm` and the final norm:         where the residual stream is read: they add to it
`forward(x, residual)` -> (normed, stream)            and hand it on
the embedding's first argument                        the token ids of the rows
`lm_head.quant_method.apply`, `.shard_indices`        checks of captures, without a collective
====================================================  ==================================================
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from .errors import CaptureRefused


@dataclass(frozen=True)
class Argument:
    """One argument of a module's forward: its place among the positional ones and its name."""

    at: int
    name: str


@dataclass(frozen=True)
class Stack:
    """The decoder stack of the language model: token embedding, layers, the norm after the last of them."""

    embedding: nn.Module
    layers: nn.ModuleList
    norm: nn.Module


def find_stack(model: nn.Module, dtype: torch.dtype) -> Stack:
    """Return the language model's decoder stack: the longest `layers` list beside `embed_tokens` and `norm`.

    Raises `CaptureRefused` if there is none, or if its layers don't hand on the plain residual stream.
    """
    language = model.get_language_model() if hasattr(model, "get_language_model") else model
    found: Stack | None = None
    for module in language.modules():
        embedding, layers, norm = (getattr(module, n, None) for n in ("embed_tokens", "layers", "norm"))
        if (
            isinstance(embedding, nn.Module)
            and isinstance(layers, nn.ModuleList)
            and isinstance(norm, nn.Module)
            and (found is None or len(layers) > len(found.layers))
        ):
            found = Stack(embedding, layers, norm)
    if found is None or not len(found.layers):
        raise CaptureRefused(
            f"no decoder stack (layers beside embed_tokens and norm) found in {type(model).__name__}"
        )
    for layer in {type(layer): layer for layer in found.layers}.values():
        stream_arguments(layer)
        if dtype == torch.float16 and "float16" in inspect.getsource(type(layer).forward):
            raise CaptureRefused(f"{type(layer).__name__} rescales the residual stream in float16")
    return found


def stream_arguments(module: nn.Module) -> tuple[Argument, Argument]:
    """Return where a decoder layer (or the final norm) takes the hidden states and the residual."""
    # vLLM's custom ops dispatch: their `forward` takes anything, `forward_native` names what.
    forward = getattr(module, "forward_native", module.forward)
    names = list(inspect.signature(forward).parameters)
    hidden = next((n for n in ("hidden_states", "x") if n in names), None)
    if hidden is None or "residual" not in names:
        raise CaptureRefused(f"{type(module).__name__}.forward{names} takes no hidden_states and residual")
    return Argument(names.index(hidden), hidden), Argument(names.index("residual"), "residual")


def norm_of(stack: Stack, layer: int) -> nn.Module:
    """Return the norm that the stream entering `layer` runs through first; raise `CaptureRefused` without."""
    if layer == len(stack.layers):
        return stack.norm
    norm = getattr(stack.layers[layer], "input_layernorm", None)
    if not isinstance(norm, nn.Module):
        raise CaptureRefused(f"{type(stack.layers[layer]).__name__} has no input_layernorm to tap")
    return norm


def positions_argument(module: nn.Module) -> Argument:
    """Return where a decoder layer takes the positions."""
    names = list(inspect.signature(module.forward).parameters)
    if "positions" not in names:
        raise CaptureRefused(f"{type(module).__name__}.forward{names} takes no positions")
    return Argument(names.index("positions"), "positions")


def token_ids_argument(module: nn.Module) -> Argument:
    """Return where the token embedding takes the ids: its first argument."""
    forward = getattr(module, "forward_native", module.forward)
    return Argument(0, next(iter(inspect.signature(forward).parameters)))


@dataclass(frozen=True)
class LocalLogits:
    """Logits [rows, n] of this rank's part of the vocabulary, whose first token id is `first`."""

    values: torch.Tensor
    first: int


def local_logits(model: nn.Module, hidden: torch.Tensor) -> LocalLogits:
    """Apply this rank's part of the head to normed states [rows, H]. Uses no collective."""
    head = next(
        (m.lm_head for m in model.modules() if hasattr(getattr(m, "lm_head", None), "quant_method")), None
    )
    if head is None:
        raise CaptureRefused(f"{type(model).__name__} has no lm_head to check captures with")
    logits = head.quant_method.apply(head, hidden, bias=None)
    shard = head.shard_indices
    return LocalLogits(logits[:, : shard.num_org_elements].float(), int(shard.org_vocab_start_index))
