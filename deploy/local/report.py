"""What the demo measured, as a JSON file and as tables."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafts import Measured
from rich.console import Console
from rich.table import Table

from taphouse.ledger import Ledger
from taphouse.shards import verify_shard
from taphouse.store import LocalStore
from taphouse.store.identity import begun


@dataclass
class Shards:
    """All sealed shards of the run, each read and checked. `raw_bytes` are the tensors before the codec."""

    shards: int = 0
    samples: int = 0
    verified: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def check_shards(root: Path) -> Shards:
    """Reads every shard that the ledger names, down to the last checksum."""
    store = LocalStore(root, create=False)
    begun(store)
    found = Shards()
    for entry in Ledger(store).entries():
        report = verify_shard(store.local_path(entry.path), sha256=entry.sha256)
        bad = [f"{entry.shard}: {report.problem}"] if report.problem else []
        bad += [f"{entry.shard}, {finding.id}: {finding.problem}" for finding in report.bad]
        found.shards += 1
        found.samples += entry.samples
        found.verified += 0 if report.problem else entry.samples - len(report.bad)
        found.tokens += entry.tokens
        found.raw_bytes += entry.raw_bytes
        found.stored_bytes += entry.bytes
        found.problems += bad
    return found


@dataclass
class Training:
    """The trainer's own log: steps, and loss on samples it never trained on (how many, first and last)."""

    steps: int = 0
    steps_beside_extraction: int = 0
    held_out_first: float | None = None
    held_out_last: float | None = None
    held_out_samples: tuple[int, int] = (0, 0)


def read_training(output: Path, steps_beside_extraction: int) -> Training:
    """Reads `metrics.jsonl` of the trainer."""
    found = Training(steps_beside_extraction=steps_beside_extraction)
    path = output / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        found.steps = max(found.steps, entry["step"])
        if entry["kind"] == "held_out":
            first = found.held_out_first is None
            found.held_out_first = entry["loss"] if first else found.held_out_first
            found.held_out_last = entry["loss"]
            found.held_out_samples = (
                entry["samples"] if first else found.held_out_samples[0],
                entry["samples"],
            )
    return found


@dataclass
class Report:
    """Everything that a run measured."""

    profile: str
    engine: dict[str, Any]
    phases: list[dict[str, Any]]
    production_errors: list[str]
    rows: int
    failed_rows: int
    shards: Shards
    training: Training
    drafts: list[Measured]
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Writes the report as JSON."""
        drafts = [
            asdict(d) | {"acceptance_length": d.acceptance_length, "tokens_a_step": d.tokens_a_step}
            for d in self.drafts
        ]
        path.write_text(json.dumps(asdict(self) | {"drafts": drafts}, indent=2) + "\n")

    @property
    def problems(self) -> list[str]:
        """What must not happen and did, one line each."""
        failed = sum(phase["failed"] for phase in self.phases)
        found = (
            [f"{failed} production requests failed: {'; '.join(self.production_errors[:3])}"]
            if failed
            else []
        )
        found += [f"{self.failed_rows} rows made no sample"] if self.failed_rows else []
        return found + self.shards.problems

    def show(self, console: Console) -> None:
        """Prints the tables."""
        console.print(self._production())
        console.print(self._extraction())
        console.print(self._drafts())

    def _production(self) -> Table:
        engine = ", ".join(f"{name} {value}" for name, value in self.engine.items())
        title = f"Production, latencies in ms. One engine: {engine}"
        table = Table(title=title, title_justify="left", title_style="bold")
        columns = ["phase", "seconds", "answered", "failed", "tokens"]
        columns += ("ITL median", "ITL p95", "TTFT median", "TTFT p95")
        for column in columns:
            table.add_column(column, justify="left" if column == "phase" else "right", no_wrap=True)
        for phase in self.phases:
            table.add_row(*("–" if value is None else str(value) for value in phase.values()))
        return table

    def _extraction(self) -> Table:
        table = Table(
            title="Extraction and training", title_justify="left", title_style="bold", show_header=False
        )
        shards, training = self.shards, self.training
        ratio = shards.stored_bytes / shards.raw_bytes if shards.raw_bytes else 0.0
        table.add_row("samples", f"{shards.samples} of {self.rows} rows, {shards.verified} verified")
        table.add_row("tokens", f"{shards.tokens:,}")
        table.add_row("shards", str(shards.shards))
        table.add_row(
            "bytes", f"{_mb(shards.raw_bytes)} raw → {_mb(shards.stored_bytes)} stored ({ratio:.3f})"
        )
        beside = f"{training.steps}, {training.steps_beside_extraction} of them while extraction went on"
        table.add_row("training steps", beside)
        if training.held_out_first is not None and training.held_out_last is not None:
            loss = f"{training.held_out_first:.3f} → {training.held_out_last:.3f}"
            first, last = training.held_out_samples
            table.add_row("held-out loss", f"{loss} ({first} samples at first, {last} at last)")
        return table

    def _drafts(self) -> Table:
        count = max((d.prompts for d in self.drafts), default=0)
        title = f"Drafts, served by vLLM, on {count} held-out prompts"
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in ("draft", "acceptance length", "accepted a position", "tokens a step", "tokens"):
            table.add_column(column, justify="left" if column == "draft" else "right")
        for draft in self.drafts:
            length = "–" if draft.acceptance_length is None else f"{draft.acceptance_length:.2f}"
            positions = " / ".join(f"{share:.0%}" for share in draft.positions)
            table.add_row(draft.name, length, positions, f"{draft.tokens_a_step:.2f}", str(draft.tokens))
        return table


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
