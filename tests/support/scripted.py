"""One router in the process, on a scripted backend, and clients of it without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.routers import Setup, backend, write_snapshot

from router_ext.backends.fake import Ending, FakeBackend, Script
from router_ext.gateway.app import App
from router_ext.gateway.exchange import EXTENSION, Exchange
from router_ext.gateway.lifespan import Router
from router_ext.settings import RouterSettings

INFO = b'{"model_id":"m","max_input_tokens":4095,"max_total_tokens":4096}'


def stream(count: int, *, ending: Ending = Ending.CLEAN) -> Script:
    """A stream of ``count`` tokens; without its final event if it does not end."""
    pieces = []
    for index in range(1, count + 1):
        is_last = index == count and ending is Ending.CLEAN
        event: dict[str, Any] = {
            "index": index,
            "token": {"id": 100 + index, "text": f" t{index}", "logprob": -0.5, "special": False},
            "generated_text": None,
            "details": None,
        }
        if is_last:
            event["generated_text"] = "".join(f" t{i}" for i in range(1, count + 1))
            event["details"] = {"finish_reason": "length", "generated_tokens": count, "seed": None, "input_length": 3}
        pieces.append(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
    return Script(pieces=tuple(pieces), ending=ending)


class World:
    """The backend's script, and the router on it."""

    def __init__(self) -> None:
        self.generation = stream(5)
        self.cut = Script(pieces=(b"[]",))
        self.setup = Setup(backends=[backend(1)])
        self.key = self.setup.key("alice")
        self.router: Router
        self.app: App
        self.client: FakeBackend

    def play(self, path: str, body: bytes) -> Script:
        if path == "/info":
            return Script(pieces=(INFO,))
        if path == "/tokenize" and b" t1" in body:
            # A slice's end is being looked for.
            return self.cut
        if path == "/tokenize":
            return Script(pieces=(b"[]" if b'""' in body else b'[{"id":1},{"id":2},{"id":3}]',))
        if path == "/chat_tokenize":
            return Script(status=422, pieces=(b'{"error":"Template error: none","error_type":"template_error"}',))
        return self.generation if path == "/generate_stream" else Script()

    def make_client(self, record: Any) -> FakeBackend:
        self.client = FakeBackend(self.play)
        return self.client


class Peer:
    """A client: its transport, uvicorn's cycle, and what it received."""

    def __init__(
        self,
        world: World,
        path: str,
        body: Any,
        *,
        method: str = "POST",
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.data = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_closed = False
        self.response_started = self.response_complete = self.disconnected = False
        self.keep_alive = True
        self.waiting_for_100_continue = False
        self.chunked_encoding: bool | None = None
        self.default_headers: list[tuple[bytes, bytes]] = []
        self.flow = SimpleNamespace(write_paused=False)
        self.message_event = asyncio.Event()
        self.exchange = Exchange(self, self, has_chunks=False)
        raw = json.dumps(body).encode()

        async def receive() -> Any:
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message: Any) -> None:
            raise AssertionError("answers go through the exchange")

        scope = {
            "type": "http",
            "path": path,
            "method": method,
            "headers": [
                (b"authorization", b"Bearer " + (key or world.key).encode()),
                (b"content-type", b"application/json"),
                *((name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()),
            ],
            "extensions": {EXTENSION: self.exchange},
        }
        self.task = asyncio.create_task(world.app(scope, receive, send))

    def write(self, data: bytes) -> None:
        if self.exchange.is_open:
            self.data += data
            return
        head, _, self.data = data.partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        self.status = int(status.split(" ")[1])
        self.headers = dict(field.split(": ", 1) for field in fields)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def on_response(self) -> None:
        return

    async def wait(self) -> bytes:
        async with asyncio.timeout(100):
            await self.task
        return self.data


@contextlib.asynccontextmanager
async def running(tmp_path: Path, world: World | None = None, **fields: Any) -> AsyncIterator[World]:
    """A router for the time of the block; ``fields``: of ``RouterSettings``."""
    made = world or World()
    path = tmp_path / "snapshot.json"
    write_snapshot(path, made.setup.snapshot())
    settings = RouterSettings(
        key_pepper=made.setup.pepper.hex(), dir=tmp_path / "state", snapshot_file=path, controlplane_url="", **fields
    )
    router = Router(settings)
    router._make_client = made.make_client  # type: ignore[method-assign]
    async with router.running():
        made.router, made.app = router, App(router)
        await router.engines["pol_main"].model.wait_up()
        yield made


BODY = {"inputs": "a b c", "parameters": {"max_new_tokens": 5, "details": True}}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)
