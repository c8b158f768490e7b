"""Proving samples: what the engine ranked highest must follow from the states that are trained on.

A few samples carry a witness, the engine's own top tokens and logprobs at some rows. With the target's final
norm and output head, `head(norm(h))` of the stored states must give the same. It is the one check that needs
no trust in anything between the engine's sampler and this process: tap, slices, codec, store.
"""

from __future__ import annotations

import numpy as np

from taphouse.samples import Sample, to_float32
from taphouse_trainer.verifier import Verifier

_TOLERANCE = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.25}
"""How far differences of logprobs may be off, in nats, for logits up to 16 in size; it grows with their size.

The engine rounds activations and logits to its dtype, bfloat16's steps being 2**-8 of a value.
"""


def contradiction(sample: Sample, final: int, verifier: Verifier) -> str | None:
    """Say how a sample's witness contradicts its states, or None.

    `final` is the place of the stream entering the final norm on the layer axis. Compared are differences to
    the best token's logprob: they are differences of logits, for which a few rows of the head are enough. A
    target that scales or caps its logits is left out.
    """
    if sample.witness is None or not verifier.plain_logits:
        return None
    rows = sample.witness.rows
    states = to_float32(sample.hidden_states[rows.start : rows.stop, final], sample.dtype)
    for at, row in enumerate(rows):
        tokens = np.asarray(sample.witness.top_tokens[at])
        if int(tokens.max()) >= verifier.vocab_size:
            return f"row {row}: token {int(tokens.max())}, the target knows {verifier.vocab_size}"
        logits = verifier.logits(states[at], tokens)
        said = np.asarray(sample.witness.top_logprobs[at])
        off = np.abs((logits - logits[0]) - (said - said[0]))
        limit = _TOLERANCE[sample.dtype] * max(1.0, float(np.abs(logits).max()) / 16)
        if not float(off.max()) <= limit:
            return (
                f"row {row}: the states give logprobs that are {float(off.max()):.3g} nats off what the "
                f"engine said (allowed: {limit:.3g})"
            )
    return None
