"""HTTP headers that TGI's clients read, and the ones the router adds.

Headers are ``list[tuple[bytes, bytes]]`` with lower-case names, as ASGI wants them.
"""

from __future__ import annotations

import math

import msgspec

Headers = list[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
EVENT_STREAM = (b"content-type", b"text/event-stream")

MAX_RETRY_AFTER_S = 120
"""SDKs ignore a larger hint and fall back to their own backoff."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one answer went, in seconds. ``queue_s`` includes the router's own queue."""

    total_s: float
    validation_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0


def stream_headers(compute_type: str, compute_characters: int) -> Headers:
    """Head of a stream, in TGI's order."""
    return [
        EVENT_STREAM,
        (b"cache-control", b"no-cache"),
        (b"x-compute-type", _value(compute_type)),
        (b"x-compute-characters", b"%d" % compute_characters),
        (b"x-accel-buffering", b"no"),
    ]


def body_headers(
    compute_type: str,
    compute_characters: int,
    timings: Timings,
    prompt_tokens: int,
    generated_tokens: int,
    *,
    has_compute_time: bool = True,
) -> Headers:
    """Head of a whole answer, in TGI's order; times are whole milliseconds but ``x-compute-time`` (seconds), which
    whole completions do not have."""
    per_token_s = timings.inference_s / max(generated_tokens, 1)
    compute_time = [(b"x-compute-time", b"%.9f" % timings.total_s)] if has_compute_time else []
    return [
        JSON,
        (b"x-compute-type", _value(compute_type)),
        *compute_time,
        (b"x-compute-characters", b"%d" % compute_characters),
        (b"x-total-time", _ms(timings.total_s)),
        (b"x-validation-time", _ms(timings.validation_s)),
        (b"x-queue-time", _ms(timings.queue_s)),
        (b"x-inference-time", _ms(timings.inference_s)),
        (b"x-time-per-token", _ms(per_token_s)),
        (b"x-prompt-tokens", b"%d" % prompt_tokens),
        (b"x-generated-tokens", b"%d" % generated_tokens),
    ]


def retry_headers(retry_after_s: float) -> Headers:
    """``Retry-After`` in whole seconds (1 to 120: never 0, never more than SDKs follow) and its exact twin in ms."""
    seconds = min(max(math.ceil(retry_after_s), 1), MAX_RETRY_AFTER_S)
    milliseconds = min(max(round(retry_after_s * 1000), 1), MAX_RETRY_AFTER_S * 1000)
    return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % milliseconds)]


def reset_text(seconds: float) -> str:
    """A duration as rate-limit headers have it (Go's form): ``120ms``, ``1s``, ``6m0s``, ``5h0m0s``. Rounded up."""
    if seconds < 1.0:
        milliseconds = max(math.ceil(seconds * 1_000), 0)
        return f"{milliseconds}ms" if 0 < milliseconds < 1_000 else f"{milliseconds // 1_000}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _ms(seconds: float) -> bytes:
    return b"%d" % max(int(seconds * 1000), 0)


def _value(text: str) -> bytes:
    """Header-safe bytes: what a backend told is not trusted to be printable."""
    return "".join(c for c in text if " " <= c <= "~").encode("ascii")
