"""Which part of a prompt a prediction is made from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.predict.prompts import MAX_CHARACTERS, MAX_TURNS, bounded

HALF = MAX_CHARACTERS // 2


def chat(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_a_prompt_that_is_not_very_long_is_kept_whole() -> None:
    text = "x" * MAX_CHARACTERS
    assert bounded(text, ()) == text
    turns = [("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "go on")]
    assert bounded(None, chat(*turns)) == turns


def test_of_a_long_text_the_outer_halves_are_kept() -> None:
    text = "a" * HALF + "b" * 7 + "c" * HALF
    assert bounded(text, ()) == "a" * HALF + "c" * HALF


def test_a_question_is_the_same_prompt_by_chat_and_plainly() -> None:
    assert bounded(None, chat(("user", "why?"))) == bounded("why?", ()) == "why?"
    assert bounded(None, chat(("system", "why?"))) == [("system", "why?")]


def test_parts_of_a_content_are_their_texts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "u"}}, {"text": "two"}]
    assert bounded(None, chat(("user", parts))) == "one\ntwo"


@pytest.mark.parametrize("messages", [[], [{}], [{"role": 3, "content": 4}], [{"role": "user", "content": [None, {}]}]])
def test_nothing_that_a_client_sends_trips_it(messages: list[Any]) -> None:
    assert len(str(bounded(None, messages))) < 30


TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.integers(0, MAX_CHARACTERS)), max_size=12)


@given(TURNS)
def test_of_a_long_chat_start_and_end_are_kept(lengths: list[tuple[str, int]]) -> None:
    turns = [(role, chr(97 + index) * length) for index, (role, length) in enumerate(lengths)]
    whole = "".join(text for _, text in turns)
    kept = bounded(None, chat(*turns))
    text = kept if isinstance(kept, str) else "".join(text for _, text in kept)
    if len(whole) <= MAX_CHARACTERS:
        assert text == whole
    else:
        assert text == whole[:HALF] + whole[-HALF:]


def test_of_very_many_turns_the_outer_ones_are_kept() -> None:
    kept = bounded(None, chat(*(("user", str(number)) for number in range(1_000))))
    assert len(kept) == MAX_TURNS
    assert kept[0] == ("user", "0")
    assert kept[-1] == ("user", "999")
