"""What every endpoint needs: its body, the server's name, and the headers of answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router_ext.devserver import serde
from router_ext.devserver.http import Exchange, Headers
from router_ext.devserver.sinks import Collected

VERSION = "3.3.6-dev0"
JSON: Headers = [("content-type", "application/json")]
TEXT: Headers = [("content-type", "text/plain; charset=utf-8")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the server says about itself."""

    model_id: str
    compute_type: str = "cpu"
    api_key: str | None = None
    is_controllable: bool = False
    cors_origins: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        return f"{VERSION}-native"


class BodyRefused(Exception):
    """A body refused before it is read as JSON; answered as plain text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def read_body(exchange: Exchange, schema: serde.Schema) -> Any:
    """The body as ``schema`` reads it; content type, size and JSON are refused in axum's order.

    Raises:
        BodyError: not JSON, or of the wrong shape.
        BodyRefused: the wrong content type, or too large.
    """
    kind = exchange.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise BodyRefused(415, "Expected request with `Content-Type: application/json`")
    if exchange.is_too_large:
        raise BodyRefused(413, "Failed to buffer the request body: length limit exceeded")
    return serde.parse(schema, bytes(exchange.body))


def start_stream(exchange: Exchange, identity: Identity, characters: int) -> None:
    exchange.start_stream(
        [
            ("content-type", "text/event-stream"),
            ("cache-control", "no-cache"),
            ("x-compute-type", identity.compute_type),
            ("x-compute-characters", str(characters)),
            ("x-accel-buffering", "no"),
        ]
    )


def timing_headers(
    exchange: Exchange, identity: Identity, found: list[Collected], characters: int, *, has_compute_time: bool
) -> Headers:
    """What a finished non-streaming answer says of its work; the longest and the sums of several prompts."""
    timings = [f.generation.timing for f in found]
    total = max(t.ended for t in timings) - exchange.arrived
    inference = sum(t.ended - t.batched for t in timings)
    tokens = sum(f.ending.generated_tokens for f in found)
    prompt = sum(f.generation.input_length for f in found)
    compute = [("x-compute-time", repr(round(total, 9)))] if has_compute_time else []
    milliseconds = {
        "x-total-time": total,
        "x-validation-time": sum(t.validated - t.arrived for t in timings),
        "x-queue-time": sum(t.batched - t.validated for t in timings),
        "x-inference-time": inference,
        "x-time-per-token": inference / tokens,
    }
    return [
        ("x-compute-type", identity.compute_type),
        *compute,
        ("x-compute-characters", str(characters)),
        *((name, str(int(seconds * 1000))) for name, seconds in milliseconds.items()),
        ("x-prompt-tokens", str(prompt)),
        ("x-generated-tokens", str(tokens)),
    ]
