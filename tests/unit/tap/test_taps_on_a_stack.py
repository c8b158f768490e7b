"""The hooks and their ops, on a stack with vLLM's signatures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.tap.worker_fakes import Decoder
from torch import nn

from taphouse_tap import compat_model
from taphouse_tap.errors import CaptureRefused
from taphouse_tap.rank.tap import tapped_layers
from taphouse_tap.rank.taps import Taps, faults

HIDDEN = 8


@pytest.fixture
def reported() -> Iterator[list[str]]:
    """Where the ops reported errors."""
    places: list[str] = []
    faults.report = lambda where, _: places.append(where)
    yield places
    faults.report = None


def run(model: Decoder, tokens: int) -> torch.Tensor:
    hidden = torch.arange(tokens * HIDDEN, dtype=torch.float32).reshape(tokens, HIDDEN)
    with torch.inference_mode():
        model(torch.arange(500, 500 + tokens), torch.arange(10, 10 + tokens), hidden.clone())
    return hidden


def tapped(
    model: Decoder, layers: list[int], column: int, width: int
) -> tuple[Taps, torch.Tensor, torch.Tensor]:
    rows = torch.full((6, len(layers), width), float("nan"))
    marks = torch.full((6, 2), -1)
    stack = compat_model.find_stack(model, torch.float32)
    return Taps(stack, layers, rows, marks, column), rows, marks


@pytest.mark.parametrize("layers", [[0, 1, 3, 4], [2, 4], [4]])
def test_the_stream_entering_each_layer_is_stored(layers: list[int], reported: list[str]) -> None:
    model = Decoder(4)
    _, rows, marks = tapped(model, layers, 2, 3)
    hidden = run(model, 5)
    for slot, layer in enumerate(layers):
        assert torch.equal(rows[:5, slot], hidden[:, 2:5] + layer)
    assert rows[5].isnan().all()
    assert marks[:, 0].tolist() == [10, 11, 12, 13, 14, -1]
    assert marks[:, 1].tolist() == [500, 501, 502, 503, 504, -1]
    assert reported == []


def test_padding_past_the_buffer_is_left_out(reported: list[str]) -> None:
    model = Decoder(2)
    _, rows, marks = tapped(model, [0, 2], 0, HIDDEN)
    hidden = run(model, 9)
    assert torch.equal(rows[:, 0], hidden[:6])
    assert marks[:, 0].tolist() == [10, 11, 12, 13, 14, 15] and reported == []


def test_removed_taps_leave_the_model_as_it_was() -> None:
    model = Decoder(3)
    taps, rows, _ = tapped(model, [0, 3], 0, HIDDEN)
    taps.remove()
    run(model, 4)
    assert rows.isnan().all()
    assert not list(model.buffers())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_an_error_in_a_tap_is_reported_and_not_raised(reported: list[str]) -> None:
    model = Decoder(2)
    tapped(model, [0, 2], 0, HIDDEN)
    model.layers[0].input_layernorm._buffers["_taphouse_rows"] = torch.zeros(())
    model.layers[0]._buffers["_taphouse_marks"] = torch.zeros(())
    run(model, 3)
    assert sorted(reported) == ["marks tap", "tap"]


def test_half_installed_taps_are_taken_out_again() -> None:
    model = Decoder(2)
    stack = compat_model.find_stack(model, torch.float32)
    with pytest.raises(IndexError):
        Taps(stack, [0, 7], torch.zeros(6, 2, 8), torch.zeros(6, 2), 0)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_the_taps_survive_compilation(reported: list[str]) -> None:
    """One graph, no breaks: Dynamo must be able to take the hooks in."""
    model = Decoder(3)
    _, rows, marks = tapped(model, [1, 3], 0, HIDDEN)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    hidden = torch.randn(5, HIDDEN)
    with torch.inference_mode():
        compiled(torch.arange(500, 505), torch.arange(5), hidden.clone())
    assert torch.equal(rows[:5, 0], hidden + 1) and torch.equal(rows[:5, 1], hidden + 1 + 1 + 1)
    assert marks[:5].tolist() == [[n, 500 + n] for n in range(5)]
    assert reported == []


class Wrapper(nn.Module):
    """As a multimodal model: a vision tower with more layers, and the language model behind a method."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Decoder(9)
        self.language = Decoder(3)

    def get_language_model(self) -> nn.Module:
        return self.language


def test_the_language_models_stack_is_found() -> None:
    assert len(compat_model.find_stack(Wrapper(), torch.bfloat16).layers) == 3


class Rescaling(nn.Module):
    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        return hidden_states * 0.5 if hidden_states.dtype == torch.float16 else hidden_states


def test_stacks_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(CaptureRefused, match="no decoder stack"):
        compat_model.find_stack(nn.Linear(2, 2), torch.float32)
    model = Decoder(2)
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(CaptureRefused, match="takes no hidden_states"):
        compat_model.find_stack(model, torch.float32)
    model.layers = nn.ModuleList([Rescaling()])
    assert compat_model.find_stack(model, torch.bfloat16)
    with pytest.raises(CaptureRefused, match="rescales"):
        compat_model.find_stack(model, torch.float16)


@pytest.mark.parametrize(
    ("configured", "count", "expected"),
    [
        (None, 61, [2, 30, 58, 61]),
        (None, 2, [1, 2]),
        ([3, 1], 5, [1, 3, 5]),
        ([5], 5, [5]),
        ([0, 0], 5, [0, 5]),
        ([], 5, [5]),
    ],
)
def test_layers(configured: list[int] | None, count: int, expected: list[int]) -> None:
    assert tapped_layers(configured, count) == expected


@pytest.mark.parametrize("configured", [[6], [-1], [True], ["1"], "1,2", 3])
def test_layers_that_do_not_exist_are_refused(configured: Any) -> None:
    with pytest.raises(CaptureRefused, match="0 to 5"):
        tapped_layers(configured, 5)
