"""`python -m taphouse_tap launch-args`: the flags that start vLLM with the tap."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence

from . import __version__


def launch_args(
    layers: Sequence[int] | None, *, tensor_parallel_size: int = 1, two_classes: bool = True
) -> list[str]:
    """Return vLLM's flags: the worker extension, and the layers and version inside its compile-cache key.

    `two_classes` adds the scheduler that keeps extraction behind production.
    """
    config: dict[str, object] = {"version": __version__}
    if layers:
        config["layers"] = sorted(set(layers))
    flags = [
        "--worker-extension-cls",
        "taphouse_tap.worker.HiddenStatesExtension",
        "--additional-config",
        json.dumps({"taphouse": config}, separators=(",", ":")),
    ]
    if two_classes:
        flags += ["--scheduler-cls", "taphouse_tap.scheduler.two_class_scheduler"]
    if tensor_parallel_size > 1:
        passes = {"pass_config": {"fuse_allreduce_rms": False}}
        flags += ["--compilation-config", json.dumps(passes, separators=(",", ":"))]
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m taphouse_tap")
    commands = parser.add_subparsers(dest="command", required=True)
    launch = commands.add_parser("launch-args", help="print the flags that start vLLM with the tap")
    launch.add_argument(
        "--layers",
        type=lambda text: [int(part) for part in text.split(",")],
        help="layer ids, comma separated: id i is the residual stream entering layer i (HF "
        "output_hidden_states[i]); recipes that count the output of layer j mean i = j + 1. "
        "The number of layers itself is always added. Default: 2, n/2, n-3",
    )
    launch.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    launch.add_argument(
        "--own-scheduler",
        action="store_true",
        help="leave vLLM its own scheduler: extraction is then not kept behind production",
    )
    args = parser.parse_args(argv)
    flags = launch_args(
        args.layers, tensor_parallel_size=args.tensor_parallel_size, two_classes=not args.own_scheduler
    )
    print(shlex.join(flags))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
