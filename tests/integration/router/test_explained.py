"""Why a request waited, asked of a real router: while it waits, after it has ended, and in the books."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.exchange import Wire, call
from support.modelserver import model_server
from support.routers import RouterProcess, Setup, backend, router
from support.tenants import new_tenant

BUSY = {"inputs": "Hi", "parameters": {"max_new_tokens": 150}}
NEXT = {"inputs": "Hi", "parameters": {"max_new_tokens": 20}}


@pytest.fixture
def narrow() -> Iterator[RouterProcess]:
    """A server that makes a token in 10 ms and holds one long answer at a time."""
    flags = ("--sim-step-ms", "10", "--sim-mean-tokens", "0", "--max-total-tokens", "200")
    with (
        model_server(*flags) as server,
        router(Setup(backends=[backend(server.port, kv_tokens=176, block_size=16)])) as running,
    ):
        yield running


def asked(running: RouterProcess, path: str, *, token: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {running.admin_token if token is None else token}"}
    status, _, body = call(running.admin_port, "GET", path, headers=headers)
    return status, json.loads(body) if body else None


def test_a_request_tells_why_it_waits_and_waited(narrow: RouterProcess) -> None:
    first, second = new_tenant(narrow), new_tenant(narrow)
    with Wire(narrow.port) as busy, Wire(narrow.port) as waiting:
        busy.send("POST", "/generate_stream", BUSY, headers=first.headers)
        busy.head()
        waiting.send("POST", "/generate", NEXT, headers={**second.headers, "x-request-id": "asked/later"})
        narrow.wait(lambda: asked(narrow, "/requests/asked/later")[0] == 200)
        _, live = asked(narrow, "/requests/asked/later")
        (found,) = live["requests"]
        assert (found["is_live"], found["tenant"], found["last_step"]) == (True, f"ten_{second.name}", "queued")
        assert {reason["cause"] for reason in found["reasons"]} >= {"wait", "kv"}
        status, _, body = call(narrow.port, "GET", "/v1/requests/asked/later", headers=second.headers)
        (own,) = json.loads(body)["requests"]
        assert (status, own["state"], own["queue"]["position"]) == (200, "queued", 1)
        assert call(narrow.port, "GET", "/v1/requests/asked/later", headers=first.headers)[0] == 404
        status, headers = waiting.head()
        assert (status, headers["x-request-id"]) == (200, "asked/later")
        waiting.body(headers)
        busy.rest()
    (event,) = second.usage(1)
    assert event.request == "asked/later"
    _, ended = asked(narrow, "/requests/asked/later")
    (found,) = ended["requests"]
    assert (found["is_live"], found["outcome"], found["last_step"]) == (False, "completed", "finished")
    wait = next(reason for reason in found["reasons"] if reason["cause"] == "wait")
    assert wait["seconds"] >= 1.0
    assert [moment["step"] for moment in found["timeline"]] == ["queued", "dispatched", "first_token", "finished"]
    # The books say the same.
    assert [(r.cause, r.seconds, r.text) for r in event.reasons] == [
        (r["cause"], r["seconds"], r["text"]) for r in found["reasons"]
    ]
    assert [moment.step for moment in event.timeline] == [moment["step"] for moment in found["timeline"]]
    assert event.timeline[1].backend == "bke_one"
    assert event.timeline[1].at_s >= 1.0
    assert event.explanation[: len(event.reasons)] == [reason.text for reason in event.reasons]
    assert first.name not in json.dumps(ended)
    # So does what its own tenant reads, in fewer words.
    own = json.loads(call(narrow.port, "GET", f"/v1/requests/{event.event}", headers=second.headers)[2])["requests"][0]
    assert [moment["step"] for moment in own["timeline"]] == [moment["step"] for moment in found["timeline"]]
    assert own["tokens"]["output"] == event.output_tokens
    assert own["seconds"]["queue"] >= 1.0
    assert [wait["cause"] for wait in own["waits"]] == [reason["cause"] for reason in found["reasons"]]
    _, listed = asked(narrow, "/requests")
    assert [each["request"] == "asked/later" for each in listed["requests"]].count(True) == 1


def test_only_the_operator_may_ask(narrow: RouterProcess) -> None:
    assert asked(narrow, "/requests", token="wrong")[0] == 401
    assert asked(narrow, "/requests/none")[0] == 404
    assert call(narrow.port, "GET", "/requests")[0] == 404
