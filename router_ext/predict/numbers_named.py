"""The numbers a text names: how many, the largest, and what lengths it asks for ("in 500 words", "10 ideas").

Cost: 1 us for each run of digits; if they are many, a search of the text: 20 us per 1,000 characters and 0.15 us per
number.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NUMBER = re.compile(r"(\d+(?:,\d+)*)(?:[.,]\d+)*")
"""A number, and what of it stands before the first point."""
_SIZE = re.compile(r"(\d(?<!\d\d)\d*+)[\s-]*+(word|character|sentence|paragraph|page|line|minute)")
_ITEMS = re.compile(
    r"(\d(?<!\w\d)\d{0,2}+)(?!\d)\s+(?:\w+\s+){0,2}?"
    r"(?:ideas?|examples?|items?|ways?|steps?|questions?|points?|tips?|reasons?|names?|titles?)"
)
"""As in "in 500 words" and in "10 ideas". Each begins with the first of some digits and tells so by looking back, so
that long runs of them are not tried digit by digit."""
_HAS_SIZE = re.compile("word|character|sentence|paragraph|page|line|minute")
_HAS_ITEMS = re.compile("idea|example|item|way|step|question|point|tip|reason|name|title")
_SIZE_TOKENS = {"w": 1.4, "c": 0.3, "s": 25.0, "p": 120.0, "l": 12.0, "m": 180.0}
"""Tokens per unit, by the unit's first letter."""
_FEW = 24
"""Runs of digits up to which each is looked at by itself."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """``asked_tokens``: of the largest length that is named, ``asked_items``: the largest number of things; 0 if there
    are none. ``largest``: at most 1e9."""

    n: int = 0
    largest: int = 0
    asked_tokens: float = 0.0
    asked_items: int = 0


NO_NUMBERS = Numbers()


def numbers_of(text: str, runs: NDArray[np.intp]) -> Numbers:
    """The numbers of a text in lower case. ``runs``: where runs of digits begin in it."""
    if len(runs) > _FEW:
        return _of(
            _NUMBER.findall(text),
            _SIZE.findall(text) if _HAS_SIZE.search(text) else (),
            _ITEMS.findall(text) if _HAS_ITEMS.search(text) else (),
        )
    wholes: list[str] = []
    sizes: list[tuple[str, str]] = []
    items: list[str] = []
    number_end = items_end = 0
    for at in runs.tolist():
        if at >= number_end and (number := _NUMBER.match(text, at)) is not None:
            wholes.append(number[1])
            number_end = number.end()
        if (size := _SIZE.match(text, at)) is not None:
            sizes.append((size[1], size[2]))
        if at >= items_end and (item := _ITEMS.match(text, at)) is not None:
            items.append(item[1])
            items_end = item.end()
    return _of(wholes, sizes, items)


def _of(wholes: list[str], sizes: Collection[tuple[str, str]], items: Collection[str]) -> Numbers:
    return Numbers(
        n=len(wholes),
        largest=max([int(whole.replace(",", "")[:9]) for whole in set(wholes)], default=0),
        asked_tokens=max([int(digits[-5:]) * _SIZE_TOKENS[unit[0]] for digits, unit in sizes], default=0.0),
        asked_items=max(map(int, items), default=0),
    )
