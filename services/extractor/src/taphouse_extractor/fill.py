"""How full a shard is that may have so many bytes: what still goes in, and how much may be begun for it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fill"]


@dataclass
class Fill:
    """`bytes` of states, uncompressed, of `samples` samples are in a shard that may have `bound` bytes.

    `usual` is what a sample of the job has, where that is known. Once it is `full`, what was begun is let go.
    """

    bound: int | None = None
    usual: float | None = None
    samples: int = 0
    bytes: int = 0
    full: bool = False

    def takes(self, size: int) -> bool:
        """Whether a sample of `size` bytes may be added; the first may, whatever its size."""
        over = self.bound is not None and self.bytes + size > self.bound
        self.full = self.full or (over and self.samples > 0)
        return not self.full

    def add(self, size: int) -> None:
        """A sample was added."""
        self.samples, self.bytes = self.samples + 1, self.bytes + size
        self.usual = self.bytes / self.samples

    def room(self, begun: int) -> bool:
        """Whether a sample of the usual size would fit after `begun` others that are not added yet."""
        if self.bound is None or (begun == 0 and self.samples == 0):
            return True
        known = self.usual is not None and not self.full
        return known and self.bytes + (self.usual or 0.0) * (begun + 1) <= self.bound
