"""The body of ``POST /hidden_states``: read, checked, and turned into prompts that the engine can take.

Two stages, because some limits are known only to the running model:

1. ``parse_request(bytes, max_prompts)``: JSON and field types (`MalformedBody`, `InvalidField`).
2. ``CaptureRequest.check(model)`` and ``check_prompt(...)``: layer ids, token ids, lengths (`InvalidField`).

Every message names the field and the limit it broke.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from taphouse import slices
from taphouse_tap.api.refusals import InvalidField, MalformedBody, PromptTooLong

MAX_NAMED_ERRORS = 5


@dataclass(frozen=True)
class ModelFacts:
    """What the endpoint has to know of the model to check a request and to size a capture.

    ``layers`` are the tapped layer ids in slice order. ``itemsize`` is the size of one element in bytes.
    ``seeds`` is False on an engine that a seeded, sampled request could stop.
    """

    layers: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: str
    itemsize: int
    vocab_size: int
    max_model_len: int
    tp_size: int
    seeds: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (one token, every tapped layer) summed over all ranks."""
        return len(self.layers) * self.hidden_size * self.itemsize

    @property
    def slice_row_bytes(self) -> int:
        """Bytes of one row in all ranks' slices, where each has the row's token id too."""
        return self.row_bytes + self.tp_size * slices.TOKEN_BYTES


@dataclass(frozen=True)
class Prompt:
    """One sequence to capture: its token ids ``[P]``, and the loss mask ``[P]`` when one was asked for.

    ``generates_loss``: whether generated tokens belong to an assistant turn.
    """

    token_ids: list[int]
    loss_mask: list[int] | None = None
    generates_loss: bool = True


class CaptureRequest(BaseModel):
    """The request as the caller writes it. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    max_tokens: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    layers: list[int] | None = Field(default=None, min_length=1)
    delivery: Literal["slices", "stream"] = "slices"
    return_loss_mask: bool = False
    request_id: str | None = Field(default=None, max_length=256)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _prompt(cls, value: Any, _handler: Any) -> Any:
        """A union of four shapes says little when it fails; this names the first thing that is wrong."""
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise _wrong("must be a string, a list of token ids, or a list of either")
        if not value:
            raise _wrong("is an empty list: at least one token id or one prompt is needed")
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) for item in value):
            for index, item in enumerate(value):
                _token_ids(item, f"[{index}]")
            return value
        _token_ids(value, "")
        return value

    @field_validator("stop", mode="wrap")
    @classmethod
    def _stop(cls, value: Any, _handler: Any) -> Any:
        if value is None or (isinstance(value, str) and value):
            return value
        if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
            return value
        raise _wrong("must be a non-empty string or a list of non-empty strings")

    @model_validator(mode="after")
    def _one_source(self) -> CaptureRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("exactly one of `prompt` and `messages` is needed")
        if self.messages is None:
            for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
                if getattr(self, name) is not None:
                    raise _wrong(f"`{name}` goes with `messages`, not with `prompt`")
            if self.return_loss_mask:
                raise _wrong("`return_loss_mask` goes with `messages`: a prompt has no turns")
        return self

    def prompts(self) -> list[str | list[int]]:
        """`prompt` as a list of texts or a list of token id lists. Only for requests without `messages`."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompt: Any = self.prompt
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt

    def wants_generation_prompt(self) -> bool:
        """Whether the rendered chat ends in the header of a new assistant turn."""
        if self.add_generation_prompt is not None:
            return self.add_generation_prompt
        assert self.messages is not None
        return self.messages[-1].get("role") != "assistant"

    def check(self, model: ModelFacts, max_prompts: int) -> None:
        """Check what only the running model can decide.

        Raises: `InvalidField`.
        """
        if self.prompt is not None and len(self.prompts()) > max_prompts:
            raise InvalidField(
                f"prompt: {len(self.prompts())} prompts in one request, the limit is {max_prompts}",
                param="prompt",
            )
        if self.layers is not None:
            _check_layers(self.layers, model)
        if self.seed is not None and self.temperature > 0 and not model.seeds:
            raise InvalidField(
                "seed: this engine could die of a seeded request (vLLM on CPUs fails when a prompt that is "
                "sampled with a seed is computed in chunks); leave out seed, or set temperature to 0",
                param="seed",
            )
        if self.stop_token_ids:
            _check_vocabulary(self.stop_token_ids, "stop_token_ids", model.vocab_size)

    def asked_layers(self, model: ModelFacts) -> list[int]:
        """The layer ids of the answer, in the order asked (all tapped layers when none were named)."""
        return list(model.layers) if self.layers is None else list(self.layers)


def parse_request(body: bytes) -> CaptureRequest:
    """Read a request body.

    Raises: `MalformedBody` when it is not a JSON object, `InvalidField` for everything else.
    """
    try:
        data = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise MalformedBody(f"the body must be a JSON object, not {_json_name(data)}")
    if b"\\u" in body:
        _refuse_lone_surrogates(data)
    try:
        return CaptureRequest.model_validate(data)
    except ValidationError as error:
        raise _translate(error.errors(include_url=False)) from error


def check_prompt(token_ids: Sequence[int], max_tokens: int, model: ModelFacts, param: str) -> None:
    """Check one tokenised prompt against the model's vocabulary and context length.

    Raises: `InvalidField`, naming ``param`` and the limit; `PromptTooLong` of them tells the length too.
    """
    if not token_ids:
        raise InvalidField(f"{param}: the prompt is empty: at least one token is needed", param=param)
    length = len(token_ids)
    if length + max_tokens > model.max_model_len:
        raise PromptTooLong(
            f"{param}: {length} prompt tokens and max_tokens={max_tokens} make {length + max_tokens}, "
            f"over the model's limit max_model_len={model.max_model_len}",
            param=param,
            prompt_tokens=length,
        )
    _check_vocabulary(token_ids, param, model.vocab_size)


def _check_layers(layers: Sequence[int], model: ModelFacts) -> None:
    tapped = list(model.layers)
    wrong = [layer for layer in layers if layer not in model.layers]
    if wrong:
        raise InvalidField(
            f"layers: {wrong} not tapped; this engine taps {tapped} "
            f"(an id is the stream entering that layer, {model.num_layers} enters the final norm)",
            param="layers",
        )
    if len(set(layers)) != len(layers):
        raise InvalidField(f"layers: {list(layers)} names a layer twice", param="layers")


def _check_vocabulary(token_ids: Sequence[int], param: str, vocab_size: int) -> None:
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidField(
            f"{param}: token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})", param=param
        )


def _token_ids(value: list[Any], where: str) -> None:
    """Accept a list of ints; bool is an int to Python but not to the caller."""
    for index, item in enumerate(value):
        if type(item) is not int:
            raise _wrong(f"{where}[{index}] is {_json_name(item)}, a token id must be an integer")


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_lone_surrogates(data: dict[str, Any]) -> None:
    """JSON can spell half of a surrogate pair, which no tokenizer can encode."""
    try:
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError) as error:
        raise MalformedBody(f"the body holds text that is not Unicode: {error}") from error


def _translate(errors: Sequence[ErrorDetails]) -> InvalidField:
    """One message for all that pydantic found, the first field as ``param``."""
    parts: list[str] = []
    for error in errors[:MAX_NAMED_ERRORS]:
        name = _field_name(error["loc"])
        if error["type"] == "extra_forbidden":
            known = ", ".join(CaptureRequest.model_fields)
            parts.append(f"{name}: unknown field; the fields are {known}")
        else:
            parts.append(f"{name}: {error['msg']}" if name else error["msg"])
    if len(errors) > MAX_NAMED_ERRORS:
        parts.append(f"and {len(errors) - MAX_NAMED_ERRORS} more")
    first = errors[0]["loc"]
    return InvalidField("; ".join(parts), param=str(first[0]) if first else None)


def _field_name(loc: tuple[int | str, ...]) -> str:
    """``("layers", 2)`` reads ``layers[2]``; branches of a union are left out."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not name:
            name = part
    return name


def _json_name(value: Any) -> str:
    """How JSON calls the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"
