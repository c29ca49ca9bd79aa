"""Short questions to a TGI server: who it is, and what a text is in its tokens.

Source: TGI ``main`` db931fcf, ``router/src/server.rs`` (``/info``, ``/tokenize``, ``/chat_tokenize``).
"""

from __future__ import annotations

from router_ext.backends.base import Backend, Reply
from router_ext.errors import UpstreamFailed
from router_ext.wire.tgi import (
    BadUpstreamAnswer,
    ChatTokenized,
    Info,
    TokenizedToken,
    decode_chat_tokenize,
    decode_info,
    decode_tokenize,
    encode_tokenize,
)


def _ok(reply: Reply, what: str) -> bytes:
    if reply.status != 200:
        raise UpstreamFailed(f"The backend answered {reply.status} to {what}")
    return reply.body


def _misunderstood(what: str, error: BadUpstreamAnswer) -> UpstreamFailed:
    return UpstreamFailed(f"The backend's answer to {what} is not understood: {error}")


async def fetch_info(backend: Backend) -> tuple[Info, bytes]:
    """Limits and names, and the answer's own bytes.

    Raises:
        UpstreamFailed: no usable answer.
    """
    body = _ok(await backend.call("GET", "/info"), "/info")
    try:
        return decode_info(body), body
    except BadUpstreamAnswer as error:
        raise _misunderstood("/info", error) from None


async def tokenize(backend: Backend, text: str) -> list[TokenizedToken]:
    """Tokens of ``text``, the ones the tokenizer adds by itself included."""
    body = _ok(await backend.call("POST", "/tokenize", encode_tokenize(text)), "/tokenize")
    try:
        return decode_tokenize(body)
    except BadUpstreamAnswer as error:
        raise _misunderstood("/tokenize", error) from None


async def reads_images(backend: Backend) -> bool:
    """Whether the model takes an image's address in a text for the image: one that cannot be fetched is refused then.

    Raises:
        UpstreamFailed: no usable answer.
    """
    reply = await backend.call("POST", "/tokenize", encode_tokenize("![](-)"))
    if reply.status == 422:
        return True
    _ok(reply, "/tokenize")
    return False


async def chat_tokenize(backend: Backend, body: bytes) -> tuple[ChatTokenized | None, Reply]:
    """Template and tokenise a chat body; None with the reply if the backend refused it."""
    reply = await backend.call("POST", "/chat_tokenize", body)
    if reply.status != 200:
        return None, reply
    try:
        return decode_chat_tokenize(reply.body), reply
    except BadUpstreamAnswer as error:
        raise _misunderstood("/chat_tokenize", error) from None
