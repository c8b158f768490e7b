"""For `--scheduler-cls`: ours, but its plan fails while the file `TEST_SCHEDULER_FAULT` exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from taphouse_tap.core import two_class
from taphouse_tap.scheduler import two_class_scheduler

FAULT = Path(os.environ["TEST_SCHEDULER_FAULT"])
_plan = two_class.plan


def _plan_or_raise(*args: Any, **options: Any) -> Any:
    if FAULT.exists():
        raise RuntimeError("broken on purpose")
    return _plan(*args, **options)


two_class.plan = _plan_or_raise
scheduler = two_class_scheduler
