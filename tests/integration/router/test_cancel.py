"""A client that leaves, in whatever state: the upstream closes, the ledger is free, one line is in the books."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.exchange import Wire, gauges
from support.modelserver import ModelServer, model_server
from support.routers import RouterProcess, Setup, backend, router
from support.tenants import new_tenant

LONG = {"inputs": "Tell me a long story", "parameters": {"max_new_tokens": 1_000}}
CHAT = {"messages": [{"role": "user", "content": "Tell me a long story"}], "max_tokens": 1_000}


@pytest.fixture(scope="module")
def slow_server() -> Iterator[ModelServer]:
    """Room for one request at a time: the second one waits in the router."""
    flags = ("--sim-step-ms", "20", "--sim-mean-tokens", "0", "--max-total-tokens", "2048")
    with model_server(*flags, "--sim-step-prefill-token-ms", "0.5") as running:
        yield running


@pytest.fixture(scope="module")
def slow_router(slow_server: ModelServer) -> Iterator[RouterProcess]:
    with router(Setup(backends=[backend(slow_server.port, kv_tokens=1_040)])) as running:
        yield running


@pytest.fixture(scope="module")
def slicing_router(slow_server: ModelServer) -> Iterator[RouterProcess]:
    scheduling = {"max_slice_tokens": 6, "min_slice_tokens": 6}
    with router(Setup(backends=[backend(slow_server.port)], scheduling=scheduling)) as running:
        yield running


def is_free(running: RouterProcess, server: ModelServer) -> bool:
    found = gauges(server.port)
    return running.is_idle() and not found.get("tgi_batch_current_size") and not found.get("tgi_queue_size")


def leave(wire: Wire, how: str) -> None:
    if how == "reset":
        wire.socket.setsockopt(1, 13, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # SO_LINGER: close with RST
    wire.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate_stream", LONG), ("/generate", LONG), ("/v1/chat/completions", {**CHAT, "stream": True})],
)
def test_while_running(slow_server: ModelServer, slow_router: RouterProcess, path: str, body: object, how: str) -> None:
    tenant = new_tenant(slow_router)
    wire = Wire(slow_router.port)
    wire.send("POST", path, body, headers=tenant.headers)
    received = 0
    if path == "/generate":
        slow_router.wait(lambda: gauges(slow_server.port).get("tgi_batch_current_size") == 1)
    else:
        _, _ = wire.head()
        pieces = wire.chunks()
        while received < 3:
            received += next(pieces).count(b"data: ")
    leave(wire, how)
    slow_router.wait(lambda: is_free(slow_router, slow_server))
    (event,) = tenant.usage(1)
    assert event.outcome == "cancelled"
    # At most what one more loop turn handed to a connection that was closing.
    assert received <= event.output_tokens <= received + 3 or path == "/generate"
    assert event.output_tokens < 100


def test_while_queued(slow_server: ModelServer, slow_router: RouterProcess) -> None:
    running, waiting = new_tenant(slow_router), new_tenant(slow_router)
    first = Wire(slow_router.port)
    first.send("POST", "/generate_stream", LONG, headers=running.headers)
    first.head()
    second = Wire(slow_router.port)
    second.send("POST", "/generate_stream", LONG, headers=waiting.headers)
    slow_router.wait(lambda: slow_router.metric("fairlane_queue_length") == 1)
    before = gauges(slow_server.port).get("tgi_request_count")
    second.close()
    slow_router.wait(lambda: slow_router.metric("fairlane_queue_length") == 0)
    (event,) = waiting.usage(1)
    assert (event.outcome, event.output_tokens, event.prompt_tokens, event.backends) == ("cancelled", 0, 0, [])
    assert gauges(slow_server.port).get("tgi_request_count") == before
    first.close()
    slow_router.wait(lambda: is_free(slow_router, slow_server))


def test_while_the_prompt_is_processed(slow_server: ModelServer, slow_router: RouterProcess) -> None:
    tenant = new_tenant(slow_router)
    wire = Wire(slow_router.port)
    body = {"inputs": " word" * 900, "parameters": {"max_new_tokens": 100}}
    wire.send("POST", "/generate_stream", body, headers=tenant.headers)
    slow_router.wait(lambda: slow_router.metric("fairlane_backend_running_requests") == 1)
    wire.close()
    slow_router.wait(lambda: is_free(slow_router, slow_server))
    (event,) = tenant.usage(1)
    assert (event.outcome, event.output_tokens) == ("cancelled", 0)
    assert event.backends == ["bke_one"]


def test_between_slices(slow_server: ModelServer, slicing_router: RouterProcess) -> None:
    """Slices of six tokens: wherever the client leaves, a slice end is near."""
    for count in range(1, 9):
        tenant = new_tenant(slicing_router)
        wire = Wire(slicing_router.port)
        wire.send("POST", "/generate_stream", LONG, headers=tenant.headers)
        wire.head()
        received = 0
        pieces = wire.chunks()
        while received < count:
            received += next(pieces).count(b"data: ")
        wire.close()
        slicing_router.wait(lambda: is_free(slicing_router, slow_server))
        (event,) = tenant.usage(1)
        assert event.outcome == "cancelled"
        assert received <= event.output_tokens <= received + 6


def test_during_the_body(slow_router: RouterProcess) -> None:
    tenant = new_tenant(slow_router)
    wire = Wire(slow_router.port)
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tenant.key}\r\nContent-Length: 100\r\n\r\n"
    wire.socket.sendall(head.encode() + b'{"inputs"')
    wire.close()
    slow_router.wait(slow_router.is_idle)
    assert tenant.events() == []


def test_while_the_backend_is_silent() -> None:
    """Closing waits for nothing from upstream: this stream never sends another event."""
    flags = (
        "--sim-step-ms",
        "1",
        "--sim-mean-tokens",
        "0",
        "--max-total-tokens",
        "2048",
        "--sim-stall-after-tokens",
        "3",
    )
    with model_server(*flags) as server, router(Setup(backends=[backend(server.port)])) as running:
        tenant = new_tenant(running)
        wire = Wire(running.port)
        wire.send("POST", "/generate_stream", LONG, headers=tenant.headers)
        wire.head()
        pieces = wire.chunks()
        received = 0
        while received < 3:
            received += next(pieces).count(b"data: ")
        wire.close()
        running.wait(lambda: is_free(running, server), 5)
        (event,) = tenant.usage(1)
        assert (event.outcome, event.output_tokens) == ("cancelled", 3)


def test_a_stalled_reader_is_cut() -> None:
    flags = ("--sim-step-ms", "1", "--sim-mean-tokens", "0", "--max-total-tokens", "2048")
    with (
        model_server(*flags) as server,
        router(Setup(backends=[backend(server.port)]), environment={"FAIRLANE_ROUTER_STALL_LIMIT_S": "0.5"}) as running,
    ):
        tenant = new_tenant(running)
        wire = Wire(running.port)
        wire.socket.setsockopt(1, 8, 4_096)  # SO_RCVBUF
        wire.send(
            "POST",
            "/generate_stream",
            {"inputs": "x", "parameters": {"max_new_tokens": 2_000, "top_n_tokens": 5}},
            headers=tenant.headers,
        )
        (event,) = tenant.usage(1)
        assert (event.outcome, event.error_code) == ("cancelled", "client_stalled")
        assert event.output_tokens < 1_500
        running.wait(lambda: is_free(running, server))
        wire.close()
