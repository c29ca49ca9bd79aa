"""Words read chunk by chunk are those of the whole text, whatever is cached."""

from __future__ import annotations

import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.predict import reading
from router_ext.predict.reading import HEAD_CHARS, TAIL_CHARS, read

_WORD = re.compile(r"[^\W\d_]+|\d+|\n+|[^\w\s]|_")

pieces = st.sampled_from(
    ["Word", "don't", "12ab", "\n\n", "\t", " ", "  ", "_", "é", "\u2003", "日本", "\ud800", "!?", "x" * 40]
)
texts = st.lists(pieces, max_size=60).map("".join) | st.text()


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> reading._Chunks:
    """So small that chunks are forgotten within a text."""
    cache = reading._Chunks()
    monkeypatch.setattr(reading._Chunks, "_MOST", 4)
    monkeypatch.setattr(reading, "_chunks", cache)
    return cache


def whole(text: str) -> list[int]:
    return [zlib.crc32(word.encode("utf-8", "replace")) for word in _WORD.findall(text.lower())]


@given(texts)
def test_words_are_those_of_the_whole_text(text: str) -> None:
    assert read(text).hashes[:, 0].tolist() == whole(text)


def test_stems_are_of_longer_words_only() -> None:
    found = read("tree Houses mountains").hashes
    assert (found[:, 1] > 0).tolist() == [False, True, True]
    assert (found[:, 2] > 0).tolist() == [False, False, True]
    assert found[1].tolist()[1] == read("house").hashes[0, 1]


def test_of_a_long_text_both_ends_are_read() -> None:
    head, tail = "begin " * 600, " the end" * 200
    seen = read(head + "middle " * 900 + tail)
    assert seen.seen == head[:HEAD_CHARS] + tail[-TAIL_CHARS:]
    assert seen.hashes[:, 0].tolist() == [*whole(head[:HEAD_CHARS]), *whole("\n"), *whole(tail[-TAIL_CHARS:])]


def test_what_is_cached_is_bounded(small_cache: reading._Chunks) -> None:
    read(" ".join(f"word{i}" for i in range(300)) + " " + "y" * 2_000)
    assert 0 < len(small_cache) <= 4
    assert len(small_cache._old) <= 4
    assert max(map(len, [*small_cache, *small_cache._old])) <= small_cache._LONGEST
