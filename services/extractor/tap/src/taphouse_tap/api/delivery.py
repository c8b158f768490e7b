"""The answer to a capture: JSON that names the slices, or one bounded stream that holds the states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from taphouse import slices
from taphouse_tap.api.admission import StreamRoom
from taphouse_tap.api.collect import Capture
from taphouse_tap.api.refusals import CaptureFailed
from taphouse_tap.api.requests import CaptureRequest, ModelFacts

CHUNK_BYTES = 1 << 20


def header(
    request: CaptureRequest,
    model: ModelFacts,
    captures: Sequence[Capture],
    *,
    start_id: str,
    fingerprint: dict[str, Any],
    weights_epoch: int,
) -> dict[str, Any]:
    """The answer without slices or states: ``data[i].token_ids`` is ``[P + G]``, ``shape`` ``[T, L, H]``.

    Raises: `CaptureFailed` for states of other weights than the ``fingerprint``'s.
    """
    if any(capture.weights_epoch != weights_epoch for capture in captures):
        raise CaptureFailed("the engine's weights changed while it ran; ask again")
    layers = request.asked_layers(model)
    answer: dict[str, Any] = {
        "object": "hidden_states",
        "start_id": start_id,
        "fingerprint": fingerprint,
        "fingerprint_id": slices.fingerprint_id(fingerprint),
        "layers": layers,
        "num_layers": model.num_layers,
        "dtype": model.dtype,
        "data": [_item(index, capture, layers, model) for index, capture in enumerate(captures)],
    }
    if request.request_id is not None:
        answer["request_id"] = request.request_id
    return answer


def _item(index: int, capture: Capture, layers: list[int], model: ModelFacts) -> dict[str, Any]:
    prompt, generated = capture.prompt, capture.generated
    item: dict[str, Any] = {
        "index": index,
        "tag": capture.tag,
        "token_ids": capture.token_ids,
        "prompt_len": len(prompt.token_ids),
        "rows": capture.rows,
        "shape": [capture.rows, len(layers), model.hidden_size],
        "finish_reason": generated.finish_reason,
        "error": None,
    }
    if capture.witness is not None:
        item["witness"] = capture.witness
    if prompt.loss_mask is not None:
        item["loss_mask"] = prompt.loss_mask + [int(prompt.generates_loss)] * len(generated.token_ids)
    return item


def slices_answer(answer: dict[str, Any], captures: Sequence[Capture]) -> Response:
    """Name the sealed slices (whose consumer removes them); ``bytes`` and ``crc32`` are of the payload."""
    for item, capture in zip(answer["data"], captures, strict=True):
        item["slices"] = [
            {
                "path": str(path),
                "tp_rank": trailer.tp_rank,
                "rows": trailer.rows,
                "bytes": trailer.rows * trailer.row_bytes,
                "crc32": trailer.crc32,
            }
            for path, trailer in zip(capture.paths, capture.trailers, strict=True)
        ]
    return JSONResponse(answer)


def stream_answer(answer: dict[str, Any], captures: Sequence[Capture], room: StreamRoom) -> StreamResponse:
    """Join all ranks' slices into one body. Reads and checks every payload: call it off the event loop.

    Raises: `CaptureFailed` when a payload is not what its rank sealed.
    """
    try:
        states = [
            slices.join_slices(capture.paths, capture.fed_token_ids, answer["layers"]) for capture in captures
        ]
    except (slices.SliceError, OSError) as error:
        raise CaptureFailed(f"the capture failed: {error}") from error
    return StreamResponse(slices.stream_parts(answer, states), room)


class StreamResponse(Response):
    """Bytes of known length, sent in bounded pieces, never copied into one body; then gives its room back."""

    media_type = "application/octet-stream"

    def __init__(self, parts: Sequence[bytes | memoryview], room: StreamRoom) -> None:
        super().__init__()
        self._room = room
        self._parts = parts
        self.nbytes = sum(len(part) for part in parts)
        self.headers["content-length"] = str(self.nbytes)

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the headers and then the parts."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for part in self._parts:
                for at in range(0, len(part), CHUNK_BYTES):
                    chunk = bytes(part[at : at + CHUNK_BYTES])
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._room.give_back()
