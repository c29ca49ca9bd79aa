"""Where the router's answers differ from the recorded TGI's, and the file that says which of it is meant.

``tests/conformance/router_differences.toml``: each exchange that differs, with every difference and the reason; the
table in ``docs/compatibility.md`` is made of it (``support.documented``).
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from support.exchange import call
from support.recorded_tgi import differences

FILE = Path(__file__).parents[1] / "conformance" / "router_differences.toml"

OWN_HEADERS = {
    "x-request-id",
    "x-fairlane-queue-time",
    "x-fairlane-overhead",
    "x-fairlane-attempts",
    "x-fairlane-tier",
    "retry-after",
    "retry-after-ms",
}
"""More than TGI sends, which every HTTP client passes over."""

_SYNTAX = "Failed to parse the request body as JSON: "

CORS = {"vary", "access-control-allow-origin"}
"""On every answer of TGI. The router serves programs that hold a key, not pages of a browser."""


def listed() -> dict[str, Any]:
    """``{"reasons": {id: {"tgi", "router"}}, "exchanges": {name: {"differs": [...], "reason": id}}}``."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def routed(port: int, exchange: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Send a recorded request as it was, with a key."""
    request = exchange["request"]
    body = None
    if "raw" in request:
        body = request["raw"].encode()
    elif "body" in request:
        body = json.dumps(request["body"], ensure_ascii=False).encode()
    sent = {k: v for k, v in request["headers"].items() if k.lower() not in ("host", "content-length")}
    if body is not None and "Content-Type" not in sent:
        sent["Content-Type"] = ""
    return call(port, request["method"], request["path"], body, headers={**sent, **headers})


def router_differences(exchange: dict[str, Any], status: int, headers: dict[str, str], body: bytes) -> list[str]:
    """Everything in which the router's answer is not the recorded one, in words that no run changes."""
    response = exchange["response"]
    recorded_status = int(response["status"].split(" ")[1])
    recorded = "".join(piece for _, piece in response["body"])
    found = [] if status == recorded_status else [f"status {recorded_status}, router {status}"]
    shapes = (
        _shape(dict(response["headers"]).get("content-type", ""), recorded),
        _shape(headers.get("content-type", ""), body.decode()),
    )
    if shapes[0] != shapes[1]:
        found.append(f"{shapes[0]}, router {shapes[1]}")
    told, said = _message(recorded), _message(body.decode())
    if told is not None and said is not None and told.startswith(_SYNTAX) and said.startswith(_SYNTAX):
        found.append("another JSON reader's words")
    elif told is not None and said is not None and not said.startswith(told):
        found.append(f"message {told!r}, router {said!r}")
    if found or "error" in shapes[0]:
        return found
    if exchange["request"]["path"] == "/metrics":
        return [] if "tgi_request_count" in body.decode() else ["other metrics"]
    plain = {name: value for name, value in headers.items() if name not in OWN_HEADERS}
    kept = [pair for pair in response["headers"] if pair[0].lower() not in CORS]
    compared = {**exchange, "response": {**response, "headers": kept, "body": list(response["body"])}}
    if exchange["request"]["path"] == "/v1/completions":
        # Prompts of one request are served side by side: whichever ends first comes first.
        if shapes[0] == "JSON":
            data = json.loads(recorded)
            data["choices"].sort(key=lambda choice: choice["index"])
            compared["response"]["body"] = [[0, json.dumps(data)]]
        else:
            compared["response"]["body"].sort(key=lambda piece: _prompt_of(piece[1]))
            body = "\n\n".join(sorted(body.decode().split("\n\n"), key=_prompt_of)).encode()
    return [
        re.sub(r"^(event) \d+", r"\1", line) for line in differences(compared, status, plain, body, same_weights=False)
    ]


def _prompt_of(event: str) -> float:
    """Index of the prompt that an event of a stream belongs to; infinity for what ends the stream."""
    if not event.startswith("data: {"):
        return math.inf
    return next((float(choice["index"]) for choice in json.loads(event[6:]).get("choices", [])), math.inf)


def _shape(kind: str, body: str) -> str:
    """What a client sees before it reads a word."""
    kind = kind.split(";")[0]
    if not body:
        return "no body"
    if kind == "text/event-stream":
        first = body.split("\n\n")[0].removeprefix("data: ")
        data = json.loads(first) if first.startswith("{") else {}
        return "a stream" if "error" not in data else "an error event"
    if kind == "application/json":
        data = json.loads(body)
        error = data.get("error") if isinstance(data, dict) else None
        return "JSON" if error is None else "OpenAI's error" if isinstance(error, dict) else "TGI's error"
    return "an error as text" if kind == "text/plain" and body.startswith("Failed") else kind


def _message(body: str) -> str | None:
    """The words of a refusal, without the position in the text."""
    first = body.split("\n\n")[0].removeprefix("data: ")
    if first.startswith("{"):
        data = json.loads(first)
        error = data.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        return message if isinstance(message, str) else None
    return re.sub(r" at line \d+ column \d+$", "", body) if body.startswith(("Failed", "Expected")) else None
