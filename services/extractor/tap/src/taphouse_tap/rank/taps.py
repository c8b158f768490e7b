"""The taps: forward hooks inside the compiled graph that copy the residual stream into a buffer.

A decoder layer begins with a norm that adds what the layer before it made to the residual stream, and hands
the sum on. That sum is what is tapped: the graph has it anyway, so a tap changes no fusion and no rounding
(a tap on the layer's own two arguments does: compilers sum them with others, unrounded).

Beside each row they record its mark: the position that the first tapped layer is given, and the token id that
the embedding is given. The marks say where a row goes and whose it is.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from taphouse_tap import compat, compat_model

# No `from __future__ import annotations` here: the custom ops' schemas are read from the annotations.

logger = logging.getLogger("vllm.taphouse")

_ROWS, _MARKS = "_taphouse_rows", "_taphouse_marks"


class _Faults:
    """Where the ops, which are global to the process, report an error in place of raising it."""

    report: Callable[[str, BaseException], None] | None = None

    def __call__(self, where: str, error: BaseException) -> None:
        if self.report is not None:
            self.report(where, error)


faults = _Faults()


def store_rows(buffer: torch.Tensor, stream: torch.Tensor, slot: int, column: int) -> None:
    """Copy W columns of the residual `stream` [n, H] to `buffer` [max_tokens, L, W] at layer `slot`.

    Rows past the buffer can only be padding and are left out. Never raises: it runs inside the forward.
    """
    try:
        count = min(stream.shape[0], buffer.shape[0])
        buffer[:count, slot].copy_(stream[:count, column : column + buffer.shape[2]])
    except Exception as error:
        faults("tap", error)


def store_marks(buffer: torch.Tensor, values: torch.Tensor, column: int) -> None:
    """Copy `values` [n] (positions or token ids) to `buffer` [max_tokens, 2] at `column`. Never raises."""
    try:
        count = min(values.shape[0], buffer.shape[0])
        buffer[:count, column].copy_(values[:count])
    except Exception as error:
        faults("marks tap", error)


def _nothing(*_: object) -> None:
    """What the ops do to a graph while it is traced: they only change their buffer."""


compat.register_op("taphouse_store_rows", store_rows, ["buffer"], _nothing)
compat.register_op("taphouse_store_marks", store_marks, ["buffer"], _nothing)


class Taps:
    """The hooks of one model: installed at once, removed at once."""

    def __init__(
        self,
        stack: compat_model.Stack,
        layers: Sequence[int],
        rows: torch.Tensor,
        marks: torch.Tensor,
        column: int,
    ) -> None:
        self._handles: list[Any] = []
        self._modules: list[nn.Module] = []
        try:
            for slot, layer in enumerate(layers):
                norm = compat_model.norm_of(stack, layer)
                hook = _rows_hook(slot, column, compat_model.stream_arguments(norm)[0])
                self._own(norm, _ROWS, rows)
                self._handles.append(norm.register_forward_hook(hook, with_kwargs=True))
            first = stack.layers[min(*layers, len(stack.layers) - 1)]
            self._mark(first, marks, 0, compat_model.positions_argument(first))
            self._mark(stack.embedding, marks, 1, compat_model.token_ids_argument(stack.embedding))
        except Exception:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the hooks out again (only before the model is compiled does this undo everything)."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            for name in (_ROWS, _MARKS):
                module._buffers.pop(name, None)
        self._handles.clear()
        self._modules.clear()

    def _mark(self, module: nn.Module, marks: torch.Tensor, column: int, at: compat_model.Argument) -> None:
        self._own(module, _MARKS, marks)
        self._handles.append(module.register_forward_pre_hook(_marks_hook(column, at), with_kwargs=True))

    def _own(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        # The buffer is the module's, so that a graph loaded from the compile cache finds it again.
        module.register_buffer(name, buffer, persistent=False)
        self._modules.append(module)


def _rows_hook(slot: int, column: int, hidden: compat_model.Argument) -> Callable[..., None]:
    at, name = hidden.at, hidden.name

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # With a residual the norm returns (normed, stream); the first norm is given the stream alone.
        given = args[at] if len(args) > at else kwargs[name]
        stream = output[1] if isinstance(output, tuple) else given
        torch.ops.vllm.taphouse_store_rows(module._taphouse_rows, stream, slot, column)

    return hook


def _marks_hook(column: int, argument: compat_model.Argument) -> Callable[..., None]:
    at, name = argument.at, argument.name

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = args[at] if len(args) > at else kwargs[name]
        torch.ops.vllm.taphouse_store_marks(module._taphouse_marks, values, column)

    return hook
