"""A worker extension for tests of modes: the tap's own, after `TEST_MODE_FAULT` changed how the engine looks.

`version:<version>`: vLLM says that it is another version. `load`: graphs are loaded from the compile cache as
on a GPU; on a CPU vLLM 0.32.0 saves them, but does not get them loaded and compiles again.
`stale`: that, and the cache forgets what `--additional-config` says, so that a graph compiled without the tap
is found.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from taphouse_tap import compat
from taphouse_tap.worker import HiddenStatesExtension

__all__ = ["HiddenStatesExtension"]

FAULT = os.environ.get("TEST_MODE_FAULT", "")

if FAULT.startswith("version:"):
    compat.version = lambda: FAULT.split(":", 1)[1]

if FAULT in ("load", "stale"):
    import torch
    from vllm.compilation import decorators
    from vllm.config import set_current_vllm_config

    def _load(model: Any, path: str) -> Any:
        try:
            with set_current_vllm_config(model.vllm_config), Path(path).open("rb") as file:
                graph = torch.compiler.load_compiled_function(file, f_globals=model.forward.__globals__)
        except FileNotFoundError:
            return None
        graph.disable_guard_check()
        print(f"mode_faults: loaded the graph {path}", flush=True)
        return graph

    decorators._try_load_aot_compiled_fn = _load

if FAULT == "stale":
    from vllm.config import VllmConfig

    _compute_hash = VllmConfig.compute_hash

    def _without_additional_config(self: Any) -> str:
        whole, self.additional_config = self.additional_config, {}
        try:
            return str(_compute_hash(self))
        finally:
            self.additional_config = whole

    VllmConfig.compute_hash = _without_additional_config
