"""How many tokens a draft saves: vLLM's own speculative-decoding counters over the held-out prompts."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpx

_LINE = re.compile(r"^(vllm:[a-z_]+?)(?:_total)?(\{[^}]*\})? ([0-9.eE+-]+)$")
_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Measured:
    """One way of drafting. Counts are over all held-out prompts together.

    `acceptance_length` is vLLM's: 1 + accepted tokens per proposal. `tokens_a_step` counts steps without a
    proposal too (n-gram often finds nothing to propose).
    """

    name: str
    prompts: int
    tokens: int
    drafts: int
    accepted: int
    positions: tuple[float, ...]

    @property
    def acceptance_length(self) -> float | None:
        """None when nothing was proposed."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def tokens_a_step(self) -> float:
        """Tokens that one forward pass of the target yields."""
        return self.tokens / max(1, self.tokens - self.accepted)


def measure(
    name: str, base_url: str, model: str, prompts: Iterable[str], *, max_tokens: int, tick: Callable[[], None]
) -> Measured:
    """Lets the engine at `base_url` answer every prompt greedily, one after another.

    Raises:
        httpx.HTTPError: the engine did not answer.
    """
    with httpx.Client(base_url=base_url, timeout=180, trust_env=False) as client:
        before = _counters(client)
        tokens = count = 0
        for prompt in prompts:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "temperature": 0,
            }
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            tokens += int(answer["usage"]["completion_tokens"])
            count += 1
            tick()
        after = _counters(client)
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    drafts = _total(grown, _DRAFTS)
    positions = sorted((key[1], value) for key, value in grown.items() if key[0] == _PER_POSITION)
    return Measured(
        name=name,
        prompts=count,
        tokens=tokens,
        drafts=int(drafts),
        accepted=int(_total(grown, _ACCEPTED)),
        positions=tuple(round(value / drafts, 3) for _, value in positions) if drafts else (),
    )


def _counters(client: httpx.Client) -> dict[tuple[str, str], float]:
    """vLLM's counters by name (without `_total`) and labels."""
    text = client.get("/metrics").raise_for_status().text
    found = (_LINE.match(line) for line in text.splitlines())
    return {(m[1], m[2] or ""): float(m[3]) for m in found if m}


def _total(counters: dict[tuple[str, str], float], name: str) -> float:
    return sum(value for (key, _), value in counters.items() if key == name)
