"""The plugin and the middleware on an app like vLLM's: what reaches the tap; nothing stops the server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.unit.tap.endpoint_fakes import Bench, make_bench

from taphouse_tap.api import assemble as assemble_module
from taphouse_tap.api.endpoint import Endpoint
from taphouse_tap.middleware import HiddenStatesMiddleware
from taphouse_tap.plugin import HiddenStatesPlugin

URL = "/v1/hidden_states"


class ServerKeyCheck:
    """vLLM's key check: everything below /v1 needs the server's key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization")
            if given != f"Bearer {self.key}".encode():
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def make_app() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat() -> dict[str, str]:
        return {"object": "chat.completion"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    return app


def use(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `assemble` find the bench's service in place of an engine's."""

    def assemble(endpoint: Endpoint, state: Any) -> None:
        assert state.engine_client == "engine"
        endpoint.service, endpoint.keys = bench.service, bench.endpoint.keys

    for name in ("taphouse_tap.api.assemble", "taphouse_tap.middleware"):
        monkeypatch.setattr(sys.modules[name], "assemble", assemble)


async def call(app: ASGIApp, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
        return await client.request(method, path, **more)


async def live(app: FastAPI) -> Any:
    """Run the app's lifespan; returns what ends it."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    started = asyncio.Event()

    async def send(message: Any) -> None:
        assert not message["type"].endswith("failed"), message
        started.set()

    inbox.put_nowait({"type": "lifespan.startup"})
    task = asyncio.create_task(app({"type": "lifespan", "app": app, "state": {}}, inbox.get, send))
    await started.wait()

    async def end() -> None:
        inbox.put_nowait({"type": "lifespan.shutdown"})
        await task

    return end


@pytest.mark.parametrize("via", ["plugin", "middleware"])
def test_the_taps_own_key_passes_the_servers_key_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, via: str
) -> None:
    bench = make_bench(tmp_path, own_key="tap", server_keys=["customer"])
    use(bench, monkeypatch)

    async def go() -> None:
        await bench.ready()
        app = make_app()
        app.state.engine_client = "engine"
        plugin = HiddenStatesPlugin()
        if via == "plugin":
            plugin.attach_router(app)
        app.add_middleware(ServerKeyCheck, key="customer")
        if via == "plugin":
            await plugin.init_state("engine", app.state, None)
        else:
            app.add_middleware(HiddenStatesMiddleware)
        end = await live(app)
        for path in (URL, "/hidden_states"):
            assert (await call(app, "POST", path, "tap", json={"prompt": [10]})).status_code == 200
            assert (await call(app, "POST", path, "customer", json={"prompt": [10]})).status_code == 401
            assert (await call(app, "POST", path, json={"prompt": [10]})).status_code == 401
            assert (await call(app, "GET", f"{path}/status", "tap")).json()["key"] == "own key"
        chat = "/v1/chat/completions"
        assert (await call(app, "POST", chat, "customer")).json() == {"object": "chat.completion"}
        assert (await call(app, "POST", chat, "tap")).status_code == 401
        assert (await call(app, "GET", "/health")).status_code == 200
        assert (await call(app, "GET", "/hidden_states", "tap")).status_code in (404, 405)
        await end()
        assert bench.start.directory.exists()

    asyncio.run(go())


def test_a_root_path_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        app = HiddenStatesMiddleware(make_app(), bench.endpoint)
        transport = httpx.ASGITransport(app=app, root_path="/proxy")
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            assert (await client.get("/proxy/v1/hidden_states/status")).status_code == 200
        await bench.service.close()

    asyncio.run(go())


def test_without_an_engine_the_server_lives_and_the_tap_says_why() -> None:
    async def go() -> None:
        app, plugin = make_app(), HiddenStatesPlugin()
        plugin.attach_router(app)
        await plugin.init_state(None, app.state, None)
        answer = await call(app, "POST", URL, json={"prompt": [1]})
        assert (answer.status_code, "no engine" in answer.text) == (503, True)
        assert (await call(app, "GET", "/health")).status_code == 200

    asyncio.run(go())


def test_settings_that_cannot_be_read_leave_the_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAPHOUSE_TAP_MAX_PROMPTS", "many")

    async def go() -> None:
        app, plugin = make_app(), HiddenStatesPlugin()
        plugin.attach_router(app)
        await plugin.init_state("engine", app.state, None)
        end = await live(app)
        answer = await call(app, "POST", URL, json={"prompt": [1]})
        assert (answer.status_code, "max_prompts" in answer.text) == (503, True)
        assert (await call(app, "GET", "/health")).status_code == 200
        await end()

    asyncio.run(go())


@pytest.mark.parametrize("broken", ["attach", "init"])
def test_an_error_of_ours_never_reaches_the_server(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    async def go() -> None:
        plugin = HiddenStatesPlugin()
        if broken == "attach":
            plugin.attach_router(SimpleNamespace())
            await plugin.init_state("engine", SimpleNamespace(), None)
            return
        app = make_app()
        plugin.attach_router(app)
        end = await live(app)
        await plugin.init_state("engine", SimpleNamespace(engine_client="engine"), None)
        answer = await call(app, "POST", URL, json={"prompt": [1]})
        assert answer.status_code == 503
        await end()

    asyncio.run(go())


def test_a_second_assembly_changes_nothing() -> None:
    endpoint = Endpoint()
    endpoint.service = "there"  # type: ignore[assignment]
    assemble_module.assemble(endpoint, SimpleNamespace())
    assert endpoint.service == "there"
