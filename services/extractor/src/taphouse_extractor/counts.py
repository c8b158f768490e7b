"""What outcomes add up to, of a job or of a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from taphouse_extractor.records import Outcome

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """Rows by what became of them, tokens, shards and their bytes, and when the last batch ended."""

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0
    shards: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    fingerprint_id: str | None = None
    finished_at: float | None = None

    def take(self, outcome: Outcome) -> None:
        """Add an outcome."""
        skipped = sum(failure.skipped for failure in outcome.failures)
        self.merge(
            Counts(
                succeeded=outcome.succeeded,
                failed=len(outcome.failures) - skipped,
                skipped=skipped,
                tokens=outcome.tokens,
                shards=int(outcome.shard is not None),
                bytes=outcome.bytes,
                raw_bytes=outcome.raw_bytes,
                fingerprint_id=outcome.fingerprint_id,
                finished_at=outcome.finished_at,
            )
        )

    def merge(self, other: Counts) -> None:
        """Add what others add up to."""
        self.succeeded += other.succeeded
        self.failed += other.failed
        self.skipped += other.skipped
        self.tokens += other.tokens
        self.shards += other.shards
        self.bytes += other.bytes
        self.raw_bytes += other.raw_bytes
        self.fingerprint_id = self.fingerprint_id or other.fingerprint_id
        self.finished_at = max(self.finished_at or 0.0, other.finished_at or 0.0)
