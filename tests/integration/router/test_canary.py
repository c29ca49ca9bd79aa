"""A prompt and a key go every way a request can go; neither turns up anywhere but at the backend."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.exchange import Wire, call
from support.modelserver import ModelServer
from support.routers import RouterProcess, Setup, backend, router
from support.tenants import new_tenant

from router_ext.wire.controlplane import parse_key


@pytest.fixture(scope="module")
def running(server: ModelServer) -> Iterator[RouterProcess]:
    """A router of its own, whose log and folder hold this test's requests alone; it says all it can say."""
    with router(Setup(backends=[backend(server.port)]), environment={"FAIRLANE_ROUTER_LOG_LEVEL": "debug"}) as made:
        yield made


def traces_of(words: list[bytes], folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [f"{path}: {word!r}" for path in files for word in words if word in path.read_bytes()]


def test_neither_prompts_nor_keys_are_told(running: RouterProcess) -> None:
    canary = f"canary{secrets.token_hex(8)}"
    tenant = new_tenant(running, may_choose_tier=True)
    head = tenant.headers
    secret = tenant.key.split(parse_key(tenant.key) or "none")[-1]
    assert len(secret) >= 32
    port = running.port
    params = {"max_new_tokens": 4}
    native = {"inputs": f"{canary} says", "parameters": params}
    chat = {"messages": [{"role": "user", "content": canary}], "max_tokens": 4}
    outcomes = [
        call(port, "POST", "/generate", native, headers={**head, "x-request-id": "canary-run"}),
        call(port, "POST", "/generate_stream", native, headers=head),
        call(port, "POST", "/", {**native, "stream": True}, headers=head),
        call(port, "POST", "/v1/completions", {"prompt": canary, "max_tokens": 4}, headers=head),
        call(port, "POST", "/v1/chat/completions", chat, headers=head),
        call(port, "POST", "/v1/chat/completions", {**chat, "stream": True}, headers=head),
        call(port, "POST", "/v1/responses", {"input": canary, "max_output_tokens": 16}, headers=head),
        call(port, "POST", "/tokenize", {"inputs": canary}, headers=head),
        # Refused: by shape, value, length, tier, model, key, path, method and size.
        call(port, "POST", "/generate", {"inputs": [canary]}, headers=head),
        call(port, "POST", "/generate", f'{{"inputs": "{canary}'.encode(), headers=head),
        call(port, "POST", "/generate", {"inputs": canary, "parameters": {"temperature": -1}}, headers=head),
        call(port, "POST", "/generate", {"inputs": f"{canary} " * 4_000}, headers=head),
        call(port, "POST", "/generate", native, headers={**head, "x-fairlane-tier": "gold"}),
        call(port, "POST", "/v1/chat/completions", {**chat, "response_format": {"type": canary}}, headers=head),
        call(port, "POST", "/generate", native, headers={"Authorization": f"Bearer {tenant.key}x"}),
        call(port, "POST", "/generate", native, headers={"X-API-Key": f"sk-{secret}"}),
        call(
            port, "POST", "/generate", json.dumps(native).encode(), headers={**head, "Content-Type": f"text/{canary}"}
        ),
        call(port, "POST", "/generate", f"{canary}{'x' * 2_100_000}".encode(), headers=head),
    ]
    statuses = [status for status, _, _ in outcomes]
    assert statuses[:8] == [200] * 8
    assert all(400 <= status < 500 for status in statuses[8:]), statuses
    with Wire(port) as gone:
        gone.send("POST", "/generate_stream", {**native, "parameters": {"max_new_tokens": 2_000}}, headers=head)
        gone.head()
    running.wait(lambda: running.is_idle() and len(tenant.events()) >= 8)

    admin = {"Authorization": f"Bearer {running.admin_token}"}
    pages = [call(port, "GET", "/metrics")[2], call(port, "GET", "/v1/requests/canary-run", headers=head)[2]]
    paths = ["/metrics", "/readyz", "/requests", "/requests/canary-run", "/predictor", "/debug/pools"]
    for path in paths:
        status, _, page = call(running.admin_port, "GET", path, headers=admin)
        assert status == 200, path
        pages.append(page)
    words = [canary.encode().removeprefix(b"canary"), secret.encode(), tenant.key.encode()]
    log = running.log.read_bytes()
    assert log.count(b'"request.ended"') >= len(outcomes)
    assert not [word for word in words for text in [log, *pages] if word in text]
    assert not traces_of(words, running.directory)
    # The snapshot holds digests.
    assert not [word for word in words[1:] if word in running.snapshot_file.read_bytes()]


def test_the_search_finds_what_is_there(running: RouterProcess) -> None:
    """What the test above rests on: a word in an id, which may be told, is found in log, page and folder."""
    tenant = new_tenant(running)
    word = f"canary{secrets.token_hex(8)}"
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}
    call(running.port, "POST", "/generate", body, headers={**tenant.headers, "x-request-id": word})
    tenant.usage(1)
    assert word.encode() in running.log.read_bytes()
    assert traces_of([word.encode()], running.directory)
