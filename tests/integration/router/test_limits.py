"""Real clients at their limits: they come again when they are told to, and not when they are told not to."""

from __future__ import annotations

import threading

import pytest
from openai import OpenAI, RateLimitError
from support.exchange import Wire, call
from support.routers import RouterProcess
from support.tenants import new_tenant

from router_ext.wire.controlplane import LimitsRecord

MESSAGES = [{"role": "user", "content": "Hi"}]


def rejected(router: RouterProcess, code: str) -> float:
    return router.metric("fairlane_rejected_total", code=code)


def test_openai_does_not_try_a_used_up_quota_again(shared_router: RouterProcess) -> None:
    tenant = new_tenant(shared_router, limits=LimitsRecord(tokens_per_day=5))
    before = rejected(shared_router, "insufficient_quota")
    client = OpenAI(base_url=f"{tenant.base}/v1", api_key=tenant.key, max_retries=5)
    with pytest.raises(RateLimitError) as found:
        client.chat.completions.create(model="main", messages=MESSAGES, max_tokens=20)
    assert (found.value.code, found.value.type) == ("insufficient_quota", "insufficient_quota")
    assert rejected(shared_router, "insufficient_quota") == before + 1
    assert tenant.events() == []


def test_openai_comes_again_once_there_is_room(shared_router: RouterProcess) -> None:
    tenant = new_tenant(shared_router, limits=LimitsRecord(concurrent=1))
    before = rejected(shared_router, "rate_limit_exceeded")
    client = OpenAI(base_url=f"{tenant.base}/v1", api_key=tenant.key, max_retries=3)
    with Wire(shared_router.port) as busy:
        body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2_000}}
        busy.send("POST", "/generate_stream", body, headers=tenant.headers)
        assert busy.head()[0] == 200
        # It leaves while the client waits as long as it was told to.
        watch = threading.Thread(
            target=lambda: (
                shared_router.wait(lambda: rejected(shared_router, "rate_limit_exceeded") > before),
                busy.close(),
            )
        )
        watch.start()
        answer = client.chat.completions.create(model="main", messages=MESSAGES, max_tokens=4)
        watch.join()
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert rejected(shared_router, "rate_limit_exceeded") == before + 1
    assert sorted(event.outcome for event in tenant.usage(2)) == ["cancelled", "completed"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions"])
def test_what_is_passed_through_tells_what_remains_too(shared_router: RouterProcess, path: str) -> None:
    """Grammars and chats go whole to the backend; their answers have the same headers."""
    tenant = new_tenant(shared_router, limits=LimitsRecord(requests_per_minute=5, tokens_per_minute=1_000))
    grammar = {"type": "regex", "value": "[a-z]{3}"}
    bodies = {
        "/v1/completions": {"model": "main", "prompt": "Hi", "max_tokens": 3, "stream": True},
        "/v1/chat/completions": {"model": "main", "messages": MESSAGES, "max_tokens": 3, "stream": True},
    }
    body = bodies.get(path, {"inputs": "Hi", "parameters": {"max_new_tokens": 5, "grammar": grammar}})
    status, headers, _ = call(shared_router.port, "POST", path, body, headers=tenant.headers)
    assert status == 200
    assert headers["x-ratelimit-limit-requests"] == "5"
    assert headers["x-ratelimit-remaining-requests"] == "4"
    assert int(headers["x-ratelimit-remaining-tokens"]) < 1_000
    (event,) = tenant.usage(1)
    shared_router.wait(lambda: shared_router.metric("fairlane_limit_reservations") == 0)
    # The next one sees what the first really took.
    _, headers, _ = call(shared_router.port, "POST", "/generate", {"inputs": ""}, headers=tenant.headers)
    used = event.prompt_tokens + event.output_tokens
    assert int(headers["x-ratelimit-remaining-tokens"]) == 1_000 - used
