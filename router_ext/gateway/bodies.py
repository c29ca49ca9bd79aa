"""The JSON layer: a request's bytes become an object that names its dialect, or are refused unread.

Source: axum's ``Json`` extractor as TGI uses it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from router_ext.errors import BodyTooLarge, RequestRefused, UnsupportedMediaType
from router_ext.gateway.generation import Dialect
from router_ext.gateway.shapes import describe, refuse_shape

DEFAULT_MAX_BYTES = 2_000_000
"""TGI's ``--payload-limit``."""

MAX_DEPTH = 127
"""Nesting of objects and lists. TGI's JSON reader takes no more either, and whoever writes the body on may not."""

_DIALECTS = {
    "/": Dialect.COMPAT,
    "/generate": Dialect.GENERATE,
    "/generate_stream": Dialect.GENERATE_STREAM,
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/completions": Dialect.COMPLETIONS,
    "/v1/responses": Dialect.RESPONSES,
}

SAGEMAKER_PATH = "/invocations"
"""Any of three bodies, told apart by what they must have."""

_SAGEMAKER = {"inputs": "/", "messages": "/v1/chat/completions", "prompt": "/v1/completions"}


class Body(msgspec.Struct, frozen=True):
    """A body that is a JSON object.

    Attributes:
        path: whose body it is. model: what the client names, before any type check of its own.
    """

    dialect: Dialect
    path: str
    data: dict[str, Any]

    @property
    def model(self) -> str | None:
        """Only OpenAI's bodies name a model."""
        model = self.data.get("model") if self.dialect.is_openai else None
        return model if isinstance(model, str) else None


def dialect_of(path: str) -> Dialect:
    """Dialect of a path, for errors too: every unknown path under ``/v1/`` speaks OpenAI's."""
    known = _DIALECTS.get(path)
    if known is not None:
        return known
    return Dialect.CHAT if path.startswith("/v1/") else Dialect.GENERATE


def read_body(path: str, content_type: str | None, body: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Body:
    """Size, content type, JSON, an object.

    Raises:
        BodyTooLarge, UnsupportedMediaType, RequestRefused.
    """
    if len(body) > max_bytes:
        raise BodyTooLarge(f"Failed to buffer the request body: length limit exceeded ({max_bytes} bytes)")
    if not _is_json_type(content_type):
        raise UnsupportedMediaType("Expected request with `Content-Type: application/json`")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"Failed to parse the request body as JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        refuse_shape(f"invalid type: {describe(data)}, expected struct GenerateRequest")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and _is_deeper(data, MAX_DEPTH):
        raise RequestRefused("Failed to parse the request body as JSON: recursion limit exceeded", code="invalid_json")
    if path == SAGEMAKER_PATH:
        path = next((path for field, path in _SAGEMAKER.items() if field in data), path)
        if path == SAGEMAKER_PATH:
            refuse_shape("data did not match any variant of untagged enum SagemakerRequest")
    return Body(dialect_of(path), path, data)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether containers are nested more than ``levels`` deep; level by level, so that nothing recurses."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return False
    return True


def _is_json_type(content_type: str | None) -> bool:
    """``application/json`` or ``application/*+json``, parameters ignored."""
    kind = (content_type or "").split(";", 1)[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
