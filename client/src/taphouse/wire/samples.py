"""Single samples: whose they are, where they lie, what was deleted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from taphouse.wire.base import Answer, Request

__all__ = ["FoundSample", "SampleQuery", "SamplesDeleted", "SamplesFound"]

Name = Annotated[str, Field(min_length=1, max_length=256)]


class SampleQuery(Request):
    """Which rows: of these ids (a row's own or a sample's), of a `user`, of a `tenant`. One of the three."""

    ids: list[Name] | None = Field(default=None, min_length=1, max_length=10_000)
    user: Name | None = Field(default=None, description="What rows have in their field `user`.")
    tenant: Name | None = Field(default=None, description="All rows of the jobs of a tenant.")

    @model_validator(mode="after")
    def _one(self) -> SampleQuery:
        if sum(value is not None for value in (self.ids, self.user, self.tenant)) != 1:
            raise ValueError("give one of ids, user and tenant")
        return self


class FoundSample(Answer):
    """One row, and the shard that holds its sample; None where it made none, or the shard is gone."""

    job_id: str
    row: int
    id: str
    user: str | None = None
    shard: str | None = None
    seq: int | None = None


class SamplesFound(Answer):
    """`POST /v1/samples/find`: how many there are, and the first of them."""

    rows: int
    samples: list[FoundSample]
    problems: list[str] = Field(
        default=[], description="Jobs and shards that could not be searched, each with the reason."
    )


class SamplesDeleted(Answer):
    """`POST /v1/samples/delete`: what was done."""

    rows: int = Field(description="Rows that were blanked, so that nothing can extract them again.")
    samples: int = Field(description="Samples that were taken out of shards.")
    rewritten: list[str] = Field(description="Shards that were written anew, by their new names.")
    removed: list[str] = Field(description="Shards of which nothing was left.")
    problems: list[str] = Field(
        default=[],
        description="Jobs and shards that were left out, as they are damaged or away, each with the reason: "
        "mend them, and ask again.",
    )
