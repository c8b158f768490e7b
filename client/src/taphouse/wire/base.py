"""What requests and answers have in common: requests refuse unknown fields, answers ignore them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Answer", "Request"]


class Request(BaseModel):
    """What a client sends. What was wrong with it is said without the value: prompts stay out of errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Answer(BaseModel):
    """What the service answers: an older client reads a newer service."""

    model_config = ConfigDict(extra="ignore", frozen=True)
