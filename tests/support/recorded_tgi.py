"""Compares a server's answer with the recorded TGI's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.exchange import call
from support.modelserver import ModelServer

FOLDER = Path(__file__).parents[1] / "conformance" / "transcripts"
MAY_DIFFER = {"date", "content-length", "connection"}
# Values that no weights change; text/plain bodies and errors are compared whole.
ALWAYS = {"error", "error_type", "object", "index", "role", "http_status_code", "prompt_tokens", "input_length", "id"}
OF_TOKENS = {"text", "generated_text", "content", "token", "special", "finish_reason", "generated_tokens"}
OF_TOKENS |= {"completion_tokens", "total_tokens", "id", "name", "arguments"}

# Limits in force when the exchanges were recorded: of errors.jsonl, and of the others.
NARROW = ("--max-input-tokens", "200", "--max-total-tokens", "300")
WIDE = ("--max-input-tokens", "2048", "--max-total-tokens", "4096")


def exchanges(*files: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(id, exchange) of every recorded exchange that has an answer and a body that was recorded in full."""
    for name in files:
        for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            exchange = json.loads(line)
            raw = exchange["request"].get("raw", "")
            is_whole = not raw.startswith("<") and "repeated to" not in json.dumps(exchange["request"].get("body", ""))
            if "status" in exchange["response"] and is_whole:
                yield f"{name}: {exchange['name']}", exchange


def is_sampled(request: dict[str, Any]) -> bool:
    body = request.get("body") or {}
    if "messages" in body or "prompt" in body:
        return body.get("temperature", 1.0) != 0.0
    parameters = body.get("parameters")
    if parameters is None or "instances" in body:
        return True
    return bool(parameters.get("do_sample") or parameters.get("temperature"))


def replayed(port: int, exchange: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    request = exchange["request"]
    body = None
    if "raw" in request:
        body = request["raw"].encode()
    elif "body" in request:
        body = json.dumps(request["body"], ensure_ascii=False).encode()
    headers = {k: v for k, v in request["headers"].items() if k.lower() not in ("host", "content-length")}
    if body is not None and "Content-Type" not in headers:
        headers["Content-Type"] = ""
    return call(port, request["method"], request["path"], body, headers=headers)


def differences(
    exchange: dict[str, Any], status: int, headers: dict[str, str], body: bytes, *, same_weights: bool
) -> list[str]:
    """Everything in which the answer is not the recorded one, as far as the weights allow to tell."""
    response = exchange["response"]
    recorded_status = int(response["status"].split(" ")[1])
    if status != recorded_status:
        return [f"status {recorded_status} recorded, {status} got: {body[:200]!r}"]
    found: list[str] = []
    recorded = {name.lower(): value for name, value in response["headers"]}
    names = recorded.keys() - MAY_DIFFER ^ headers.keys() - MAY_DIFFER
    if names:
        found.append(f"headers only on one side: {sorted(names)}")
    found.extend(
        f"{name}: {recorded.get(name)!r} recorded, {headers.get(name)!r} got"
        for name in ("content-type", "allow", "x-compute-characters", "x-prompt-tokens", "vary")
        if recorded.get(name) != headers.get(name)
    )
    pieces = [piece for _, piece in response["body"]]
    kind = recorded.get("content-type", "")
    keys = ALWAYS - {"id"}
    has_no_weights = exchange["request"]["path"] in ("/info", "/tokenize", "/chat_tokenize", "/v1/models")
    if has_no_weights or (same_weights and not is_sampled(exchange["request"])):
        keys |= OF_TOKENS
    if kind.startswith("text/event-stream"):
        return found + _stream_differences(pieces, body, keys, ends_alike="generated_tokens" in keys)
    if exchange["request"]["path"] == "/metrics":
        return found + _page_differences("".join(pieces), body.decode())
    if kind.startswith("application/json"):
        _differ(json.loads("".join(pieces)), json.loads(body), "body", keys, found)
    elif "".join(pieces) != body.decode():
        found.append(f"{''.join(pieces)!r} recorded, {body.decode()!r} got")
    return found


def _stream_differences(pieces: list[str], body: bytes, keys: set[str], *, ends_alike: bool) -> list[str]:
    found: list[str] = []
    new = [event + "\n\n" for event in body.decode().split("\n\n") if event]
    old = [event + "\n\n" for event in "".join(pieces).split("\n\n") if event]
    if old != pieces:
        found.append("the recording does not hold one event per chunk")
    if ends_alike and len(old) != len(new):
        found.append(f"{len(old)} events recorded, {len(new)} got")
    pairs = list(zip(old, new, strict=False)) if ends_alike else [(old[0], new[0]), (old[-1], new[-1])]
    if not ends_alike and old[-1] == "data: [DONE]\n\n" and len(old) > 2:
        pairs.append((old[-2], new[-2]))
    compared = keys if ends_alike else keys - {"index"}
    for number, (recorded, got) in enumerate(pairs):
        if recorded == got:
            continue
        if recorded == "data: [DONE]\n\n" or not got.startswith("data: {"):
            found.append(f"event {number}: {recorded!r} recorded, {got!r} got")
            continue
        _differ(json.loads(recorded[6:]), json.loads(got[6:]), f"event {number}", compared, found)
    return found


def _page_differences(old: str, new: str) -> list[str]:
    """A metrics page: every recorded metric with its type and help, unless this server's rules never write it."""
    known = {line for line in new.splitlines() if line.startswith("#")}
    never = "tgi_batch_concat"  # chunked prefill names another reason, and only if requests overlap
    missing = [line for line in old.splitlines() if line.startswith("#") and never not in line and line not in known]
    return [f"not on the page: {line}" for line in missing]


def _differ(old: Any, new: Any, path: str, keys: set[str], found: list[str]) -> None:
    """Shape (keys in order, types) everywhere, values under ``keys``."""
    number = (int, float)
    both_numbers = isinstance(old, number) and isinstance(new, number)
    if type(old) is not type(new) and not (both_numbers and not isinstance(old, bool) and not isinstance(new, bool)):
        found.append(f"{path}: {old!r} recorded, {new!r} got")
    elif isinstance(old, dict):
        if list(old) != list(new):
            found.append(f"{path}: members {list(old)} recorded, {list(new)} got")
        for key in old.keys() & new.keys():
            _differ(old[key], new[key], f"{path}.{key}", keys, found)
    elif isinstance(old, list):
        if len(old) != len(new) and "generated_tokens" in keys:
            found.append(f"{path}: {len(old)} items recorded, {len(new)} got")
        for index, (a, b) in enumerate(zip(old, new, strict=False)):
            _differ(a, b, f"{path}[{index}]", keys, found)
    elif path.rsplit(".", 1)[-1].split("[")[0] in keys and old != new:
        found.append(f"{path}: {old!r} recorded, {new!r} got")


def cases(found: list[tuple[str, dict[str, Any]]]) -> Any:
    return pytest.mark.parametrize("exchange", [e for _, e in found], ids=[name for name, _ in found])


def warm_up(server: ModelServer) -> None:
    """One request, as the recorded server had had before its first metrics page was taken."""
    status, _, _ = call(server.port, "POST", "/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 5}})
    assert status == 200
