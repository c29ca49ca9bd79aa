"""Sizes of a request before it is queued: its prompts as text, and their tokens as the backend will count them.

A pool with a tokenizer file is measured here, long prompts in a worker thread; otherwise a backend's ``/tokenize``
counts, at most one large text at a time, tenants in turn (TGI has two tokenizer threads for everybody). Chats are
templated by the backend alone, which counts them in the same call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import orjson

from router_ext.backends.probe import chat_tokenize, tokenize
from router_ext.core.ids import TenantId
from router_ext.gateway.bos import chat_prompt
from router_ext.gateway.chats import pass_chat
from router_ext.gateway.cuts import TextTokenizer
from router_ext.gateway.dialects import Lengths, fit_lengths
from router_ext.gateway.generation import GenerationRequest, ModelLimits, PassThrough, ResumeClass
from router_ext.gateway.passthrough import estimate
from router_ext.gateway.prefix import prefix_chain
from router_ext.gateway.refusals import refusal_of
from router_ext.wire.tgi import decode_error

if TYPE_CHECKING:
    from router_ext.gateway.engine import PoolEngine

INLINE_CHARACTERS = 4_000
"""Shorter texts are tokenised on the loop: some 0.2 ms at most, less than a thread's detour costs everybody."""

LARGE_BYTES = 100_000
"""From here on a text is large for a backend's tokenizer threads."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request: its text as sent upstream, its sizes, its start as a chain (``gateway.prefix``)."""

    text: str
    lengths: Lengths
    prefix: tuple[int, ...]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A request ready to be queued. ``passthrough``: it goes whole to that endpoint instead."""

    prompts: tuple[Prompt, ...]
    characters: int
    resume_class: ResumeClass
    passthrough: PassThrough | None


async def measure(engine: PoolEngine, tenant: TenantId, request: GenerationRequest, limits: ModelLimits) -> Measured:
    """Template, count, and check against the largest backend.

    Raises:
        RequestRefused: too long for any backend (with both numbers and the limit), or refused by the chat template.
        UpstreamFailed, NoBackend: nobody could count. QueueRefused: too many wait for it already.
    """
    if request.chat_body is None:
        return Measured(
            prompts=tuple(
                [
                    _prompt(tenant, request, text, await token_ids(engine, tenant, text), limits)
                    for text in request.prompts
                ]
            ),
            characters=sum(map(len, request.prompts)),
            resume_class=ResumeClass.EXACT,
            passthrough=request.passthrough,
        )
    return await _measure_chat(engine, tenant, request, limits)


def _prompt(tenant: TenantId, request: GenerationRequest, text: str, ids: Sequence[int], limits: ModelLimits) -> Prompt:
    lengths = fit_lengths(request, len(ids), limits)
    # What ``truncate`` leaves is the end of the prompt.
    return Prompt(text, lengths, prefix_chain(tenant, ids[len(ids) - lengths.prompt_tokens :]))


async def token_ids(engine: PoolEngine, tenant: TenantId, text: str) -> Sequence[int]:
    """Tokens of a prompt as TGI counts them."""
    tokenizer = engine.model.tokenizer
    if tokenizer is not None:
        if len(text) <= INLINE_CHARACTERS:
            return tokenizer.encode(text)
        return await asyncio.get_running_loop().run_in_executor(engine.model.executor, tokenizer.encode, text)
    if len(text) * 4 <= LARGE_BYTES:
        _, tokens = await engine.model.ask(lambda client: tokenize(client, text), tenant=tenant)
    else:
        async with engine.model.large_text(tenant, is_large=True):
            _, tokens = await engine.model.ask(lambda client: tokenize(client, text), tenant=tenant, takes_long=True)
    return [token.id for token in tokens]


def answer_tokens(tokenizer: TextTokenizer | None, text: str) -> tuple[int, str]:
    """Tokens of an answer that does not tell them, as ``passthrough.Count``: counted, or, where there is no tokenizer
    or the text is too long for the loop, estimated; the rest of a long one goes by the rate of its start."""
    start = text[:INLINE_CHARACTERS]
    if tokenizer is None or not start:
        return estimate(text)
    # What the tokenizer adds to a prompt by itself is no part of an answer.
    tokens = max(len(tokenizer.encode(start)) - len(tokenizer.encode("")), 1)
    if len(start) == len(text):
        return tokens, "counted"
    return round(tokens * len(text) / len(start)), "estimated"


async def _measure_chat(
    engine: PoolEngine, tenant: TenantId, request: GenerationRequest, limits: ModelLimits
) -> Measured:
    assert request.chat_body is not None
    # The client's own body: tools and everything else that the template may look at are in it.
    question = _chat_question(request)
    is_large = len(question) > LARGE_BYTES
    async with engine.model.large_text(tenant, is_large=is_large):
        member, (chat, reply) = await engine.model.ask(
            lambda client: chat_tokenize(client, question), tenant=tenant, takes_long=is_large
        )
    if chat is None:
        problem = decode_error(reply.status, reply.body)
        raise refusal_of(problem)
    passthrough = request.passthrough
    knowledge = member.knowledge
    if knowledge is None or knowledge.bos is None:
        passthrough = passthrough or pass_chat(request, "template")
        text, resume_class = chat.templated_text, ResumeClass.NEVER
    else:
        prompt = chat_prompt(knowledge.bos, chat)
        text, resume_class = prompt.text or "", prompt.resume_class
        if prompt.text is None:
            passthrough = passthrough or pass_chat(request, "bos")
    ids = [token.id for token in chat.tokenize_response]
    return Measured(
        prompts=(_prompt(tenant, request, text, ids, limits),),
        characters=len(chat.templated_text),
        resume_class=resume_class,
        passthrough=passthrough,
    )


def _chat_question(request: GenerationRequest) -> bytes:
    if request.passthrough is not None:
        return request.passthrough.body
    return orjson.dumps(request.chat_body)
