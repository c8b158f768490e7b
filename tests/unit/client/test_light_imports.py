"""What importing the client's modules drags in, each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "redis", "rq", "vllm", "transformers", "fastapi", "safetensors"}
MODULES = {
    "taphouse": HEAVY | {"numpy", "pydantic", "httpx", "zstandard"},
    "taphouse.errors": HEAVY | {"numpy", "pydantic", "httpx", "zstandard"},
    "taphouse.store": HEAVY | {"numpy", "pydantic", "httpx", "zstandard"},
    "taphouse.samples": HEAVY | {"pydantic", "httpx", "zstandard"},
    "taphouse.shards": HEAVY | {"httpx"},
    "taphouse.ledger": HEAVY | {"httpx"},
}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_no_more_than_it_needs(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert module.partition(".")[0] in loaded
    assert not loaded & MODULES[module]
