"""The part of a prompt that a prediction is made from: all of it, unless it is very long; then its start and its end.

A plain prompt is its text, a chat the texts of its messages with their roles. A chat of one message from the user is
the same prompt as its text sent plainly. What a model's template adds says nothing about the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Prompt: TypeAlias = str | list[tuple[str, str]]

MAX_CHARACTERS = 40_000
"""Some 8,000 tokens. Of longer prompts the outer halves of this are kept: what is asked for stands at the start or at
the end, and the hand-over to the worker stays bounded."""

MAX_TURNS = 256


def bounded(text: str | None, messages: Sequence[Mapping[str, Any]]) -> Prompt:
    """A plain prompt, or a chat if ``text`` is None, cut to what is looked at. Cost: O(``MAX_CHARACTERS``)."""
    if text is not None:
        return _outer(text)
    turns = list(
        _turns([*messages[: MAX_TURNS // 2], *messages[max(MAX_TURNS // 2, len(messages) - MAX_TURNS // 2) :]])
    )
    if not turns:
        return ""
    if len(turns) == 1 and turns[0][0] == "user":
        return _outer(turns[0][1])
    return _outer_turns(turns)


def _outer(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return text[: MAX_CHARACTERS // 2] + text[-MAX_CHARACTERS // 2 :]


def _outer_turns(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The first and the last turns, as far as their texts reach into the outer halves."""
    if sum(len(text) for _, text in turns) <= MAX_CHARACTERS:
        return turns
    head: list[tuple[str, str]] = []
    left = MAX_CHARACTERS // 2
    first = 0
    while left:
        role, text = turns[first]
        head.append((role, text[:left]))
        left -= min(left, len(text))
        first += 1
    tail: list[tuple[str, str]] = []
    left = MAX_CHARACTERS // 2
    # The turn at which the head ends may be the one in which the tail begins: its end is another part of it.
    for role, text in reversed(turns[first - 1 :]):
        if not left:
            break
        tail.append((role, text[-left:]))
        left -= min(left, len(text))
    return head + tail[::-1]


def _turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Role and text of each message; of a content of several parts their texts, pictures say nothing."""
    for message in messages:
        content, role = message.get("content"), message.get("role")
        name = role if isinstance(role, str) else ""
        if isinstance(content, str):
            yield name, content
        elif isinstance(content, list):
            texts = (part.get("text") for part in content if isinstance(part, dict))
            yield name, "\n".join(text for text in texts if isinstance(text, str))
