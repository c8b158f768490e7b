"""The streamed answer: what is cut or damaged can't look whole."""

from __future__ import annotations

import numpy as np
import pytest

from taphouse.slices import BadStream, encode_stream, parse_stream

HEADER = {"object": "hidden_states", "dtype": "float32"}


def body() -> bytes:
    states = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    items = [{"index": 0, "shape": [2, 3, 4], "error": None}, {"index": 1, "shape": None, "error": "row 3"}]
    return encode_stream({**HEADER, "data": items}, [states, None])


def test_round_trip() -> None:
    stream = parse_stream(body())
    assert stream.header["object"] == "hidden_states"
    assert stream.states[1] is None
    assert np.array_equal(stream.states[0], np.arange(24, dtype="<f4").reshape(2, 3, 4))


def test_every_cut_is_seen() -> None:
    whole = body()
    for length in range(len(whole)):
        with pytest.raises(BadStream):
            parse_stream(whole[:length])
    with pytest.raises(BadStream):
        parse_stream(whole + b"\0")


def test_a_flip_in_a_payload_is_seen() -> None:
    whole = bytearray(body())
    whole[-20] ^= 1
    with pytest.raises(BadStream, match="item 0"):
        parse_stream(bytes(whole))
