"""`POST /v1/extract`: a few rows, answered at once."""

from __future__ import annotations

import hashlib

from fastapi import APIRouter
from fastapi.responses import Response

from taphouse.wire import ExtractRequest
from taphouse_extractor.api.audit import Notes
from taphouse_extractor.api.context import Here
from taphouse_extractor.api.threads import on_its_own

__all__ = ["router"]

router = APIRouter(tags=["extract"])
SHARD_MEDIA = "application/octet-stream"


@router.post(
    "/v1/extract",
    response_class=Response,
    responses={200: {"content": {SHARD_MEDIA: {}}, "description": "One shard; see X-Taphouse-SHA256"}},
)
@on_its_own("bounded")
def extract(here: Here, request: ExtractRequest, notes: Notes) -> Response:
    """Extract a few rows now; the answer is the bytes of one shard. All rows succeed, or none is answered."""
    notes["rows"] = len(request.rows)
    here.gate.check(request.options)
    body, samples = here.direct.run(request)
    headers = {
        "X-Taphouse-SHA256": hashlib.sha256(body).hexdigest(),
        "X-Taphouse-Samples": str(samples),
        "Content-Disposition": 'attachment; filename="extract.safetensors"',
    }
    return Response(body, media_type=SHARD_MEDIA, headers=headers)
