"""What a sample is, and what it refuses to be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.unit.client.making import make_sample, make_states

from taphouse.errors import InvalidSample


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"id": ""}, "id is a string of 1 to 256"),
        ({"id": "x" * 257}, "id is a string of 1 to 256"),
        ({"id": "a\nb"}, "printable"),
        ({"id": "\ud800"}, "printable"),
        ({"dtype": "float64"}, "float64"),
        ({"dtype": "float16"}, "hidden_states"),
        ({"token_ids": np.zeros(5, np.int64)}, "token_ids"),
        ({"token_ids": np.zeros((5, 1), np.int32)}, "token_ids"),
        ({"loss_mask": np.zeros(4, np.uint8)}, "loss_mask"),
        ({"loss_mask": np.zeros(5, bool)}, "loss_mask"),
        ({"hidden_states": make_states((4, 3, 16), "bfloat16")}, "hidden_states"),
        ({"hidden_states": make_states((5, 48), "bfloat16")}, "hidden_states"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 6}, "prompt_len"),
        ({"next_token_id": -1}, "next_token_id"),
        ({"next_token_id": 2**31}, "next_token_id"),
    ],
)
def test_a_sample_of_wrong_shape_or_type_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidSample, match=problem):
        dataclasses.replace(make_sample(), **fields)


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(InvalidSample):
        make_sample(
            token_ids=np.zeros(0, np.int32),
            loss_mask=np.zeros(0, np.uint8),
            hidden_states=np.zeros((0, 3, 16), np.uint16),
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_float32_view_is_exact(dtype: str) -> None:
    values = np.array([1.0, -2.5, 0.15625, 3.0], np.float32).reshape(1, 1, 4)  # exact in all three
    states = (
        (values.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "bfloat16"
        else values.astype({"float16": np.float16, "float32": np.float32}[dtype])
    )
    wide = make_sample(0, 1, dtype, hidden_states=states).hidden_float32()
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, values)
