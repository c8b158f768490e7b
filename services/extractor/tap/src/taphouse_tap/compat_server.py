"""vLLM's internals on the API server's side: engine client, tokenisation service, keys.

`taphouse_tap.compat` has the workers' side; how requests are timed is in `compat_timing`.
Touched here:

=====================================================  =============  =============
name                                                   0.22.1         0.32.0
=====================================================  =============  =============
``app.state.engine_client``, ``.vllm_config``,         there          there
``.args.api_key``; ``vllm.envs.VLLM_API_KEY``
tokenisation service in ``app.state``                  ``openai_``    ``serving_tokenization``
                                                       ``serving_``
                                                       ``tokenization``
``.create_tokenize``, ``.chat_template``,              there          there
``.renderer.get_tokenizer()``
``EngineClient.generate``, ``.collective_rpc``,        there          there
``.model_config``
errors of the caller                                   `ValueError`   ``VLLMClientError``
=====================================================  =============  =============
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from taphouse import slices
from taphouse_tap.api.collect import Engine, Generated, Ranked
from taphouse_tap.api.refusals import Busy, CaptureFailed, CaptureOff, InvalidField, Refusal
from taphouse_tap.api.rendering import Tokenizer
from taphouse_tap.api.requests import CaptureRequest, ModelFacts

PLUGIN_GROUPS = tuple(
    f"vllm.{kind}_plugins" for kind in ("general", "endpoint", "platform", "stat_logger", "io_processor")
)
"""Groups of entry points that vLLM loads; ``VLLM_PLUGINS`` is one allow-list for all of them."""


class VllmServer:
    """vLLM's API server, as `taphouse_tap.api.service.Server`. ``state`` is its ``app.state``."""

    def __init__(self, state: Any) -> None:
        client = getattr(state, "engine_client", None)
        if client is None:
            raise ValueError("this server has no engine")
        self._client = client
        self._config = state.vllm_config
        self.engine: Engine = VllmEngine(client)
        self._vllm_tokenizer = VllmTokenizer(state)
        self.tokenizer: Tokenizer = self._vllm_tokenizer
        self.dp_size = int(self._config.parallel_config.data_parallel_size)
        self.dp_here = int(self._config.parallel_config.data_parallel_size_local)

    async def start_id(self) -> str:
        """Ask the ranks which start they belong to; raise `CaptureOff` when no rank carries the tap."""
        try:
            answers = await self._client.collective_rpc("taphouse_start")
        except Exception as error:
            raise CaptureOff(
                "the engine's ranks do not carry the tap: launch vLLM with "
                f"--worker-extension-cls taphouse_tap.worker.HiddenStatesExtension ({error})"
            ) from error
        for answer in answers:
            if not answer.get("start_id"):
                raise CaptureOff(str(answer.get("reason") or "a rank has no start directory"))
        return str(answers[0]["start_id"])

    async def check(
        self,
        tag: str,
        token_ids: list[int],
        rows: int,
        first: int | None = None,
        highest: list[int] | None = None,
    ) -> list[Any]:
        """Ask every rank of engine 0 whether captured rows reproduce the engine's tokens."""
        args = (tag, token_ids, rows, first, highest)
        return list(await self._client.collective_rpc("taphouse_check", args=args))

    def model(self, record: dict[str, Any]) -> ModelFacts:
        """Facts of the model; what the ranks tap comes from their record."""
        return ModelFacts(
            layers=tuple(int(layer) for layer in record["layers"]),
            num_layers=int(record["num_layers"]),
            hidden_size=int(record["hidden_size"]),
            dtype=str(record["dtype"]),
            itemsize=slices.RAW_DTYPES[record["dtype"]].itemsize,
            vocab_size=int(self._client.model_config.get_vocab_size()),
            max_model_len=int(self._client.model_config.max_model_len),
            tp_size=int(record["tp_size"]),
            # The V1 runner rewinds the generator of a prompt that is not whole yet; a CPU's can't be rewound,
            # and the engine dies (0.32.0, `gpu_model_runner._bookkeeping_sync`, `Generator.set_offset`).
            seeds=record["mode"]["device"] != "cpu",
        )

    async def tokenizer_fingerprint(self) -> dict[str, str | None]:
        """SHA-256 of the vocabulary (with its added tokens) and of the chat template."""
        return await asyncio.to_thread(self._vllm_tokenizer.fingerprint)

    def plugins(self) -> dict[str, list[str]]:
        """vLLM plugins that are installed: those `allowed`, and those that ``VLLM_PLUGINS`` leaves out."""
        from vllm import envs

        installed = sorted({entry.name for group in PLUGIN_GROUPS for entry in entry_points(group=group)})
        allowed = installed if envs.VLLM_PLUGINS is None else envs.VLLM_PLUGINS
        return {
            "allowed": [name for name in installed if name in allowed],
            "left_out": [name for name in installed if name not in allowed],
        }


class VllmEngine:
    """vLLM's engine client, as `taphouse_tap.api.collect.Engine`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def generate(
        self,
        token_ids: list[int],
        request: CaptureRequest,
        opt_in: dict[str, Any],
        request_id: str,
        *,
        dp_rank: int | None = None,
        top: int = 0,
    ) -> Generated:
        """Run one prompt to its end; a cancelled caller aborts it in the engine."""
        from vllm.inputs import tokens_input

        where = {} if dp_rank is None else {"data_parallel_rank": dp_rank}
        last = None
        try:
            top = min(top, self._most_top(request))
            params = _sampling_params(request, opt_in, top)
            outputs = self._client.generate(
                tokens_input(token_ids), params, request_id, priority=request.priority, **where
            )
            async for output in outputs:
                last = output
        except (asyncio.CancelledError, Refusal):
            raise
        except Exception as error:
            raise _refusal_of(error) from error
        if last is None:
            raise CaptureFailed("the engine answered nothing")
        answer = last.outputs[0]
        if answer.finish_reason in (None, "abort", "error"):
            raise CaptureFailed(f"the engine ended the request early ({answer.finish_reason})")
        ranked = [_ranked(row)[:top] for row in answer.logprobs or ()]
        return Generated([int(token) for token in answer.token_ids], answer.finish_reason, ranked)

    def _most_top(self, request: CaptureRequest) -> int:
        """How many top tokens a row this engine names, as its head ranks them."""
        config = self._client.model_config
        if config.logprobs_mode.startswith("processed") and request.temperature > 0:
            return 0  # after temperature and top_p: no ranking of the head's
        most, vocabulary = int(config.max_logprobs), int(config.get_vocab_size())
        return vocabulary if most < 0 else min(most, vocabulary)


class VllmTokenizer:
    """The server's tokenisation service, as `taphouse_tap.api.rendering.Tokenizer`."""

    def __init__(self, state: Any) -> None:
        service = getattr(state, "serving_tokenization", None)
        self._service = state.openai_serving_tokenization if service is None else service

    async def text(self, text: str) -> list[int]:
        """Token ids as completions get them."""
        from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest

        return await self._tokenize("prompt", TokenizeCompletionRequest, {"prompt": text})

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> list[int]:
        """Token ids as chat completions get them."""
        from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

        fields = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return await self._tokenize("messages", TokenizeChatRequest, fields)

    async def _tokenize(self, param: str, request_type: Any, fields: dict[str, Any]) -> list[int]:
        """Whatever a template or tokenizer says against the caller's text is the caller's to read."""
        try:
            answer = await self._service.create_tokenize(request_type(**fields), None)
        except Exception as error:
            raise InvalidField(f"{param}: could not be tokenised: {error}", param=param) from error
        if not hasattr(answer, "tokens"):
            raise InvalidField(f"{param}: could not be tokenised: {answer.error.message}", param=param)
        return list(answer.tokens)

    def special_ids(self) -> frozenset[int]:
        """Special tokens, those among the added tokens included."""
        tokenizer = self._tokenizer()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        return frozenset(tokenizer.all_special_ids) | {
            int(token_id) for token_id, token in added.items() if getattr(token, "special", False)
        }

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some token ids, special tokens included."""
        return str(self._tokenizer().decode(list(token_ids)))

    def fingerprint(self) -> dict[str, str | None]:
        """Digests of the vocabulary and of the chat template; None for what this server has not."""
        try:
            tokenizer = self._tokenizer()
            vocabulary = _digest(slices.canonical_json(tokenizer.get_vocab()))
        except Exception:
            return {"tokenizer": None, "chat_template": None}
        template = getattr(self._service, "chat_template", None)
        if template is None:
            try:
                template = tokenizer.get_chat_template()
            except Exception:
                template = None
        return {"tokenizer": vocabulary, "chat_template": None if template is None else _digest(template)}

    def _tokenizer(self) -> Any:
        return self._service.renderer.get_tokenizer()


def server_keys(state: Any) -> list[str]:
    """The keys that vLLM itself asks for: ``--api-key``, else ``VLLM_API_KEY``."""
    from vllm import envs

    return [key for key in (state.args.api_key or [envs.VLLM_API_KEY]) if key]


def _sampling_params(request: CaptureRequest, opt_in: dict[str, Any], top: int) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=top or None,
        detokenize=bool(request.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,
        extra_args={slices.EXTRA_ARGS_KEY: opt_in},
    )


def _ranked(row: Any) -> Ranked:
    """One row's top tokens, best first: vLLM gives a dictionary, the sampled token in it."""
    found = sorted(row.items(), key=lambda item: item[1].rank)
    return [(int(token), float(logprob.logprob)) for token, logprob in found]


def _refusal_of(error: Exception) -> Refusal:
    """What an error of the engine client means to the caller."""
    from vllm import exceptions

    status = getattr(error, "http_status", None)
    if status is not None:
        return Busy(f"the engine takes no request now: {error}", retry_after=1)
    client_error = getattr(exceptions, "VLLMClientError", ValueError)
    if isinstance(error, (client_error, ValueError)):
        return InvalidField(f"the engine refused the request: {error}")
    return CaptureFailed(f"the engine failed: {type(error).__name__}: {error}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
