"""Numbers found by searching a text, or where their digits are known to be, are those found one after the other."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from router_ext.predict import numbers_named
from router_ext.predict.numbers_named import Numbers, numbers_of

UNITS = {
    "word": 1.4,
    "character": 0.3,
    "sentence": 25.0,
    "paragraph": 120.0,
    "page": 120.0,
    "line": 12.0,
    "minute": 180.0,
}
THINGS = ("idea", "example", "item", "way", "step", "question", "point", "tip", "reason", "name", "title")

texts = st.lists(
    st.sampled_from(
        "1|23|456|7890|12345678901|,|.|-| |\n|word|ideas|page|a|_|é|big|٣|5|steps|lines|x2|7 tips".split("|")
    ),
    max_size=20,
).map("".join)


def one_by_one(text: str) -> Numbers:
    """The definition: each number is looked at by itself."""
    n = largest = asked_items = items_end = 0
    asked_tokens = 0.0
    for found in re.finditer(r"\d+([.,]\d+)*", text):
        n += 1
        number, rest = found[0], text[found.end() :]
        largest = max(largest, int(number.split(".")[0].replace(",", "")[:9]))
        last = re.split("[.,]", number)[-1]
        for unit, tokens in UNITS.items():
            if re.sub(r"^[\s-]*", "", rest).startswith(unit):
                asked_tokens = max(asked_tokens, int(last[-5:]) * tokens)
        start = found.end() - len(last)
        if len(last) <= 3 and start >= items_end and not (start and re.match(r"\w", text[start - 1])):
            for between in range(3):
                things = re.match(rf"\s+(?:\w+\s+){{{between}}}(?:{'|'.join(THINGS)})s?", rest)
                if things is not None:
                    asked_items, items_end = max(asked_items, int(last)), found.end() + things.end()
                    break
    return Numbers(n=n, largest=largest, asked_tokens=asked_tokens, asked_items=asked_items)


def runs(text: str) -> NDArray[np.intp]:
    return np.array([found.start() for found in re.finditer(r"\d+", text)], np.intp)


@given(texts | st.text(alphabet="019., -_aé\nwordsipt").map(str.lower))
def test_they_are_those_found_one_by_one(text: str) -> None:
    for few in (0, 1_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numbers_named, "_FEW", few)
            assert numbers_of(text, runs(text)) == one_by_one(text)


@pytest.mark.parametrize("few", [0, 2, 1_000])
def test_many_are_found_as_few_are(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers_named, "_FEW", few)
    text = "of 1,250 words, 3 4 big ideas, 7.5 tips, x9 ways and 12-line 2 5 6 titles"
    assert numbers_of(text, runs(text)) == one_by_one(text)
    assert numbers_of(text, runs(text)).asked_items == 5


def test_long_runs_of_digits_are_not_tried_digit_by_digit() -> None:
    """A search that is tried at each of so many digits, each time to their end, takes minutes."""
    text = "7" * 300_000 + " word idea"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers_named, "_FEW", 0)
        assert numbers_of(text, runs(text)) == Numbers(n=1, largest=777_777_777, asked_tokens=77_777 * 1.4)
