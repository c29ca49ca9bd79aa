"""Request bodies of every dialect, decoded and validated in TGI's order with TGI's words.

    body = read_body(path, content_type, raw, max_bytes=2_000_000)   # JSON layer: 413, 415, malformed, not an object
    pool = pools[body.model]
    request = decode_body(body, pool.limits)                         # TGI's form (friendly), shapes, then values
    lengths = fit_lengths(request, prompt_tokens, pool.limits)       # once the prompt is measured

``decode_request`` does the first two at once. Everything is refused by raising ``router_ext.errors``; the answer to
the client is made by ``error_response(error, dialect_of(path))``. For a chat, ``request.chat_body`` goes to
``/chat_tokenize`` and ``bos.chat_prompt`` makes the prompt of its answer.

Source: ``router/src/{lib,validation,chat,server}.rs`` of TGI.
"""

from __future__ import annotations

from router_ext.gateway.bodies import DEFAULT_MAX_BYTES, Body, dialect_of, read_body
from router_ext.gateway.chats import decode_chat, decode_completion
from router_ext.gateway.generation import Dialect, GenerationRequest, ModelLimits
from router_ext.gateway.native import decode_native, decode_tokenize
from router_ext.gateway.refusals import error_payload, error_response, refusal_of, stream_error
from router_ext.gateway.responses import decode_response
from router_ext.gateway.values import Lengths, fit_lengths

__all__ = [
    "Body",
    "Lengths",
    "decode_body",
    "decode_request",
    "decode_tokenize",
    "dialect_of",
    "error_payload",
    "error_response",
    "fit_lengths",
    "read_body",
    "refusal_of",
    "stream_error",
]


def decode_request(
    path: str, content_type: str | None, body: bytes, limits: ModelLimits, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> GenerationRequest:
    """``read_body`` and ``decode_body`` in one call."""
    return decode_body(read_body(path, content_type, body, max_bytes=max_bytes), limits)


def decode_body(body: Body, limits: ModelLimits) -> GenerationRequest:
    """The request a body asks for.

    Raises:
        RequestRefused: anything TGI would refuse before it has counted the prompt's tokens.
    """
    match body.dialect:
        case Dialect.CHAT:
            return decode_chat(body, limits)
        case Dialect.COMPLETIONS:
            return decode_completion(body, limits)
        case Dialect.RESPONSES:
            return decode_response(body, limits)
        case _:
            return decode_native(body, limits)
