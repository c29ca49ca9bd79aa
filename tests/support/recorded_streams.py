"""``/generate_stream`` of the tokens of any recorded answer, which is what a router asks of the backend.

The recordings hold one dialect each. Where the stream of the same tokens is not among them it is rebuilt from the
answer: its words, counts and end are known, the places where one token ends and the next begins are not always.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from support.playback import recorded

from router_ext.wire.sse import SseParser

STREAMS, GENERATE, CHAT, BASICS = map(recorded, ("streams", "generate", "chat_and_completions", "basics"))

SAME_TOKENS = {  # (file, name) of a recorded answer to the name of the stream of the same tokens, with details
    **{
        ("streams", name): stream
        for name, stream in {
            "details": "details",
            "no details": "details",
            "return_full_text": "details",
            "root, stream true": "details",
            "top_n_tokens": "top_n_tokens",
            "ends by EOS": "ends by EOS",
            "ends by stop": "ends by stop",
            "multi-byte characters": "multi-byte characters",
            "ends inside a character": "ends inside a character",
            "ends inside a character, non-stream": "ends inside a character",
            "sampling reports its seed": "sampling reports its seed",
            "one token": "one token",
        }.items()
    },
    **{
        ("generate", name): stream
        for name, stream in {
            "minimal": "details",
            "details": "details",
            "return_full_text": "details",
            "root, stream false": "details",
            "root, stream false, return_full_text null": "details",
            "null-heavy body as the client library sends it": "details",
            "unknown fields ignored": "details",
            "unknown adapter is served": "details",
            "stop kept in the text": "ends by stop",
            "chat prompt ends by EOS": "ends by EOS",
            "emoji, whole": "multi-byte characters",
        }.items()
    },
}

_WORDS = {"stop": "eos_token"}
"""OpenAI's word for an end to TGI's."""


def body_of(exchange: dict[str, Any]) -> bytes:
    return "".join(piece for _, piece in exchange["response"]["body"]).encode()


def token(text: str, *, special: bool = False, logprob: float = -0.5) -> dict[str, Any]:
    return {"id": 7, "text": text, "logprob": logprob, "special": special}


def sse(payloads: Iterable[bytes]) -> bytes:
    return b"".join(b"data: " + payload + b"\n\n" for payload in payloads)


def as_stream(
    tokens: list[dict[str, Any]],
    *,
    text: str,
    reason: str,
    prompt_tokens: int,
    seed: int | None = None,
    top_tokens: list[Any] | None = None,
) -> bytes:
    """``/generate_stream`` with details for these tokens, in TGI's form."""
    payloads = []
    for index, each in enumerate(tokens, 1):
        event: dict[str, Any] = {"index": index, "token": each}
        if top_tokens is not None:
            event["top_tokens"] = top_tokens[index - 1]
        event |= {"generated_text": None, "details": None}
        if index == len(tokens):
            event["generated_text"] = text
            event["details"] = {
                "finish_reason": reason,
                "generated_tokens": len(tokens),
                "seed": seed,
                "input_length": prompt_tokens,
            }
        payloads.append(json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())
    return sse(payloads)


def upstreams(file: str, exchange: dict[str, Any]) -> list[bytes]:
    """A stream for each prompt of a recorded answer that is not passed through."""
    known = SAME_TOKENS.get((file, exchange["name"]))
    if known is not None:
        return [body_of(STREAMS[known])]
    if exchange["request"]["path"] in ("/generate", "/"):
        return [_of_details(exchange)]
    answer = body_of(exchange)
    if not exchange["request"]["body"].get("stream"):
        data = json.loads(answer)
        return _of_completion(data) if data["object"] == "text_completion" else [_of_chat(data)]
    chunks = [json.loads(payload) for payload in SseParser().feed(answer) if payload != b"[DONE]"]
    return _of_completion_chunks(chunks) if chunks[0]["object"] == "text_completion" else [_of_chat_chunks(chunks)]


def _of_details(exchange: dict[str, Any]) -> bytes:
    data = json.loads(body_of(exchange))
    details = data["details"]
    return as_stream(
        details["tokens"],
        text=data["generated_text"],
        reason=details["finish_reason"],
        prompt_tokens=int(dict(exchange["response"]["headers"])["x-prompt-tokens"]),
        seed=details["seed"],
        top_tokens=details.get("top_tokens"),
    )


def _spread(text: str, count: int, reason: str) -> list[dict[str, Any]]:
    """``count`` tokens that make up ``text``; the last is the end of text where there was one."""
    ends = [token("<|im_end|>", special=True)] if reason == "eos_token" else []
    pieces = count - len(ends)
    size = len(text) // pieces
    parts = [text[i * size : (i + 1) * size] for i in range(pieces - 1)]
    return [*map(token, [*parts, text[(pieces - 1) * size :]]), *ends]


def _top(items: list[Any]) -> list[Any]:
    return [[token(t["token"], logprob=t["logprob"]) for t in item["top_logprobs"]] for item in items]


def _of_chat(data: dict[str, Any]) -> bytes:
    choice, usage = data["choices"][0], data["usage"]
    reason = _WORDS.get(choice["finish_reason"], choice["finish_reason"])
    text, top = choice["message"]["content"], None
    if choice["logprobs"] is None:
        tokens = _spread(text, usage["completion_tokens"], reason)
    else:
        items = choice["logprobs"]["content"]
        tokens = [token(item["token"], logprob=item["logprob"]) for item in items]
        top = _top(items)
    return as_stream(tokens, text=text, reason=reason, prompt_tokens=usage["prompt_tokens"], top_tokens=top)


def _of_chat_chunks(chunks: list[Any]) -> bytes:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    last = choices[-1]["finish_reason"]
    tokens, top = [], []
    for choice in choices:
        item = (choice["logprobs"] or {"content": [{"logprob": -0.5, "top_logprobs": []}]})["content"][0]
        text = choice["delta"]["content"]
        tokens.append(token(text or "<|im_end|>", special=not text, logprob=item["logprob"]))
        top += _top([item])
    usage = next((chunk["usage"] for chunk in chunks if chunk["usage"]), {"prompt_tokens": 34})
    return as_stream(
        tokens,
        text="".join(t["text"] for t in tokens if not t["special"]),
        reason=_WORDS.get(last, last),
        prompt_tokens=usage["prompt_tokens"],
        top_tokens=top if any(top) else None,
    )


def _of_completion(data: dict[str, Any]) -> list[bytes]:
    count = data["usage"]["completion_tokens"] // len(data["choices"])
    prompts = {1: [data["usage"]["prompt_tokens"]], 2: [5, 3]}[len(data["choices"])]
    found = []
    for choice, prompt_tokens in zip(sorted(data["choices"], key=lambda c: c["index"]), prompts, strict=True):
        reason = _WORDS.get(choice["finish_reason"], choice["finish_reason"])
        tokens = _spread(choice["text"], count, reason)
        found.append(as_stream(tokens, text=choice["text"], reason=reason, prompt_tokens=prompt_tokens))
    return found


def _of_completion_chunks(chunks: list[Any]) -> list[bytes]:
    found = []
    for index in sorted({chunk["choices"][0]["index"] for chunk in chunks}):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        texts = [chunk["choices"][0]["text"] for chunk in mine]
        tokens = [token(text, special=text.startswith("<|")) for text in texts]
        reason, usage = mine[-1]["choices"][0]["finish_reason"], mine[-1]["usage"]
        text = "".join(t["text"] for t in tokens if not t["special"])
        found.append(as_stream(tokens, text=text, reason=reason, prompt_tokens=usage["prompt_tokens"]))
    return found
