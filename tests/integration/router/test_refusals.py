"""Every kind of refusal, in both dialects: the right status and shape, nothing sent upstream, nothing booked."""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

import pytest
from support.exchange import call, gauges
from support.modelserver import ModelServer
from support.routers import RouterProcess
from support.tenants import Tenant, new_tenant

from router_ext.wire.controlplane import generate_key

NATIVE = ("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 2}})
OPENAI = ("/v1/chat/completions", {"model": "main", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
BOTH = [NATIVE, OPENAI]
BAD_KEY = "Invalid or missing API key."


def merged(base: Any, change: Any) -> Any:
    """``base`` with the fields of ``change``, one level deep."""
    out = dict(base)
    for key, value in change.items():
        out[key] = {**out[key], **value} if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def generations(server: ModelServer) -> float:
    """Generations the model server has begun, ended or refused, plus those it is asked for now."""
    found = gauges(server.port)
    return sum(v for k, v in found.items() if k.startswith(("tgi_request_count", "tgi_request_failure")))


def refuse(
    server: ModelServer,
    tenant: Tenant,
    path: str,
    body: Any,
    *,
    headers: dict[str, str] | None = None,
    method: str = "POST",
) -> tuple[int, dict[str, str], bytes]:
    before = generations(server)
    answer = call(tenant.router.port, method, path, body, headers=tenant.headers if headers is None else headers)
    assert generations(server) == before, "something went upstream"
    assert tenant.events() == [], "something was booked"
    return answer


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("kind", ["missing", "malformed", "unknown", "revoked", "wrong secret", "two", "not ascii"])
def test_bad_keys_get_one_answer(server: ModelServer, tenant: Tenant, path: str, body: Any, kind: str) -> None:
    key = tenant.key
    if kind == "revoked":
        del tenant.router.setup.keys[key]
        tenant.router.publish()
    headers = {
        "missing": {},
        "malformed": {"Authorization": "Bearer sk-something"},
        "unknown": {"Authorization": "Bearer " + generate_key()[0]},
        "revoked": {"Authorization": f"Bearer {key}"},
        "wrong secret": {"Authorization": f"Bearer {other_secret(key)}"},
        "two": {"Authorization": f"Bearer {key} {key}"},
        "not ascii": {"Authorization": "Bearer \xe9"},
    }[kind]
    status, found, answer = refuse(server, tenant, path, body, headers=headers)
    assert status == 401
    assert found["www-authenticate"] == "Bearer"
    data = json.loads(answer)
    if path == NATIVE[0]:
        assert data == {"error": BAD_KEY, "error_type": "authentication"}
    else:
        assert data["error"] == {
            "message": BAD_KEY,
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }


def other_secret(key: str) -> str:
    """The same public id with another secret and a right checksum."""
    body = key[:-9] + ("A" if key[-9] != "A" else "B")
    return body + f"{zlib.crc32(body.encode()):08x}"


def test_an_expired_key_differs_by_its_code_only(server: ModelServer, shared_router: RouterProcess) -> None:
    tenant = new_tenant(shared_router, expires_at_us=time.time_ns() // 1_000 - 1)
    status, _, answer = refuse(server, tenant, *OPENAI)
    error = json.loads(answer)["error"]
    assert (status, error["message"], error["code"]) == (401, BAD_KEY, "expired_api_key")
    # Only the right secret learns that much.
    headers = {"Authorization": f"Bearer {other_secret(tenant.key)}"}
    _, _, answer = refuse(server, tenant, *OPENAI, headers=headers)
    assert json.loads(answer)["error"]["code"] == "invalid_api_key"


def test_the_other_header_works(server: ModelServer, tenant: Tenant) -> None:
    before = generations(server)
    status, _, _ = call(tenant.router.port, "POST", *NATIVE, headers={"X-API-Key": tenant.key})
    assert status == 200
    assert tenant.usage(1)[0].output_tokens == 2
    assert generations(server) > before


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_suspended_tenant_is_forbidden(
    server: ModelServer, shared_router: RouterProcess, path: str, body: Any
) -> None:
    tenant = new_tenant(shared_router, state="suspended")
    status, _, answer = refuse(server, tenant, path, body)
    assert status == 403
    error = json.loads(answer)
    if path == NATIVE[0]:
        assert error["error_type"] == "forbidden"
    else:
        assert (error["error"]["type"], error["error"]["code"]) == ("permission_error", "tenant_disabled")


def test_a_tier_is_chosen_only_as_far_as_the_key_allows(server: ModelServer, shared_router: RouterProcess) -> None:
    fixed = new_tenant(shared_router)
    free = new_tenant(shared_router, may_choose_tier=True)
    for tenant in (fixed, free):
        call(shared_router.port, "POST", *NATIVE, headers={**tenant.headers, "x-fairlane-tier": "interactive"})
    assert [fixed.usage(1)[0].tier, free.usage(1)[0].tier] == ["standard", "interactive"]
    stranger = new_tenant(shared_router, may_choose_tier=True)
    status, _, answer = refuse(server, stranger, *OPENAI, headers={**stranger.headers, "x-fairlane-tier": "gold"})
    assert (status, json.loads(answer)["error"]["code"]) == (403, "tier_not_allowed")


def test_an_unknown_model_is_not_found(server: ModelServer, tenant: Tenant) -> None:
    status, _, answer = refuse(server, tenant, OPENAI[0], merged(OPENAI[1], {"model": "gpt-4"}))
    error = json.loads(answer)["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("model", [None, "", "tgi", "dummy", "main", "smol"])
def test_names_of_the_default_pool(tenant: Tenant, model: str | None) -> None:
    status, _, _ = call(
        tenant.router.port, "POST", OPENAI[0], merged(OPENAI[1], {"model": model}), headers=tenant.headers
    )
    assert status == 200


@pytest.mark.parametrize(
    ("path", "change", "status", "wanted"),
    [
        ("/generate", {"parameters": {"max_new_tokens": 0}}, 422, "max_new_tokens"),
        ("/generate", {"parameters": {"temperature": 0.0}}, 422, "temperature"),
        ("/generate_stream", {"parameters": {"top_p": 1.5}}, 422, "top_p"),
        ("/generate_stream", {"parameters": {"best_of": 2}}, 422, "best_of"),
        ("/generate_stream", {"inputs": ""}, 422, "inputs"),
        ("/generate", {"inputs": 5}, 422, "inputs"),
        ("/generate", {"parameters": {"stop": 1}}, 422, "stop"),
        ("/", {"parameters": {"max_new_tokens": "x"}, "stream": True}, 422, "max_new_tokens"),
        ("/v1/chat/completions", {"max_tokens": 0}, 400, "max_tokens"),
        ("/v1/chat/completions", {"temperature": -1}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": "x", "stream": True}, 400, "messages"),
        ("/v1/completions", {"prompt": [1, 2]}, 400, "prompt"),
    ],
)
def test_bad_parameters(server: ModelServer, tenant: Tenant, path: str, change: Any, status: int, wanted: str) -> None:
    base: Any = {"/v1/chat/completions": OPENAI[1], "/v1/completions": {"prompt": "Hi"}}.get(path, NATIVE[1])
    found, _, answer = refuse(server, tenant, path, merged(base, change))
    assert found == status, answer
    data = json.loads(answer)
    if path.startswith("/v1"):
        assert data["error"]["type"] == "invalid_request_error"
        assert data["error"]["param"] == wanted
    else:
        assert data["error_type"] == "validation"
        assert wanted in data["error"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("raw", "content_type"),
    [(b"{", "application/json"), (b"[]", "application/json"), (b"{}", "text/plain"), (b"", None)],
)
def test_bodies_that_are_no_request(
    server: ModelServer, tenant: Tenant, path: str, raw: bytes, content_type: str | None
) -> None:
    headers = {**tenant.headers, **({"Content-Type": content_type} if content_type else {"Content-Type": ""})}
    status, _, answer = refuse(server, tenant, path, raw, headers=headers)
    assert status in (400, 415, 422)
    assert json.loads(answer)["error"]


@pytest.mark.parametrize("path", ["/generate_stream", "/v1/chat/completions"])
def test_a_body_over_the_limit(server: ModelServer, tenant: Tenant, path: str) -> None:
    status, _, answer = refuse(server, tenant, path, {"inputs": "x" * 2_100_000})
    assert status == 413
    data = json.loads(answer)
    assert (
        data["error_type"] == "validation"
        if path == "/generate_stream"
        else data["error"]["code"] == "request_too_large"
    )


@pytest.mark.parametrize(
    ("path", "status"),
    [("/generate", 422), ("/generate_stream", 422), ("/v1/completions", 400), ("/v1/chat/completions", 400)],
)
def test_what_no_backend_can_hold_is_refused_with_the_numbers(
    server: ModelServer, tenant: Tenant, path: str, status: int
) -> None:
    text = " word" * 1_900
    body: Any = {"inputs": text, "parameters": {"max_new_tokens": 500}}
    if path == "/v1/completions":
        body = {"prompt": text, "max_tokens": 500, "stream": True}
    elif path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 500, "stream": True}
    before = gauges(server.port).get("tgi_batch_inference_count", 0)
    answer = call(tenant.router.port, "POST", path, body, headers=tenant.headers)
    assert gauges(server.port).get("tgi_batch_inference_count", 0) == before
    assert tenant.events() == []
    assert answer[0] == status
    data = json.loads(answer[2])
    message = data["error"]["message"] if status == 400 else data["error"]
    assert "2048" in message
    assert "500" in message
    assert "1900" in message or "19" in message
    if status == 400:
        assert data["error"]["code"] == "context_length_exceeded"


def test_a_larger_cap_is_bounded_where_tgi_bounds_it(tenant: Tenant) -> None:
    body = {"inputs": " word" * 1_000, "parameters": {"max_new_tokens": 100_000, "details": True}}
    status, _, answer = call(tenant.router.port, "POST", "/generate", body, headers=tenant.headers)
    assert status == 200
    details = json.loads(answer)["details"]
    assert (details["generated_tokens"], details["finish_reason"]) == (1_048, "length")


@pytest.mark.parametrize("path", ["/vertex", "/v1/embeddings", "/x"])
def test_unknown_paths(server: ModelServer, tenant: Tenant, path: str) -> None:
    status, _, answer = refuse(server, tenant, path, {"inputs": "x"})
    assert status == 404
    assert json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", "/generate", "POST"), ("POST", "/info", "GET, HEAD"), ("PUT", "/", "GET, HEAD, POST")],
)
def test_wrong_methods_name_the_right_ones(
    server: ModelServer, tenant: Tenant, method: str, path: str, allow: str
) -> None:
    status, headers, _ = refuse(server, tenant, path, None, method=method)
    assert (status, headers["allow"]) == (405, allow)


def test_tokenize_info_and_models_cost_nothing(server: ModelServer, tenant: Tenant) -> None:
    port, headers = tenant.router.port, tenant.headers
    status, _, answer = call(port, "POST", "/tokenize", {"inputs": "Hello there"}, headers=headers)
    assert status == 200
    assert [t["text"] for t in json.loads(answer)] == ["Hello", " there"]
    status, _, answer = call(port, "GET", "/info", headers=headers)
    assert (status, json.loads(answer)["max_total_tokens"]) == (200, 2048)
    assert call(port, "GET", "/v1/models", headers=headers)[0] == 200
    assert call(port, "GET", "/info")[0] == 401
    assert tenant.events() == []


def test_keys_and_prompts_are_in_no_log_and_no_metric(tenant: Tenant) -> None:
    prompt = "a very secret prompt"
    for path, body in (
        ("/generate", {"inputs": prompt}),
        ("/generate", {"inputs": prompt, "parameters": {"top_p": 2}}),
    ):
        call(tenant.router.port, "POST", path, body, headers=tenant.headers)
    _, _, page = call(tenant.router.port, "GET", "/metrics")
    log = tenant.router.log.read_text()
    for secret in (prompt, tenant.key, tenant.key[-30:]):
        assert secret not in log
        assert secret.encode() not in page
    # Tenants are named behind the admin port's token only.
    assert tenant.name.encode() not in page
    assert tenant.router.metric("fairlane_tenant_output_tokens_total", tenant=f"ten_{tenant.name}") > 0
    assert call(tenant.router.admin_port, "GET", "/metrics")[0] == 401
