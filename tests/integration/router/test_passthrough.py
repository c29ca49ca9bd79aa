"""Grammar, tools, response formats and best_of go whole to TGI's own endpoint; what TGI wrote is what clients get.

The backend plays recorded answers of a running TGI.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.exchange import call, events
from support.modelserver import ModelServer
from support.playback import Playback, playback, recorded
from support.routers import RouterProcess, Setup, backend, router
from support.tenants import Tenant, new_tenant

GENERATE, CHAT, STREAMS = map(recorded, ("generate", "chat_and_completions", "streams"))
BODIES = [GENERATE[n] for n in ("grammar regex", "grammar json", "best_of", "decoder_input_details")] + [
    CHAT[n] for n in ("tools required", "tools auto", "response_format json_object", "response_format json_schema")
]
EVENTS = [STREAMS["grammar"], CHAT["stream tools required"], CHAT["stream tools auto"]]


@pytest.fixture(scope="module")
def tgi(server: ModelServer) -> Iterator[Playback]:
    with playback(server.base) as running:
        yield running


@pytest.fixture(scope="module")
def relaying(tgi: Playback) -> Iterator[RouterProcess]:
    with router(Setup(backends=[backend(tgi.port)])) as running:
        yield running


def name(exchange: dict[str, Any]) -> str:
    return str(exchange["name"])


def ask(tgi: Playback, tenant: Tenant, exchange: dict[str, Any], body: Any = None) -> tuple[int, dict[str, str], bytes]:
    tgi.exchange = exchange
    request = exchange["request"]
    return call(
        tenant.router.port, "POST", request["path"], request["body"] if body is None else body, headers=tenant.headers
    )


@pytest.mark.parametrize("exchange", BODIES, ids=name)
def test_whole_answers(tgi: Playback, relaying: RouterProcess, exchange: dict[str, Any]) -> None:
    tenant = new_tenant(relaying)
    status, headers, answer = ask(tgi, tenant, exchange)
    recorded_body = "".join(piece for _, piece in exchange["response"]["body"])
    assert status == 200
    assert json.loads(answer) == json.loads(recorded_body)
    told = {key.lower(): value for key, value in exchange["response"]["headers"]}
    assert headers["x-generated-tokens"] == told["x-generated-tokens"]
    path, sent = tgi.asked[-1]
    assert path == exchange["request"]["path"]
    assert sent.get("model", "tgi") == "tgi"
    (event,) = tenant.usage(1)
    assert (event.outcome, event.segments, event.resume_class) == ("completed", 1, "never")
    assert event.prompt_tokens == int(told["x-prompt-tokens"])
    assert event.token_source == "backend"
    data = json.loads(recorded_body)
    if "best_of" in exchange["request"]["body"].get("parameters", {}):
        # Every sequence was generated, not only the one that was chosen.
        details = data["details"]
        assert event.output_tokens == sum(s["generated_tokens"] for s in [details, *details["best_of_sequences"]])
    else:
        assert event.output_tokens == int(told["x-generated-tokens"])
    relaying.wait(relaying.is_idle)


@pytest.mark.parametrize("exchange", EVENTS, ids=name)
def test_streams(tgi: Playback, relaying: RouterProcess, exchange: dict[str, Any]) -> None:
    tenant = new_tenant(relaying)
    status, headers, answer = ask(tgi, tenant, exchange)
    assert status == 200
    assert headers["content-type"] == "text/event-stream"
    wanted = "".join(piece for _, piece in exchange["response"]["body"]).encode()
    assert events(answer) == events(wanted)
    (event,) = tenant.usage(1)
    assert (event.outcome, event.segments) == ("completed", 1)
    assert event.output_tokens > 0
    relaying.wait(relaying.is_idle)


@pytest.mark.parametrize("kind", ["missing", "null", "zero", "cumulative"])
def test_a_stream_is_counted_whatever_its_usage_says(tgi: Playback, relaying: RouterProcess, kind: str) -> None:
    tenant = new_tenant(relaying)
    exchange = CHAT["stream tools required"]
    chunks = [each for each in events("".join(p for _, p in exchange["response"]["body"]).encode()) if each != "[DONE]"]
    chunks = [each for each in chunks if each["choices"]]
    last = {**chunks[-1], "choices": []}
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    if kind == "cumulative":
        chunks = [each | {"usage": {"prompt_tokens": 7, "completion_tokens": n + 1}} for n, each in enumerate(chunks)]
    elif kind != "missing":
        stated = None if kind == "null" else 0
        chunks.append(last | {"usage": {"prompt_tokens": stated, "completion_tokens": stated}})
    count = sum(bool(each["choices"]) for each in chunks)
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
    status, _, _ = ask(tgi, tenant, played_error(exchange, body))
    assert status == 200
    (event,) = tenant.usage(1)
    assert (event.outcome, event.output_tokens) == ("completed", count)
    assert event.token_source == ("backend" if kind == "cumulative" else "counted")
    assert event.prompt_tokens == 7 if kind == "cumulative" else event.prompt_tokens > 7
    assert event.finish_reason == "stop"
    relaying.wait(relaying.is_idle)


UNTOLD = [CHAT[n] for n in ("tools required", "response_format json_object")] + [
    GENERATE[n] for n in ("grammar regex", "best_of")
]


@pytest.mark.parametrize("exchange", UNTOLD, ids=name)
@pytest.mark.parametrize("is_zero", [False, True], ids=["missing", "zero"])
def test_a_whole_answer_without_counts_is_counted_by_its_text(
    tgi: Playback, relaying: RouterProcess, exchange: dict[str, Any], is_zero: bool
) -> None:
    tenant = new_tenant(relaying)
    data = json.loads("".join(piece for _, piece in exchange["response"]["body"]))
    told = {key.lower(): value for key, value in exchange["response"]["headers"]}
    if "usage" in data:
        data["usage"] = {"prompt_tokens": 0, "completion_tokens": 0} if is_zero else None
    elif is_zero and data.get("details"):
        for each in [data["details"], *data["details"].get("best_of_sequences", ())]:
            each["generated_tokens"] = 0
    else:
        data.pop("details", None)
    bare = played_error(exchange, json.dumps(data))
    bare["response"]["headers"] = [[k, v] for k, v in exchange["response"]["headers"] if "-tokens" not in k.lower()]
    status, _, _ = ask(tgi, tenant, bare)
    assert status == 200
    (event,) = tenant.usage(1)
    assert event.token_source == "estimated"  # this pool has no tokenizer of its own
    assert 0.2 * int(told["x-generated-tokens"]) < event.output_tokens < 5 * int(told["x-generated-tokens"]) + 5
    assert event.prompt_tokens > 0
    relaying.wait(relaying.is_idle)


@pytest.mark.parametrize("kind", ["tools required", "stream tools required"])
def test_the_clients_name_for_the_model_comes_back(tgi: Playback, relaying: RouterProcess, kind: str) -> None:
    exchange = CHAT[kind]
    status, _, answer = ask(tgi, new_tenant(relaying), exchange, {**exchange["request"]["body"], "model": "smol"})
    assert status == 200
    assert tgi.asked[-1][1]["model"] == "tgi"
    wanted = "".join(piece for _, piece in exchange["response"]["body"])
    assert answer.decode() == wanted.replace('"model":"SmolLM2-135M-Instruct"', '"model":"smol"')


def played_error(exchange: dict[str, Any], body: str, status: str = "HTTP/1.1 200 OK") -> dict[str, Any]:
    response = {**exchange["response"], "status": status, "body": [[0, body]]}
    return {**exchange, "response": response}


def test_an_error_event_before_anything_keeps_its_status(tgi: Playback, relaying: RouterProcess) -> None:
    """TGI sends 200 first and validates afterwards; the router's client gets the real status."""
    tenant = new_tenant(relaying)
    words = "Input validation error: grammar is not supported"
    native = played_error(STREAMS["grammar"], f'data: {{"error":"{words}","error_type":"validation"}}\n\n')
    status, _, answer = ask(tgi, tenant, native)
    assert (status, json.loads(answer)) == (422, {"error": words, "error_type": "validation"})
    chat = played_error(
        CHAT["stream tools required"],
        f'data: {{"error":{{"message":"{words}","http_status_code":422}}}}\n\ndata: [DONE]\n\n',
    )
    status, _, answer = ask(tgi, tenant, chat)
    assert (status, json.loads(answer)["error"]["message"]) == (400, words)
    assert [event.output_tokens for event in tenant.usage(2)] == [0, 0]


def test_a_stream_that_breaks_off_is_an_error(tgi: Playback, relaying: RouterProcess) -> None:
    tenant = new_tenant(relaying)
    pieces = STREAMS["grammar"]["response"]["body"]
    status, _, answer = ask(tgi, tenant, played_error(STREAMS["grammar"], "".join(p for _, p in pieces[:3])))
    assert status == 200
    found = events(answer)
    assert found[-1]["error_type"] == "generation"
    (event,) = tenant.usage(1)
    assert (event.outcome, event.output_tokens) == ("failed", len(found) - 1)
