"""vLLM's internals in the engine core: its schedulers and their requests.

One of the files that name vLLM's internals (`compat.py`: workers, `compat_server.py`: API servers). Touched
here, and run on 0.32.0 (CPU, V1 runner) and 0.22.1 (GPU, V1 and V2). Other versions keep vLLM's own scheduler
unless allowed.

=======================================================  ====================================================
touched                                                  for
=======================================================  ====================================================
`Scheduler`, `AsyncScheduler`                            subclassed, as the engine would have chosen
`.schedule`, `.update_from_output`, `.add_request`       wrapped
`.running`, `.waiting`, `.requests`, `.deferred_waiting`  order, taking aside, counting
`.max_num_scheduled_tokens`, `.max_num_active_reqs`,     bounds of a step
`.scheduler_config.enable_chunked_prefill`
`._preempt_request`                                      production's wants are taken from extraction
`.kv_cache_manager`: `.block_pool`, `.get_block_ids`,    free blocks, blocks held; extraction's are never
`.coordinator.cache_blocks`                              hashed: reused before production's cached ones
`.coordinator.free`, `.single_type_managers`, the        0.22.1 only: there unhashed blocks queue up behind
pool's `.free_block_queue`                               the cached ones, unless they are put in front
`SchedulerOutput.preempted_req_ids`                      0.22.1 only: names those preempted before the step
`.num_spec_tokens`                                       what a prompt of one token is padded with
`Request.num_tokens_with_spec`                           how vLLM knows what a running request may compute
`.skipped_waiting`, `.reset_preempted_req_ids`           where a version has them: who waits, who was told
`.connector`, `.kv_cache_config`                         engines that can't have two classes; cache groups
`Request.priority`                                       extraction is preempted first under either policy
=======================================================  ====================================================
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from taphouse.slices import EXTRA_ARGS_KEY

RAN = frozenset({"0.22.1", "0.32.0"})
"""Versions of vLLM that this scheduler ran on."""

BEHIND = 1 << 40
"""Added to the priority of extraction's requests: larger is later, and preempted earlier."""

logger = logging.getLogger("vllm.taphouse")


def stock_scheduler(vllm_config: Any) -> type[Any]:
    """The scheduler class that vLLM takes when none is named."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def with_two_classes(stock: type[Any], assemble: Callable[..., Any]) -> type[Any]:
    """A subclass of `stock` that keeps extraction behind production, by `core.assemble.assemble`."""
    extraction_request = _extraction_request()

    class TwoClassScheduler(stock):
        """vLLM's scheduler, with extraction's requests in a class of their own."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._taphouse: Any = None
            try:
                self._taphouse_view = VllmScheduler(self)
                self._taphouse = assemble(self._taphouse_view, _engine_core(self))
                _never_cache(self.kv_cache_manager.coordinator, self._taphouse.policy)
                _reuse_first(self.kv_cache_manager, self._taphouse.policy)
            except Exception as error:
                logger.warning("Taphouse's scheduler is off, vLLM's own goes on: %s", error)

        def add_request(self, request: Any) -> None:
            if self._taphouse is not None:
                _classify(request, self._taphouse, extraction_request)
            super().add_request(request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self._taphouse is None:
                return super().schedule(*args, **kwargs)
            policy = self._taphouse.policy
            policy.before()
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                policy.after()
            policy.scheduled(id(output), output.num_scheduled_tokens)
            try:
                self._taphouse_view.tell_preempted(output)
            except Exception as error:
                policy.turn_off("naming what was preempted", error)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._taphouse is not None:
                self._taphouse.policy.done(id(scheduler_output))
            return super().update_from_output(scheduler_output, *args, **kwargs)

    return TwoClassScheduler


def _classify(request: Any, classes: Any, extraction_request: type[Any]) -> None:
    """Give a request with a signed opt-in its class. Never raises."""
    try:
        params = getattr(request, "sampling_params", None)
        opt_in = (getattr(params, "extra_args", None) or {}).get(EXTRA_ARGS_KEY)
        if opt_in is None or classes.policy.reason is not None or not classes.is_extraction(opt_in):
            return
        request.__class__ = extraction_request
        request.priority += BEHIND
        classes.policy.arrived(request.request_id, request)
    except Exception as error:
        classes.policy.turn_off("a request that arrives", error)


def _extraction_request() -> type[Any]:
    from vllm.v1.request import Request

    class ExtractionRequest(Request):
        """A request of extraction's, which computes no more in a step than it is allowed."""

        taphouse_allowed: int | None = None

        @property
        def num_tokens_with_spec(self) -> int:
            """As vLLM counts them, up to what is allowed now."""
            tokens = super().num_tokens_with_spec
            if self.taphouse_allowed is None:
                return int(tokens)
            return int(
                min(tokens, self.num_computed_tokens - self.num_output_placeholders + self.taphouse_allowed)
            )

    return ExtractionRequest


def _never_cache(coordinator: Any, policy: Any) -> None:
    """Leave extraction's blocks unhashed: they go to the front of the free ones, and production's stay."""
    cache_blocks = coordinator.cache_blocks

    def production_only(request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.request_id in policy.extraction:
            return None
        return cache_blocks(request, *args, **kwargs)

    coordinator.cache_blocks = production_only


def _reuse_first(manager: Any, policy: Any) -> None:
    """Put extraction's freed blocks, unhashed as they are, before the cached ones, if vLLM doesn't."""
    coordinator, queue = manager.coordinator, manager.block_pool.free_block_queue
    if hasattr(queue, "prepend_n"):
        return
    free = coordinator.free

    def extraction_in_front(request_id: str) -> None:
        blocks: list[Any] = []
        if request_id in policy.extraction:
            for single in coordinator.single_type_managers:
                blocks += single.req_to_blocks.get(request_id, ())
        free(request_id)
        for block in blocks:
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null:
                queue.remove(block)
                _prepend(queue, block)

    coordinator.free = extraction_in_front


def _prepend(queue: Any, block: Any) -> None:
    """The reverse of the queue's own `append`."""
    head = queue.fake_free_list_head
    block.prev_free_block, block.next_free_block = head, head.next_free_block
    head.next_free_block.prev_free_block = block
    head.next_free_block = block
    queue.num_free_blocks += 1


def _engine_core(scheduler: Any) -> Any:
    import vllm

    from taphouse_tap.core.assemble import EngineCore

    config = scheduler.vllm_config
    parallel = config.parallel_config
    version = str(vllm.__version__).split("+", 1)[0]
    refused = None
    if getattr(scheduler, "connector", None) is not None:
        refused = "KV connectors (kv_transfer_config) may hold blocks of their own"
    return EngineCore(
        instance_id=str(config.instance_id),
        dp_rank=int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)),
        version=version,
        refused=refused,
        unknown_version=version not in RAN,
    )


class VllmScheduler:
    """vLLM's scheduler, as `taphouse_tap.core.two_class.Scheduler`."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._tokens = int(scheduler.max_num_scheduled_tokens)
        self.whole_prompts = not scheduler.scheduler_config.enable_chunked_prefill
        self._drafts = int(scheduler.num_spec_tokens)
        self._groups = max(1, len(scheduler.kv_cache_config.kv_cache_groups))
        self._told = hasattr(scheduler, "reset_preempted_req_ids")
        self._preempted: set[str] = set()

    def requests(self) -> int:
        """Requests it has, of both classes."""
        return len(self._scheduler.requests)

    def production(self, extraction: dict[str, Any]) -> Any:
        """What production's requests need, all but `extraction`."""
        from taphouse_tap.core.plan import Production

        running = [request for request in self._scheduler.running if request.request_id not in extraction]
        needs = [max(0, _need(request)) for request in running]
        waiting, prompts = 0, 0
        for queue in self._queues():
            for request in queue:
                if request.request_id in extraction:
                    continue
                waiting += 1
                if prompts < self._tokens:
                    prompts += request.num_tokens
        return Production(
            running=len(running),
            need=sum(needs),
            blocks=sum(self._blocks(need) for need in needs),
            waiting=waiting,
            waiting_blocks=self._blocks(prompts) if waiting else 0,
        )

    def running(self, request: Any) -> Any:
        """An extraction request that runs, or None."""
        from taphouse_tap.core.plan import Running

        if request.status.name != "RUNNING":
            return None
        return Running(
            id=request.request_id,
            need=max(0, _need(request)),
            blocks=sum(map(len, self._scheduler.kv_cache_manager.get_block_ids(request.request_id))),
            reserved=self._reserved(request),
            generates=request.num_computed_tokens >= request.num_tokens - 1,
        )

    def waiting(self, request: Any) -> Any:
        """An extraction request that waits, or None."""
        from taphouse_tap.core.plan import Waiting

        if request.status.name not in ("WAITING", "PREEMPTED"):
            return None
        # Beside drafts vLLM pads a prompt of one token to a step of a decode, or leaves it for another step.
        least = 1 + self._drafts if request.num_tokens == 1 else 1
        tokens = max(request.num_tokens, least)
        return Waiting(request.request_id, tokens, self._reserved(request), request.priority, least)

    def is_gone(self, request: Any) -> bool:
        """Whether it ended."""
        return request.request_id not in self._scheduler.requests

    def sizes(self) -> tuple[int, int, int, int, int]:
        """Tokens of a step, slots, blocks, free blocks, tokens of a block."""
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        slots = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        return (
            self._tokens,
            int(slots),
            int(pool.num_gpu_blocks),
            int(pool.get_num_free_blocks()),
            int(scheduler.block_size),
        )

    def order(self, extraction: dict[str, Any]) -> None:
        """Put production before extraction among those that run."""
        self._scheduler.running.sort(key=lambda request: request.request_id in extraction)

    def preempt(self, request: Any) -> None:
        """Send a running request back to the waiting ones."""
        running = self._scheduler.running
        running.remove(request)
        try:
            self._scheduler._preempt_request(request, time.monotonic())
        except Exception:
            if request.status.name == "RUNNING":
                running.append(request)
            raise
        if not self._told:
            self._preempted.add(request.request_id)

    def tell_preempted(self, output: Any) -> None:
        """Name in a step's output what was preempted before it, if vLLM names only what it did itself."""
        if self._preempted:
            output.preempted_req_ids = self._preempted.union(output.preempted_req_ids or ())
            self._preempted = set()

    def take_aside(self, requests: list[Any]) -> None:
        """Remove requests from the waiting ones."""
        for queue in self._queues():
            queue.remove_requests(requests)
        deferred = getattr(self._scheduler, "deferred_waiting", None)
        if deferred is not None:
            deferred.difference_update(requests)

    def put_back(self, requests: list[Any]) -> None:
        """Add them behind those that wait."""
        for request in requests:
            self._scheduler.waiting.add_request(request)

    def allow(self, request: Any, tokens: int | None) -> None:
        """Bound what a running request may compute in the next step; None: no bound."""
        request.taphouse_allowed = tokens

    def bound_step(self, tokens: int | None) -> None:
        """Bound a whole step; None: as vLLM has it."""
        self._scheduler.max_num_scheduled_tokens = self._tokens if tokens is None else tokens

    def _queues(self) -> list[Any]:
        names = ("waiting", "skipped_waiting")
        return [getattr(self._scheduler, name) for name in names if hasattr(self._scheduler, name)]

    def _blocks(self, tokens: int) -> int:
        """Blocks that so many more tokens of one request take at most."""
        return (-(-tokens // int(self._scheduler.block_size)) + 1) * self._groups if tokens > 0 else 0

    def _reserved(self, request: Any) -> int:
        """Blocks that a request may come to hold: never more than there are, of which vLLM keeps one."""
        most = int(self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1
        return min(most, self._blocks(request.num_prompt_tokens + request.max_tokens))


def _need(request: Any) -> int:
    """Tokens that a running request would compute now, as `schedule()` counts them."""
    return int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)
