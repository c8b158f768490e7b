"""vLLM's scheduler as the policy sees it: requests, free blocks and who reuses them, who was preempted."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from taphouse_tap.compat_scheduler import VllmScheduler, _reuse_first


@dataclass(eq=False)
class Block:
    """A KV block of vLLM 0.22.1."""

    name: str
    block_hash: str | None = None
    ref_cnt: int = 1
    is_null: bool = False
    prev_free_block: Block | None = None
    next_free_block: Block | None = None


class Queue:
    """Its doubly linked list of free blocks."""

    def __init__(self) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = Block("head"), Block("tail")
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.num_free_blocks = 0

    def append(self, block: Block) -> None:
        last = self.fake_free_list_tail.prev_free_block
        assert last is not None
        last.next_free_block, block.prev_free_block = block, last
        block.next_free_block, self.fake_free_list_tail.prev_free_block = self.fake_free_list_tail, block
        self.num_free_blocks += 1

    def remove(self, block: Block) -> None:
        assert block.prev_free_block is not None and block.next_free_block is not None
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def names(self) -> list[str]:
        """Front to back, read in both directions."""
        forth, back = [], []
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            forth.append(block.name)
            block = block.next_free_block
        block = self.fake_free_list_tail.prev_free_block
        while block is not None and block is not self.fake_free_list_head:
            back.append(block.name)
            block = block.prev_free_block
        assert forth == back[::-1] and len(forth) == self.num_free_blocks
        return forth


@dataclass
class Manager:
    """vLLM 0.22.1's KV cache manager, its coordinator and its one pool."""

    blocks: dict[str, list[Block]]
    queue: Any = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self.block_pool = SimpleNamespace(free_block_queue=self.queue)
        single = SimpleNamespace(req_to_blocks=self.blocks)
        self.coordinator = SimpleNamespace(single_type_managers=[single], free=self._free)

    def _free(self, request_id: str) -> None:
        for block in reversed(self.blocks.pop(request_id, [])):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.queue.append(block)


def a_manager() -> Manager:
    production = [Block("p0", "h0"), Block("p1", "h1"), Block("p2")]
    shared = Block("shared", "h0", ref_cnt=2)
    return Manager({"chat": production, "ours": [shared, Block("e0"), Block("e1")]})


def test_extractions_blocks_go_in_front_of_cached_ones() -> None:
    manager = a_manager()
    _reuse_first(manager, SimpleNamespace(extraction={"ours": object()}))
    manager.coordinator.free("chat")
    manager.coordinator.free("ours")
    assert manager.queue.names() == ["e1", "e0", "p2", "p1", "p0"]


def test_productions_own_are_left_where_vllm_puts_them() -> None:
    manager = a_manager()
    _reuse_first(manager, SimpleNamespace(extraction={}))
    manager.coordinator.free("ours")
    manager.coordinator.free("chat")
    assert manager.queue.names() == ["e1", "e0", "p2", "p1", "p0"]
    manager.coordinator.free("nobody")


def test_a_vllm_that_does_it_itself_is_left_alone() -> None:
    manager = a_manager()
    manager.queue.prepend_n = lambda blocks: None
    free = manager.coordinator.free
    _reuse_first(manager, SimpleNamespace(extraction={}))
    assert manager.coordinator.free == free


@dataclass
class Stock:
    """As much of vLLM's scheduler as preempting needs."""

    running: list[Any]
    max_num_scheduled_tokens: int = 8
    scheduler_config: Any = field(default_factory=lambda: SimpleNamespace(enable_chunked_prefill=True))
    kv_cache_config: Any = field(default_factory=lambda: SimpleNamespace(kv_cache_groups=[1]))
    kv_cache_manager: Any = field(
        default_factory=lambda: SimpleNamespace(
            block_pool=SimpleNamespace(num_gpu_blocks=64), get_block_ids=lambda request_id: ([1, 2],)
        )
    )
    block_size: int = 16
    num_spec_tokens: int = 0

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        assert request not in self.running and timestamp > 0


def a_request(**facts: Any) -> Any:
    """40 tokens of a prompt and 20 generated ones, as vLLM counts them."""
    tokens = {"num_tokens": 60, "num_prompt_tokens": 40, "num_computed_tokens": 0, "num_tokens_with_spec": 60}
    status = SimpleNamespace(name=facts.pop("state", "RUNNING"))
    counts = {"num_output_placeholders": 0, "max_tokens": 100, "priority": 0, **tokens, **facts}
    return SimpleNamespace(request_id="ours", status=status, **counts)


@pytest.mark.parametrize(("computed", "generates"), [(0, False), (40, False), (58, False), (59, True)])
def test_one_that_was_preempted_generates_again_once_all_its_tokens_are_computed(
    computed: int, generates: bool
) -> None:
    ours = VllmScheduler(Stock([])).running(a_request(num_computed_tokens=computed))
    assert (ours.need, ours.generates, ours.blocks) == (60 - computed, generates, 2)


def test_no_request_is_thought_to_hold_more_blocks_than_there_are() -> None:
    scheduler = VllmScheduler(Stock([]))
    assert scheduler.running(a_request()).reserved == 10
    assert scheduler.running(a_request(max_tokens=5000)).reserved == 63


def test_beside_drafts_a_prompt_of_one_token_needs_a_step_of_a_decode() -> None:
    one = a_request(state="WAITING", num_tokens=1, num_prompt_tokens=1)
    plain, drafting = VllmScheduler(Stock([])), VllmScheduler(Stock([], num_spec_tokens=3))
    assert [(found.tokens, found.least) for found in (plain.waiting(one), drafting.waiting(one))] == [
        (1, 1),
        (4, 4),
    ]
    longer = drafting.waiting(a_request(state="PREEMPTED"))
    assert (longer.tokens, longer.least) == (60, 1)


def test_what_was_preempted_before_a_step_is_named_in_it_once() -> None:
    request = SimpleNamespace(request_id="ours")
    scheduler = VllmScheduler(Stock([request]))
    scheduler.preempt(request)
    step, following = SimpleNamespace(preempted_req_ids={"chat"}), SimpleNamespace(preempted_req_ids=None)
    scheduler.tell_preempted(step)
    scheduler.tell_preempted(following)
    assert step.preempted_req_ids == {"ours", "chat"}
    assert following.preempted_req_ids is None


def test_a_vllm_that_names_them_itself_is_not_told() -> None:
    request = SimpleNamespace(request_id="ours")
    stock = Stock([request])
    stock.reset_preempted_req_ids = set()  # type: ignore[attr-defined]
    scheduler = VllmScheduler(stock)
    scheduler.preempt(request)
    step = SimpleNamespace(preempted_req_ids=None)
    scheduler.tell_preempted(step)
    assert step.preempted_req_ids is None
