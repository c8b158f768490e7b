"""What the endpoint answers instead of a capture: a branch of `taphouse_tap.errors`, with HTTP statuses.

::

    TapError
    └── Refusal
        ├── MalformedBody      400  the body is not a JSON object
        ├── WrongKey           401  no key, or not one of ours
        ├── TooLarge           413  the body, the stream or the capture is over a limit that never gives way
        ├── InvalidField       422  a field is wrong; ``param`` names it
        │   └── PromptTooLong       a prompt is longer than the model takes; it says how long
        ├── Busy               429  no room now (slice directory, captures running); ``retry_after`` seconds
        ├── CaptureFailed      500  the capture went wrong; the caller got no sample
        │   └── Disproved           its states are not what the engine computed
        └── CaptureOff         503  this engine captures nothing now, with the reason
"""

from __future__ import annotations

from typing import Any, ClassVar

from taphouse_tap.errors import TapError

RETRY_AFTER_S = 2
"""What a caller is told to wait. Room comes back when other captures are consumed, mostly within seconds."""


class Refusal(TapError):
    """Base of every answer that is not a capture. ``str()`` is the message the caller reads."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON body, in the shape of OpenAI's errors."""
        return {
            "error": {"message": str(self), "type": self.type, "param": self.param, "code": self.status},
        }

    def headers(self) -> dict[str, str]:
        """Headers that go with the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class MalformedBody(Refusal):
    """The body cannot be read as a JSON object."""

    status = 400
    type = "malformed_body"


class WrongKey(Refusal):
    """No bearer key, or not one of ours."""

    status = 401
    type = "authentication_error"

    def headers(self) -> dict[str, str]:
        """Says which scheme is asked for."""
        return {"WWW-Authenticate": "Bearer"}


class TooLarge(Refusal):
    """Over a limit that does not depend on what else is running."""

    status = 413
    type = "too_large"


class InvalidField(Refusal):
    """A field of the request is wrong; ``param`` names it and the message names the limit."""

    status = 422
    type = "invalid_request_error"


class PromptTooLong(InvalidField):
    """A prompt of `prompt_tokens` tokens, with what it may generate, is over the model's context length."""

    def __init__(self, message: str, *, param: str, prompt_tokens: int) -> None:
        super().__init__(message, param=param)
        self.prompt_tokens = prompt_tokens

    def body(self) -> dict[str, Any]:
        """As any refusal's, and how many tokens the prompt has."""
        body = super().body()
        body["error"]["prompt_tokens"] = self.prompt_tokens
        return body


class Busy(Refusal):
    """No room now; ask again after ``retry_after`` seconds."""

    status = 429
    type = "busy"


class CaptureFailed(Refusal):
    """The engine ran the request but its rows are not whole. The caller got no sample."""

    status = 500
    type = "capture_failed"


class Disproved(CaptureFailed):
    """The captured states are not those that the engine computed."""


class CaptureOff(Refusal):
    """This engine captures nothing now. Production is not affected."""

    status = 503
    type = "capture_off"
