"""Words, found for a whole text at once, are those that a regular expression finds one after the other."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router_ext.predict.reading import HEAD_CHARS, TAIL_CHARS, read

_WORD = re.compile(r"[^\W\d_]+|\d+|\n+|[^\w\s]|_")

pieces = st.sampled_from(
    [
        "Word",
        "don't",
        "12ab",
        "\n\n",
        "\t",
        " ",
        "  ",
        "_",
        "é",
        "\u2003",
        "日本",
        "\ud800",
        "!?",
        "x" * 40,
        "İ",
        "٣",
        "²",
    ]
)
texts = st.lists(pieces, max_size=60).map("".join) | st.text(st.characters(max_codepoint=0xFFFF))

_NAMES: dict[str, int] = {}


def named(word: str) -> int:
    """The hash of a word that stands alone."""
    if word not in _NAMES:
        (_NAMES[word],) = read(word).words.tolist()
    return _NAMES[word]


def expected(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@given(texts)
def test_words_are_those_of_a_regular_expression_wherever_they_stand(text: str) -> None:
    assert read(text).words.tolist() == [named(word) for word in expected(text)]


@given(texts)
def test_words_that_differ_have_names_that_differ(text: str) -> None:
    words = set(expected(text))
    assert len({named(word) for word in words}) == len(words)


@given(st.text(st.characters(min_codepoint=0x10000), min_size=1, max_size=9))
def test_beyond_the_basic_plane_each_character_is_a_word(text: str) -> None:
    assert len(read(text).words) == len(text.lower())


def test_words_of_one_kind_spread_over_all_ids() -> None:
    """A sum of characters alone would name neighbours alike."""
    words = [f"w{chr(97 + i // 676)}{chr(97 + i // 26 % 26)}{chr(97 + i % 26)}" for i in range(2_000)]
    hashes = np.concatenate([read(" ".join(words[first : first + 200])).words for first in range(0, 2_000, 200)])
    for shift in (0, 16, 32, 48):
        parts = hashes >> np.uint64(shift) & np.uint64(0xFFFF)
        # 2,000 of 65,536 at random: 30 meet another.
        assert len(np.unique(parts)) > 1_940


def test_stems_are_of_longer_words_only() -> None:
    assert len(read("tree").stems) == 0
    assert len(read("Houses").stems) == 1
    assert len(read("mountains").stems) == 2
    assert read("houses").stems.tolist() == read("housekeeper").stems.tolist()[:1]
    assert set(read("mountains").stems.tolist()) == set(read("mountainous").stems.tolist())
    assert not set(read("mountains").stems.tolist()) & set(read("moun mounta").words.tolist())


@given(texts)
def test_runs_of_digits_are_where_a_regular_expression_finds_them(text: str) -> None:
    assert read(text).digits.tolist() == [found.start() for found in re.finditer(r"\d+", text.lower())]


def test_of_a_long_text_both_ends_are_read() -> None:
    head, tail = "begin " * 600, " the end" * 200
    seen = read(head + "middle " * 900 + tail)
    assert seen.seen == head[:HEAD_CHARS] + "\n" + tail[-TAIL_CHARS:]
    assert seen.words.tolist() == [named(word) for word in expected(seen.seen)]


def test_a_text_that_grows_in_lower_case_is_read_to_its_end() -> None:
    text = "İ" * (HEAD_CHARS + TAIL_CHARS)
    assert len(read(text).points) == 2 * len(text)
