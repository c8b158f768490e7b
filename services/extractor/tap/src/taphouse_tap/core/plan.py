"""Who may do what in the next step: pure arithmetic on a picture of the scheduler.

Production comes first in everything. It is scheduled before extraction, what it waits for is taken from
extraction, and what extraction gets of tokens, slots and KV blocks is bounded by the quota.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from taphouse_tap.quota import Quota


@dataclass(frozen=True)
class Running:
    """An extraction request that runs: tokens it could compute now, blocks it holds, whether it generates.

    It generates when all its tokens but the last are computed: one that was preempted computes those that it
    had generated in pieces again, like a prompt.
    """

    id: str
    need: int
    blocks: int
    reserved: int
    generates: bool

    @property
    def least(self) -> int:
        """The fewest tokens that are of use to it: one that generates gets its drafts too, or nothing."""
        return self.need if self.generates else min(1, self.need)


@dataclass(frozen=True)
class Waiting:
    """An extraction request that waits: tokens of its prompt, blocks it may come to hold.

    The smallest `priority` begins first, in a step that has `least` tokens for it.
    """

    id: str
    tokens: int
    reserved: int
    priority: int = 0
    least: int = 1


@dataclass(frozen=True)
class Production:
    """Production's requests: tokens and blocks that those running need now, how many wait, and for what."""

    running: int = 0
    need: int = 0
    blocks: int = 0
    waiting: int = 0
    waiting_blocks: int = 0


@dataclass(frozen=True)
class View:
    """The scheduler before a step. Extraction's requests are in the order in which they may begin.

    `tokens`: those of a step. `slots`: requests that may run at once. `free_blocks` of `blocks` are free.
    `whole`: prompts are computed in one step, or not at all (chunked prefill is off).
    """

    production: Production
    running: Sequence[Running]
    waiting: Sequence[Waiting]
    tokens: int
    slots: int
    blocks: int
    free_blocks: int
    block_size: int
    whole: bool = False

    @property
    def least(self) -> int:
        """The fewest tokens that are of use to whose turn it is: the oldest that runs, else the first."""
        oldest = next((request.least for request in self.running if request.need), 0)
        return oldest or next((request.least for request in self.waiting), 1)


@dataclass(frozen=True)
class Plan:
    """`allowed`: tokens by running extraction request. `preempt` and `admit` name requests, in order.

    `tokens` bounds the whole step; None leaves it as it is.
    """

    allowed: dict[str, int] = field(default_factory=dict)
    preempt: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    tokens: int | None = None


def plan(view: View, quota: Quota, tokens: int, *, tries_whole: bool = False) -> Plan:
    """Divide one step, of which extraction may have `tokens` tokens.

    Where prompts are computed whole, the first one's may pass that: while no production is there, and with
    `tries_whole`.
    """
    production = view.production
    preempt = _preempt(view)
    kept = [request for request in view.running if request.id not in preempt]
    freed = sum(request.blocks for request in view.running if request.id in preempt)
    wanted = production.blocks + production.waiting_blocks
    blocks = view.free_blocks + freed - wanted
    tokens = 0 if quota.stopped else tokens
    passes = (tries_whole and not quota.stopped) or (tokens > 0 and not production.running)
    allowed, left, blocks = _allow(kept, tokens, blocks, view.block_size, within_free=wanted > 0)
    if production.waiting:
        return Plan(allowed, preempt)
    if view.whole and view.waiting and passes:
        tokens, left = tokens + max(0, view.waiting[0].tokens - left), max(left, view.waiting[0].tokens)
    admit, left = _admit(view, kept, quota, left, blocks)
    return Plan(allowed, preempt, admit, min(view.tokens, production.need + tokens - left))


def _preempt(view: View) -> tuple[str, ...]:
    """Extraction requests, newest first, whose slots and blocks production is in want of."""
    production = view.production
    slots = 0
    if production.waiting:
        slots = production.running + production.waiting + len(view.running) - view.slots
    blocks = production.blocks + production.waiting_blocks - view.free_blocks
    gone: list[str] = []
    for request in reversed(view.running):
        if slots <= 0 and blocks <= 0:
            break
        gone.append(request.id)
        slots -= 1
        blocks -= request.blocks
    return tuple(gone)


def _allow(
    running: Sequence[Running], tokens: int, blocks: int, block_size: int, *, within_free: bool
) -> tuple[dict[str, int], int, int]:
    """Tokens for those that run, oldest first; returns what is left of tokens and blocks too.

    `within_free`: nobody gets more than the free blocks surely hold, since the others are production's.
    """
    allowed: dict[str, int] = {}
    for request in running:
        grant = min(request.need, tokens)
        if grant < request.least:
            grant = 0
        takes = -(-grant // block_size) + 1 if grant else 0
        if within_free and takes > max(blocks, 0):
            grant = takes = 0
        allowed[request.id] = grant
        tokens -= grant
        blocks -= takes
    return allowed, tokens, blocks


def _admit(
    view: View, running: Sequence[Running], quota: Quota, tokens: int, blocks: int
) -> tuple[tuple[str, ...], int]:
    """Requests that begin now, and what is left of `tokens`. One alone may pass the share of the KV cache."""
    slots = min(quota.slots - len(running), view.slots - view.production.running - len(running))
    reserved = sum(request.reserved for request in running)
    share = int(quota.kv_share * view.blocks)
    admitted: list[str] = []
    for request in view.waiting:
        fits = reserved + request.reserved <= share or (reserved == 0 and share > 0)
        if len(admitted) >= slots or tokens < request.least or not fits or request.reserved > blocks:
            break
        if view.whole and request.tokens > tokens:
            break
        admitted.append(request.id)
        reserved += request.reserved
        blocks -= request.reserved
        tokens -= min(tokens, request.tokens)
    return tuple(admitted), tokens
