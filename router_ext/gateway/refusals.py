"""Errors in the client's dialect: whole answers before the first byte, events afterwards.

``/v1``: ``{"error": {"message", "type", "param", "code"}}``; TGI's own paths: ``{"error", "error_type"}``.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from router_ext.errors import FairlaneError, NoBackend, NotAuthenticated, QueueRefused, RequestRefused, UpstreamFailed
from router_ext.gateway.generation import Dialect
from router_ext.wire.headers import JSON, Headers, retry_headers
from router_ext.wire.tgi import ErrorKind, UpstreamError

DEFAULT_RETRY_AFTER_S = 2.0
"""For refusals without an estimate of their own: every 429 and 503 carries a hint."""

_NATIVE_VALIDATION_TYPES = frozenset({"template_error", "missing_template_variable", "tool_error"})


def error_payload(error: FairlaneError, dialect: Dialect) -> bytes:
    """The JSON of an error."""
    if dialect.is_openai:
        body: dict[str, object] = {
            "message": error.message,
            "type": error.openai_type,
            "param": error.param,
            "code": error.code,
        }
        return orjson.dumps({"error": body})
    return orjson.dumps({"error": error.message, "error_type": error.native_type})


def error_response(
    error: FairlaneError, dialect: Dialect, *, extra: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int, Headers, bytes]:
    """Status, headers (``extra`` behind them) and body of a refusal. ``content-length`` is the server's business."""
    status = error.status_openai if dialect.is_openai else error.status_native
    headers: Headers = [JSON]
    if isinstance(error, NotAuthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    retry_after_s = error.retry_after_s
    if retry_after_s is None and status in (429, 503):
        retry_after_s = DEFAULT_RETRY_AFTER_S
    if not error.may_retry:
        headers.append((b"x-should-retry", b"false"))
    if retry_after_s is not None:
        headers += retry_headers(retry_after_s)
    headers.extend(extra)
    return status, headers, error_payload(error, dialect)


def stream_error(error: FairlaneError, dialect: Dialect) -> bytes:
    """An error inside a stream. The connection is closed behind it: no ``[DONE]``, nothing that looks like an end."""
    return b"data: " + error_payload(error, dialect) + b"\n\n"


def refusal_of(error: UpstreamError) -> FairlaneError:
    """A backend's error as the router's own, for a request that is not tried again.

    Nothing of the backend shows but TGI's words about the request itself.
    """
    if error.kind is ErrorKind.VALIDATION:
        code = "context_length_exceeded" if _is_length(error.message) else "invalid_parameter"
        refusal: FairlaneError = RequestRefused(error.message, code=code)
        if error.error_type in _NATIVE_VALIDATION_TYPES:
            refusal.native_type = error.error_type
        return refusal
    if error.kind is ErrorKind.OVERLOADED:
        return QueueRefused("Model is overloaded", retry_after_s=1.0)
    if error.kind is ErrorKind.GENERATION:
        failed = UpstreamFailed("Request failed during generation: the backend failed")
        failed.is_batch = True
        return failed
    if error.status in (401, 403, 404):
        return NoBackend("No backend could serve the request")
    return UpstreamFailed("Request failed during generation: unexpected answer of the backend")


def _is_length(message: str) -> bool:
    return "tokens. Given:" in message or "`max_new_tokens` must be <=" in message
