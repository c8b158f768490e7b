"""vLLM's flag `--scheduler-cls taphouse_tap.scheduler.two_class_scheduler`: extraction behind production.

vLLM's own scheduler, plain or asynchronous as the engine asks for it, with `core.two_class.TwoClasses` around
its `schedule()`. Nothing here may stop an engine: what can't be right leaves vLLM's own, and says so.
"""

from __future__ import annotations

import logging
from typing import Any

from taphouse_tap.compat_scheduler import stock_scheduler

logger = logging.getLogger("vllm.taphouse")


def two_class_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """Return the scheduler of one engine core."""
    scheduler = stock_scheduler(vllm_config)
    try:
        from taphouse_tap.compat_scheduler import with_two_classes
        from taphouse_tap.core.assemble import assemble

        scheduler = with_two_classes(scheduler, assemble)
    except Exception:
        logger.exception("Taphouse's scheduler can't be used; vLLM's own goes on")
    return scheduler(vllm_config=vllm_config, **kwargs)
