"""What a TGI server tells about itself and its model, asked once each time it comes up.

``/info`` gives limits. Whether a chat can be served as text (templated once, then sent to ``/generate_stream`` and
resumed) depends on the tokenizer: it adds BOS by itself to plain text, and most chat templates spell it too.

Source: TGI ``main`` db931fcf, ``router/src/server.rs`` (``/info``, ``/tokenize``, ``/chat_tokenize``).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from router_ext.backends.base import Backend, Reply
from router_ext.errors import UpstreamFailed
from router_ext.wire.tgi import (
    BadUpstreamAnswer,
    ChatTokenized,
    Info,
    decode_chat_tokenize,
    decode_info,
    decode_tokenize,
    encode_tokenize,
)


class ChatMode(enum.StrEnum):
    """How chats reach this model."""

    AS_TEXT = "as_text"
    """Templated by ``/chat_tokenize`` and sent as text: sliced and resumed like any other request."""

    WHOLE = "whole"
    """The text form would not tokenise to the chat's own ids: chats go whole to TGI's chat endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKnowledge:
    """What the probe found.

    Attributes:
        bos_text: spelling of the BOS that the tokenizer adds by itself, to be cut from the front of a templated
            chat; None if it adds none.
        is_resumable: text can be continued (a tokenizer that appends EOS cannot).
    """

    chat_mode: ChatMode
    bos_text: str | None
    is_resumable: bool
    reason: str = ""


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


async def tokenize(backend: Backend, text: str) -> list[int]:
    """Token ids of ``text``, the ones the tokenizer adds by itself included."""
    body = _ok(await backend.call("POST", "/tokenize", encode_tokenize(text)), "/tokenize")
    try:
        return [token.id for token in decode_tokenize(body)]
    except BadUpstreamAnswer as error:
        raise _misunderstood("/tokenize", error) from None


async def chat_tokenize(backend: Backend, body: bytes) -> tuple[ChatTokenized | None, Reply]:
    """Template and tokenise a chat body; None with the reply if the backend refused it."""
    reply = await backend.call("POST", "/chat_tokenize", body)
    if reply.status != 200:
        return None, reply
    try:
        return decode_chat_tokenize(reply.body), reply
    except BadUpstreamAnswer as error:
        raise _misunderstood("/chat_tokenize", error) from None


_PROBE = b'{"messages":[{"role":"user","content":"Name three rivers."}]}'


async def probe_model(backend: Backend) -> ModelKnowledge:
    """Find out how text and chats of this model can be continued.

    Raises:
        UpstreamFailed: the backend did not answer; nothing is known.
    """
    added = await tokenize(backend, "")
    if len(added) > 1:
        return ModelKnowledge(
            chat_mode=ChatMode.WHOLE, bos_text=None, is_resumable=False, reason="the tokenizer appends a token"
        )
    chat, reply = await chat_tokenize(backend, _PROBE)
    if chat is None:
        # No chat template: the chat endpoint's own refusal is the right answer to every chat.
        return ModelKnowledge(
            chat_mode=ChatMode.WHOLE,
            bos_text=None,
            is_resumable=True,
            reason=f"/chat_tokenize answered {reply.status}",
        )
    ids = [piece.id for piece in chat.tokenize_response]
    bos_text: str | None = None
    if added:
        if ids[:1] != added:
            return ModelKnowledge(
                chat_mode=ChatMode.WHOLE,
                bos_text=None,
                is_resumable=True,
                reason="the tokenizer adds BOS and the chat template does not",
            )
        bos_text = chat.tokenize_response[0].text
    stripped = chat.templated_text.removeprefix(bos_text) if bos_text else chat.templated_text
    if await tokenize(backend, stripped) != ids:
        return ModelKnowledge(
            chat_mode=ChatMode.WHOLE,
            bos_text=None,
            is_resumable=True,
            reason="the templated text does not tokenise to the chat's own ids",
        )
    return ModelKnowledge(chat_mode=ChatMode.AS_TEXT, bos_text=bos_text, is_resumable=True)
