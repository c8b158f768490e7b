"""`GET /docs`: the OpenAPI document as one page of HTML that loads nothing, so it works without a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

__all__ = ["add_docs_page", "render"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #ccc;padding:.2rem .6rem;"
    "text-align:left;vertical-align:top}h3{margin:2rem 0 .3rem}code{background:#f3f3f3;padding:0 .2rem}"
)


def add_docs_page(app: FastAPI) -> None:
    """Serve the page; it is made of what the application says of itself at the first request."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(render(app.openapi()), headers={"Content-Security-Policy": _POLICY})


def render(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(info.get('summary', ''))}.",
        'The same for programs: <a href="openapi.json">openapi.json</a>.</p><h2>Routes</h2>',
    ]
    for path, methods in document["paths"].items():
        parts += [_route(path, method, route) for method, route in methods.items()]
    parts.append("<h2>Schemas</h2>")
    schemas = document.get("components", {}).get("schemas", {})
    parts += [_schema(name, schema) for name, schema in schemas.items()]
    return "\n".join(parts) + "\n</html>\n"


def _route(path: str, method: str, route: dict[str, Any]) -> str:
    token = "<p>Needs the token: <code>Authorization: Bearer …</code></p>" if route.get("security") else ""
    asked = [(_code(p["name"]), p["in"], _type(p["schema"]), _text(p)) for p in route.get("parameters", ())]
    body = route.get("requestBody", {})
    asked += [
        (_code(kind), "body", _type(content.get("schema", {})), _text(body))
        for kind, content in body.get("content", {}).items()
    ]
    answers = [
        (_code(status), ", ".join(map(_code, answer.get("content", ()))), _types(answer), _text(answer))
        for status, answer in route["responses"].items()
    ]
    return (
        f"<h3><code>{method.upper()} {escape(path)}</code></h3><p>{_text(route)}</p>{token}"
        + _table(("takes", "in", "type", ""), asked)
        + _table(("answers", "media", "type", ""), answers)
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    fields = [
        (_code(field), _type(facts), "required" if field in required else _default(facts), _text(facts))
        for field, facts in schema.get("properties", {}).items()
    ]
    kinds = f"<p>One of {', '.join(map(_code, schema['enum']))}.</p>" if "enum" in schema else ""
    table = _table(("field", "type", "default", ""), fields)
    return f'<h3 id="{escape(name)}">{_code(name)}</h3><p>{_text(schema)}</p>{kinds}{table}'


def _types(answer: dict[str, Any]) -> str:
    return " or ".join(_type(content.get("schema", {})) for content in answer.get("content", {}).values())


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words; one that has a name links to its own table."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(_type(part) for part in schema[key])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("format") or schema.get("type") or "any"))


def _text(facts: dict[str, Any]) -> str:
    return escape(facts.get("description") or facts.get("summary") or "")


def _default(facts: dict[str, Any]) -> str:
    return _code(facts["default"]) if facts.get("default") is not None else ""


def _code(value: object) -> str:
    return f"<code>{escape(str(value))}</code>"


def _table(head: Iterable[str], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = ["<tr>" + "".join(f"<th>{name}" for name in head)]
    lines += ["<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows]
    return f"<table>{''.join(lines)}</table>"
