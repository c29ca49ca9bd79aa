"""Chats through ``/generate_stream``: the beginning-of-text token must be there exactly once.

A chat template usually prints BOS itself and TGI tokenises it without adding anything; ``/generate_stream`` adds BOS
if the tokenizer does. So the literal BOS is taken off the templated text if, and only if, the tokenizer adds it.

    rule = probe(await tokenize(""), await chat_tokenize(PROBE_CHAT))     # once per backend version
    check = rule.check_text(chat_answer)              # ids of /tokenize(check) must equal those of the chat
    rule = rule.verified(chat_answer, await tokenize(check))
    prompt = chat_prompt(rule, decode_chat_tokenize(answer))              # per request

Source: seen on a running TGI whose tokenizer adds BOS (``tests/conformance/transcripts/bos.jsonl``).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router_ext.gateway.generation import ResumeClass
from router_ext.wire.tgi import ChatTokenized, TokenizedToken

PROBE_CHAT = b'{"messages":[{"role":"user","content":"Hi"}]}'
"""Body for ``/chat_tokenize`` that any template takes."""


class BosKind(enum.StrEnum):
    """What has to be done to a templated text before ``/generate_stream`` sees it."""

    NONE = "none"
    """The tokenizer adds nothing: the text as it is."""
    STRIP = "strip"
    """The tokenizer adds BOS and the template prints it: take one off."""
    MISMATCH = "mismatch"
    """What the tokenizer adds is not what the template prints: only the chat endpoint makes the right prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BosRule:
    """How the chats of one backend become prompts. ``bos_id`` and ``bos_text`` are set for STRIP."""

    kind: BosKind
    bos_id: int | None = None
    bos_text: str = ""
    is_verified: bool = False

    def check_text(self, probe_answer: ChatTokenized) -> str:
        """Text whose ``/tokenize`` must give the ids of the probe chat."""
        return probe_answer.templated_text.removeprefix(self.bos_text)

    def verified(self, probe_answer: ChatTokenized, tokens: Sequence[TokenizedToken]) -> BosRule:
        """The rule, proven by ``/tokenize(check_text)``; MISMATCH if the ids differ."""
        if [token.id for token in tokens] == [token.id for token in probe_answer.tokenize_response]:
            return replace(self, is_verified=True)
        return BosRule(kind=BosKind.MISMATCH, is_verified=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A chat as a prompt for ``/generate_stream``.

    ``text`` None: this chat cannot be sent that way; pass it through to ``/v1/chat/completions``, not resumable.
    ``characters`` counts the whole templated text, as ``x-compute-characters`` does.
    """

    text: str | None
    prompt_tokens: int
    characters: int
    resume_class: ResumeClass


def probe(added: Sequence[TokenizedToken], chat: ChatTokenized) -> BosRule:
    """The rule of a backend, from ``/tokenize`` of the empty text and ``/chat_tokenize`` of a tiny chat.

    One added token that the template prints first is BOS. Several added tokens (BOS and EOS of an encoder model), or
    one that the template does not print, cannot be reproduced.
    """
    if not added:
        return BosRule(kind=BosKind.NONE)
    first = chat.tokenize_response[0] if chat.tokenize_response else None
    if len(added) == 1 and first is not None and first.id == added[0].id:
        text = first.text
        if text and chat.templated_text.startswith(text):
            return BosRule(kind=BosKind.STRIP, bos_id=first.id, bos_text=text)
    return BosRule(kind=BosKind.MISMATCH)


def chat_prompt(rule: BosRule, chat: ChatTokenized) -> ChatPrompt:
    """The prompt of one chat. A template may print BOS for some chats only, so each is looked at."""
    tokens, text = chat.tokenize_response, chat.templated_text
    count, characters = len(tokens), len(text)
    exact = ResumeClass.EXACT if rule.is_verified else ResumeClass.APPROXIMATE
    if rule.kind is BosKind.NONE:
        return ChatPrompt(text=text, prompt_tokens=count, characters=characters, resume_class=exact)
    starts_with_bos = bool(tokens) and tokens[0].id == rule.bos_id and text.startswith(rule.bos_text)
    if rule.kind is BosKind.STRIP and starts_with_bos and len(text) > len(rule.bos_text):
        stripped = text[len(rule.bos_text) :]
        return ChatPrompt(text=stripped, prompt_tokens=count, characters=characters, resume_class=exact)
    return ChatPrompt(text=None, prompt_tokens=count, characters=characters, resume_class=ResumeClass.NEVER)
