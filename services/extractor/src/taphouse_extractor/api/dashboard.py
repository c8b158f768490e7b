"""`GET /` and its files: the dashboard, as files that are read once. There is no data in them."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from taphouse_extractor.errors import NotFound

__all__ = ["router"]

router = APIRouter(include_in_schema=False)
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _read() -> dict[str, tuple[bytes, str, str]]:
    """Name → bytes, media type and ETag of every file of the page."""
    found = {}
    for file in files("taphouse_extractor").joinpath("dashboard").iterdir():
        kind = KINDS.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            data = file.read_bytes()
            found[file.name] = (data, kind, f'"{sha256(data).hexdigest()[:20]}"')
    return found


_FILES = _read()


@router.get("/")
async def page(request: Request) -> Response:
    """The page."""
    return _answer(request, "index.html")


@router.get("/dashboard/{file}")
async def part(request: Request, file: str) -> Response:
    """A script, a style or a picture of the page; its name is looked up, never opened."""
    return _answer(request, file)


def _answer(request: Request, name: str) -> Response:
    if name not in _FILES:
        raise NotFound(f"there is no file {name!r:.80}", param="file")
    data, kind, tag = _FILES[name]
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)
