"""Load on one engine, made in its front end's process: decode, prefill, steady, mixed, fixed batches."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from .captures import Ahead, Captures, Consumer
from .shapes import Shape

_LEAD_TOKENS = 6
"""Tokens of each request before inter-token latency counts: by then all prompts have run."""

_SETTLED_TOKENS = 30
"""Tokens of each stream before steps of a mixed window count."""

_AHEAD_A_SECOND = 60
_AHEAD_BYTES = 8 << 30


class Load:
    """Requests to one engine, one at a time in this process; `captures` is there when it is tapped."""

    def __init__(self, llm: Any, shape: Shape, captures: Captures | None) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self._shape, self._captures = shape, captures
        self._ids = itertools.count()

    def prompts(self, lengths: Iterable[int], seed: int) -> list[list[int]]:
        """Random prompts, the same for the same seed."""
        rng = np.random.default_rng(seed)
        return [rng.integers(10, self._shape.config["vocab_size"] - 10, n).tolist() for n in lengths]

    def add(self, prompt: list[int], tokens: int, opt_in: Any = None, **more: Any) -> str:
        """Send one request; return its id."""
        parameters = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"taphouse": opt_in} if opt_in else None,
            skip_reading_prefix_cache=True if opt_in else None,
            **{"output_kind": RequestOutputKind.FINAL_ONLY, **more},
        )
        request_id = f"bench-{next(self._ids)}"
        self._engine.add_request(request_id, {"type": "token", "prompt_token_ids": prompt}, parameters)
        return request_id

    def step(self) -> list[Any]:
        """One look at the engine: the outputs that came, at once when there is nothing to wait for."""
        if self._engine.has_unfinished_requests():
            return list(self._engine.step())
        time.sleep(0.001)
        return []

    def finish(self) -> dict[str, Any]:
        """Run until nothing is left; return the last output of every request."""
        outputs: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                outputs[output.request_id] = output
        return outputs

    def decode(self, batch: int, tokens: int, seed: int) -> dict[str, Any]:
        """Milliseconds a token at this batch size, from the front end's clock."""
        counts = {}
        for prompt in self.prompts([32] * batch, seed):
            counts[self.add(prompt, tokens, output_kind=RequestOutputKind.DELTA)] = 0
        first = last = 0.0
        lead = 0
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                counts[output.request_id] += len(output.outputs[0].token_ids)
            least = min(counts.values())
            if not first and least >= _LEAD_TOKENS:
                first, lead = now, least
            if not last and max(counts.values()) >= tokens:
                last, total = now, max(counts.values())
        return {"value": 1e3 * (last - first) / max(1, total - lead)}

    def lead_in(self, seed: int) -> None:
        """Run one prompt that does not count: another engine had the card before."""
        self.add(self.prompts([self._shape.prompt_length], seed)[0], 1)
        self.finish()

    def prefill(self, prompts: int, capture: bool, seed: int, lead: bool = True) -> dict[str, Any]:
        """Prompt tokens/s of `prompts` prompts at once; when captured, until the last slice is sealed."""
        lengths = [self._shape.prompt_length] * prompts
        made = self.prompts(lengths, seed)
        opted = self._claims(lengths) if capture else []
        if lead:
            self.lead_in(seed + 1)
        began = time.perf_counter()
        for number, prompt in enumerate(made):
            self.add(prompt, 1, opted[number][1] if opted else None)
        self.finish()
        if opted:
            assert self._captures is not None
            self._captures.wait([tag for tag, _ in opted])
        took = time.perf_counter() - began
        if opted:
            self._take([tag for tag, _ in opted], sum(lengths))
        return {"value": sum(lengths) / took}

    def steady(self, seconds: float, capture: bool, seed: int) -> dict[str, Any]:
        """Prompts one after another for `seconds`; a consumer takes captured ones away meanwhile.

        The rate counts from the first request to the last answer, or to the last slice taken away.
        """
        length = self._shape.prompt_length
        outstanding = 3 * max(1, self._shape.max_num_batched_tokens // length)
        rng = np.random.default_rng(seed)
        vocabulary = self._shape.config["vocab_size"]
        consumer, ahead = self._consumer(capture, length, outstanding)
        sent = finished = 0
        self._llm.collective_rpc("bench_log_steps", args=(True,))
        began = time.perf_counter()
        try:
            while finished < sent or time.perf_counter() - began < seconds:
                missing = outstanding - (sent - finished)
                if missing and time.perf_counter() - began < seconds:
                    for _ in range(missing):
                        opt_in = ahead.take() if ahead else None
                        self.add(rng.integers(10, vocabulary - 10, length).tolist(), 1, opt_in)
                    sent += missing
                    if ahead:
                        ahead.fill()
                finished += sum(output.finished for output in self._engine.step())
            answered = time.perf_counter()
            if consumer:
                consumer.wait(sent)
            took = time.perf_counter() - began
        finally:
            if consumer and ahead:
                ahead.close()
                consumer.close()
        steps = self._llm.collective_rpc("bench_log_steps", args=(False,))[0]
        full = [ms for ms, tokens, _, _ in steps if tokens == self._shape.max_num_batched_tokens]
        result = {"value": sent * length / took, "requests": sent, "seconds": took, "full_steps_ms": full}
        result["drain_s"] = began + took - answered
        if consumer:
            result |= {f"taken_{name}": value for name, value in consumer.taken.items()}
            result["bytes_expected"] = sent * length * self._shape.row_bytes
        return result

    def mixed(self, seconds: float, capture: bool, seed: int) -> dict[str, Any]:
        """Ordinary streams decode while one prompt after another runs, captured or not.

        Returns engine steps with and without prompt tokens, and the streams' gaps between tokens (ms), once
        all streams decode.
        """
        shape, rng = self._shape, random.Random(seed)
        consumer, ahead = self._consumer(capture, shape.mixed_length, self._many(seconds))
        room = shape.max_model_len - 64
        streams = {
            self.add(prompt, room, output_kind=RequestOutputKind.DELTA): 0.0
            for prompt in self.prompts([32] * shape.mixed_streams, rng.randrange(1 << 30))
        }
        settling = dict.fromkeys(streams, _SETTLED_TOKENS)
        while max(settling.values()) > 0:
            for output in self._engine.step():
                settling[output.request_id] -= len(output.outputs[0].token_ids)
        self._llm.collective_rpc("bench_log_steps", args=(True,))
        gaps: list[float] = []
        running: set[str] = set()
        sent = 0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            while len(streams) < shape.mixed_streams:  # one came to the model's length
                (prompt,) = self.prompts([32], rng.randrange(1 << 30))
                streams[self.add(prompt, room, output_kind=RequestOutputKind.DELTA)] = 0.0
            if not running:
                (prompt,) = self.prompts([shape.mixed_length], rng.randrange(1 << 30))
                running.add(self.add(prompt, 1, ahead.take() if ahead else None))
                sent += 1
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id in running:
                    running.discard(output.request_id)
                elif output.finished:
                    streams.pop(output.request_id)
                else:
                    if streams[output.request_id]:
                        gaps.append(1e3 * (now - streams[output.request_id]))
                    streams[output.request_id] = now
        self._engine.abort_request(list(streams))
        self.finish()
        if consumer and ahead:
            consumer.wait(sent)
            ahead.close()
            consumer.close()
        steps = self._llm.collective_rpc("bench_log_steps", args=(False,))[0]
        most = shape.mixed_streams
        result = {
            "prompt_steps_ms": [ms for ms, tokens, _, _ in steps if tokens > most],
            "decode_steps_ms": [ms for ms, tokens, _, _ in steps if tokens <= most],
            "prompt_steps_host_ms": [(a, b) for _, tokens, a, b in steps if tokens > most],
            "gaps_ms": gaps,
            "prompts": sent,
        }
        if consumer:
            result |= {f"taken_{name}": value for name, value in consumer.taken.items()}
            result["bytes_expected"] = sent * shape.mixed_length * shape.row_bytes
        return result

    def logprobs(self, seed: int) -> dict[str, list[int]]:
        """Bits of the logprobs of fixed prompts, run `alone` and as one `batch`; generated tokens too."""
        prompts = self.prompts(self._shape.logprob_lengths, seed)
        more = {"prompt_logprobs": 2, "logprobs": 2}
        alone = []
        for prompt in prompts:
            self.add(prompt, 8, **more)
            alone.extend(self.finish().values())
        # One step of one short prompt is held up while the others arrive: they all run in the next one.
        self._llm.collective_rpc("bench_hold", args=(0.6,))
        self.add(prompts[0][:8], 1)
        time.sleep(0.2)
        ids = [self.add(prompt, 8, **more) for prompt in prompts]
        outputs = self.finish()
        return {"alone": _bits(alone), "batch": _bits([outputs[i] for i in ids])}

    def check(self, tokens: int, seed: int, repeat: bool) -> list[dict[str, Any]]:
        """Greedy tokens of captures among requests that did not opt in, all in one batch.

        `repeat` makes the first prompt one that an n-gram draft can guess.
        """
        assert self._captures is not None
        lengths = self._shape.check_lengths
        prompts = self.prompts([*lengths, *[50] * 5], seed)
        if repeat:
            prompts[0] = (prompts[0][:7] * lengths[0])[: max(21, lengths[0])]
        opted = self._claims([len(p) for p in prompts[: len(lengths)]], tokens)
        ids = [
            self.add(prompt, tokens, opted[number][1] if number < len(opted) else None)
            for number, prompt in enumerate(prompts)
        ]
        outputs = self.finish()
        self._captures.wait([tag for tag, _ in opted])
        verdicts = []
        for request_id, (tag, _) in zip(ids, opted, strict=False):
            output = outputs[request_id]
            token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            verdict = self._captures.check(tag, token_ids)
            verdicts.append({"prompt": len(output.prompt_token_ids), "generated": tokens, **verdict})
        return verdicts

    def _many(self, seconds: float) -> int:
        """Claims made before a mixed window, so that none is made while gaps are timed."""
        room = min(_AHEAD_BYTES, self._captures.free_bytes() // 3 if self._captures else 0)
        most = room // (self._shape.mixed_length * self._shape.row_bytes)
        return max(1, min(int(_AHEAD_A_SECOND * seconds), most))

    def _consumer(self, capture: bool, length: int, count: int) -> tuple[Consumer | None, Ahead | None]:
        if not capture or self._captures is None:
            return None, None
        return Consumer(self._captures), Ahead(self._captures, length, count)

    def _claims(self, lengths: Sequence[int], tokens: int = 1) -> list[tuple[str, dict[str, Any]]]:
        assert self._captures is not None
        return self._captures.claim(lengths, tokens)

    def _take(self, tags: Sequence[str], rows: int) -> None:
        assert self._captures is not None
        taken = self._captures.take(tags)
        if taken != rows * self._shape.row_bytes:
            raise RuntimeError(f"{taken} bytes sealed, {rows * self._shape.row_bytes} expected")


def _bits(outputs: Sequence[Any]) -> list[int]:
    """Token ids and the bits of their float32 logprobs, in a fixed order."""
    bits: list[int] = []
    for output in outputs:
        generated = output.outputs[0]
        bits.extend(generated.token_ids)
        for position in [*(output.prompt_logprobs or []), *(generated.logprobs or [])]:
            for token, entry in sorted((position or {}).items()):
                bits.extend((int(token), int(np.float32(entry.logprob).view(np.uint32))))
    return bits
