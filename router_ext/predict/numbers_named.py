"""The numbers a text names: how many, the largest, and what lengths it asks for ("in 500 words", "10 ideas").

Cost: 1 us per number, where it is known where digits are; else a search of the text more, 8 us per 1,000 characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

__all__ = ("Numbers", "numbers_of")

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SIZE = re.compile(r"[\s-]*(words?|characters?|sentences?|paragraphs?|pages?|lines?|minutes?)", re.I)
_ITEMS = re.compile(
    r"\s+(?:\w+\s+){0,2}?(ideas?|examples?|items?|ways?|steps?|questions?|points?|tips?|reasons?|names?|titles?)", re.I
)
"""What follows the number in "in 500 words" and in "10 ideas"."""
_SIZE_TOKENS = {"w": 1.4, "c": 0.3, "s": 25.0, "p": 120.0, "l": 12.0, "m": 180.0}
"""Tokens per unit, by the unit's first letter."""


def numbers_of(text: str, digits: Sequence[int] | None) -> Numbers:
    """The numbers of a text. ``digits``: where its digits are, None: not known."""
    return Numbers(text, _NUMBER.finditer(text) if digits is None else _at(text, digits))


def _at(text: str, digits: Sequence[int]) -> Iterator[re.Match[str]]:
    end = 0
    for at in digits:
        if at >= end and (found := _NUMBER.match(text, at)) is not None:
            end = found.end()
            yield found


class Numbers:
    """See the module. ``asked_tokens``: of the largest length that is named, ``asked_items``: the largest number of
    things; 0 if there are none."""

    __slots__ = ("asked_items", "asked_tokens", "largest", "n")

    def __init__(self, text: str, matches: Iterable[re.Match[str]]) -> None:
        self.n, self.largest, self.asked_tokens, self.asked_items = 0, 0.0, 0.0, 0
        items_end = 0
        for found in matches:
            self.n += 1
            number, start, end = found[0], found.start(), found.end()
            self.largest = max(self.largest, min(float(number.replace(",", "").split(".")[0][:9] or 0), 1e9))
            size = _SIZE.match(text, end)
            last = number.replace(",", ".").rsplit(".", 1)[-1]
            if size is not None:
                self.asked_tokens = max(self.asked_tokens, int(last[-5:]) * _SIZE_TOKENS[size[1][0].lower()])
            if len(last) > 3 or end - len(last) < items_end or (len(last) == end - start and _is_in_word(text, start)):
                continue
            items = _ITEMS.match(text, end)
            if items is not None:
                self.asked_items, items_end = max(self.asked_items, int(last)), items.end()


def _is_in_word(text: str, at: int) -> bool:
    return at > 0 and (text[at - 1].isalnum() or text[at - 1] == "_")
