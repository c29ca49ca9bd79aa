"""What is found out about a backend's model each time it comes up: can its text, and its chats, be continued?"""

from __future__ import annotations

from dataclasses import dataclass

from router_ext.backends.base import Backend
from router_ext.backends.probe import chat_tokenize, reads_images, tokenize
from router_ext.gateway.bos import PROBE_CHAT, BosKind, BosRule, probe

PROBE_WORD = "a"
"""A text that no tokenizer drops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKnowledge:
    """What the probe found.

    Attributes:
        bos: how a templated chat becomes a prompt. None: the model has no chat template, and its chat endpoint's own
            refusal is the right answer.
        is_resumable: text can be continued; a tokenizer that appends a token of its own (an encoder's EOS) forbids it.
        reads_images: an image's address in a text is fetched (``![](...)``), be it written by the model itself.
    """

    bos: BosRule | None
    is_resumable: bool
    reads_images: bool


async def probe_model(backend: Backend) -> ModelKnowledge:
    """Ask once.

    Raises:
        UpstreamFailed: the backend did not answer; nothing is known.
    """
    added = await tokenize(backend, "")
    is_resumable = not added
    if len(added) == 1:
        # What is added stands in front (BOS) or, with a text, behind it (EOS).
        ids = [token.id for token in await tokenize(backend, PROBE_WORD)]
        is_resumable = ids[:1] == [added[0].id] and (len(ids) < 2 or ids[-1] != added[0].id)
    reads = await reads_images(backend)
    chat, _ = await chat_tokenize(backend, PROBE_CHAT)
    if chat is None:
        return ModelKnowledge(bos=None, is_resumable=is_resumable, reads_images=reads)
    rule = probe(added, chat)
    if rule.kind is not BosKind.MISMATCH:
        rule = rule.verified(chat, await tokenize(backend, rule.check_text(chat)))
    return ModelKnowledge(bos=rule, is_resumable=is_resumable, reads_images=reads)
