"""The recorded answers, byte for byte, out of a whole router whose backend sends one byte at a time.

So every place where a read can end is one.

Generations get the stream of the recorded tokens, whatever is passed through gets the recorded bytes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.recorded_streams import BASICS, CHAT, GENERATE, STREAMS, body_of, upstreams
from support.scripted import Peer, World, running

from router_ext.backends.fake import Ending, Script
from router_ext.gateway.dialects import decode_request
from router_ext.gateway.generation import ModelLimits, PassThrough

LIMITS = ModelLimits(model_id="SmolLM2-135M-Instruct", max_input_tokens=2_048, max_total_tokens=4_096)
NOT_COMPARED = {
    "1024 pieces: max_new_tokens 1100",  # the router gives 1,100
    "no parameters, stops at a short total",  # sampled, without its tokens
    "details false with top_n",  # the same, of another prompt
    "other model name",  # refused before anything is asked
    "metrics, after all of these",
    "info",
}
CASES = [
    (file, name)
    for file, exchanges in (("streams", STREAMS), ("generate", GENERATE), ("chat_and_completions", CHAT))
    for name in exchanges
    if name not in NOT_COMPARED
]


def passed(exchange: dict[str, Any]) -> PassThrough | None:
    request = exchange["request"]
    return decode_request(request["path"], "application/json", json.dumps(request["body"]).encode(), LIMITS).passthrough


class Recorded(World):
    """A backend that sends the recorded answer a byte at a time."""

    def __init__(self, file: str, exchange: dict[str, Any]) -> None:
        super().__init__()
        request = exchange["request"]
        is_passed = passed(exchange) is not None
        self.path = request["path"] if is_passed else "/generate_stream"
        answers = [body_of(exchange)] if is_passed else upstreams(file, exchange)
        if is_passed and request["body"].get("stream") and request["path"].startswith("/v1/"):
            answers = [_with_usage(answers[0])]
        prompts = request["body"].get("prompt")
        self.answers = dict(zip(prompts, answers, strict=True)) if isinstance(prompts, list) else {"": answers[0]}
        self.headers = tuple((k.lower().encode(), v.encode()) for k, v in exchange["response"]["headers"])

    def play(self, path: str, body: bytes) -> Script:
        if path == "/info":
            return Script(pieces=(body_of(BASICS["info"]),))
        if path == "/chat_tokenize":
            return Script(pieces=(body_of(BASICS["chat_tokenize"]),))
        if path == "/tokenize":
            return Script(pieces=(_tokenized(json.loads(body)["inputs"]),))
        if path != self.path:
            return Script()
        inputs = json.loads(body).get("inputs")
        answer = self.answers.get(inputs, self.answers.get("", b""))
        return Script(headers=self.headers, pieces=tuple(answer[i : i + 1] for i in range(len(answer))))


def _tokenized(text: str) -> bytes:
    """What the tokenizer makes of nothing, of the chat's text, and of a prompt whose length the stream will tell."""
    chat = json.loads(body_of(BASICS["chat_tokenize"]))
    if text == chat["templated_text"]:
        return json.dumps(chat["tokenize_response"]).encode()
    return body_of(BASICS["tokenize" if text else "tokenize empty"])


def _with_usage(answer: bytes) -> bytes:
    """The usage chunk that only the router asks for, where the recorded client did not."""
    if b'"choices":[]' in answer:
        return answer
    chunk = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
    return answer.replace(b"data: [DONE]", b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]")


def timeless(body: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', body)


@pytest.mark.parametrize(("file", "name"), CASES, ids=[f"{file}: {name}" for file, name in CASES])
async def test_an_answer_is_the_recorded_one_wherever_its_bytes_are_cut(tmp_path: Path, file: str, name: str) -> None:
    exchange = {"streams": STREAMS, "generate": GENERATE, "chat_and_completions": CHAT}[file][name]
    request = exchange["request"]
    async with running(tmp_path, Recorded(file, exchange)) as world:
        peer = Peer(world, request["path"], request["body"])
        body = timeless((await peer.wait()).rpartition(b"\r\n\r\n")[2])  # a stream writes its own head
    expected = timeless(body_of(exchange))
    if request["path"] == "/v1/completions":
        # Of several prompts each stream, and each choice, is TGI's; how they take turns is not.
        assert sorted(body.split(b"\n\n")) == sorted(expected.split(b"\n\n"))
    else:
        assert body == expected
    if not request["body"].get("stream") and request["path"] != "/generate_stream":
        told = {name.lower(): value for name, value in exchange["response"]["headers"]}
        assert peer.status == 200
        assert (peer.headers["x-prompt-tokens"], peer.headers["x-generated-tokens"]) == (
            told["x-prompt-tokens"],
            told["x-generated-tokens"],
        )


def of_chat(request: dict[str, Any]) -> dict[str, Any]:
    """The same question to ``/v1/responses``."""
    names = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "messages": "input"}
    kept = {names.get(k, k): v for k, v in request.items() if k in ("tool_choice", "temperature", "stream", *names)}
    functions = [tool["function"] for tool in request.get("tools", ())]
    return {**kept, **({"tools": [{"type": "function", **function} for function in functions]} if functions else {})}


CHATS = [  # those that can be asked in both
    name
    for name, exchange in CHAT.items()
    if exchange["request"]["path"] == "/v1/chat/completions"
    and name not in NOT_COMPARED | {"tool call message", "content parts", "presence_penalty 0"}
    and "response_format" not in name
    and "stop" not in exchange["request"]["body"]
]


@pytest.mark.parametrize("name", CHATS)
async def test_a_response_says_what_the_chat_said(tmp_path: Path, name: str) -> None:
    exchange = CHAT[name]
    world = Recorded("chat_and_completions", exchange)
    async with running(tmp_path, world):
        peer = Peer(world, "/v1/responses", of_chat(exchange["request"]["body"]))
        body = (await peer.wait()).rpartition(b"\r\n\r\n")[2]
    if exchange["request"]["body"].get("stream"):
        found = [json.loads(part.partition("data: ")[2]) for part in body.decode().split("\n\n")[:-1]]
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        response = found[-1]["response"]
        deltas = "".join(event["delta"] for event in found if event["type"].endswith(".delta"))
        (item,) = response["output"]
        assert deltas == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    else:
        response = json.loads(body)
        (item,) = response["output"]
    text, reason, usage = said(exchange)
    assert (item["arguments"] if "arguments" in item else item["content"][0]["text"]) == text
    assert response["status"] == ("incomplete" if reason == "length" else "completed")
    if usage is not None:
        assert response["usage"]["input_tokens"] == usage["prompt_tokens"]
        assert response["usage"]["output_tokens"] == usage["completion_tokens"]


class Breaking(Recorded):
    """Every stream breaks off behind its third event."""

    def play(self, path: str, body: bytes) -> Script:
        script = super().play(path, body)
        if path != self.path:
            return script
        events = b"".join(script.pieces).split(b"\n\n")[:3]
        return Script(pieces=(b"\n\n".join(events) + b"\n\n",), ending=Ending.CUT)


@pytest.mark.parametrize("name", ["stream", "stream tools required"])
async def test_a_response_that_fails_says_so_in_the_stream(tmp_path: Path, name: str) -> None:
    world = Breaking("chat_and_completions", CHAT[name])
    async with running(tmp_path, world):
        peer = Peer(world, "/v1/responses", of_chat(CHAT[name]["request"]["body"]))
        body = (await peer.wait()).rpartition(b"\r\n\r\n")[2]
    *_, failed, error = [json.loads(part.partition("data: ")[2]) for part in body.decode().split("\n\n")[:-1]]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert (error["type"], error["error"]["code"]) == ("error", "upstream_error")
    assert error["sequence_number"] == failed["sequence_number"] + 1


async def test_a_response_that_fails_before_its_first_byte_has_its_status(tmp_path: Path) -> None:
    world = Breaking("chat_and_completions", CHAT["plain"])
    async with running(tmp_path, world):
        peer = Peer(world, "/v1/responses", of_chat(CHAT["plain"]["request"]["body"]))
        body = await peer.wait()
    assert (peer.status, json.loads(body)["error"]["code"]) == (502, "upstream_error")


def said(exchange: dict[str, Any]) -> tuple[str, str, Any]:
    """Text, or arguments of the call; end; usage, where it was told."""
    body = body_of(exchange).decode()
    if not exchange["request"]["body"].get("stream"):
        data = json.loads(body)
        message = data["choices"][0]["message"]
        calls = message.get("tool_calls")
        text = calls[0]["function"]["arguments"] if calls else message["content"]
        return text, data["choices"][0]["finish_reason"], data["usage"]
    chunks = [json.loads(part[6:]) for part in body.split("\n\n") if part.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    pieces = [
        c["delta"]["tool_calls"][0]["function"]["arguments"] if "tool_calls" in c["delta"] else c["delta"]["content"]
        for c in choices
    ]
    usage = next((chunk["usage"] for chunk in chunks if chunk["usage"]), None)
    return "".join(pieces), choices[-1]["finish_reason"], usage
