"""What features hold of a prompt, and what they do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.errors import FeaturesRefused
from router_ext.predict.features import DENSE, MAX_IDS, Features, RequestFacts, Signer, extract
from router_ext.predict.reading import HEAD_CHARS, TAIL_CHARS, read

FACTS = RequestFacts(max_new_tokens=400, temperature=0.7, top_p=0.9)
PAGE = " ".join(f"word{chr(97 + i % 26)}{chr(97 + i // 26 % 26)} river and mountain" for i in range(60))

turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text()), max_size=6)
prompts = st.text() | turns
numbers = st.none() | st.floats()
facts = st.builds(
    RequestFacts,
    max_new_tokens=st.none() | st.integers(-5, 2**63),
    temperature=numbers,
    top_p=numbers,
    top_k=st.none() | st.integers(-5, 2**63),
    typical_p=numbers,
    repetition_penalty=numbers,
    is_greedy=st.booleans(),
    has_stop=st.booleans(),
    is_chat=st.booleans(),
)


def value(features: Features, name: str) -> float:
    return float(features.dense[DENSE.index(name)])


@given(prompts, facts)
def test_any_prompt_has_finite_features_that_survive_packing(
    prompt: str | list[tuple[str, str]], f: RequestFacts
) -> None:
    features = extract(prompt, f)
    packed = features.pack()
    assert len(packed) <= 1_024
    assert np.isfinite(features.dense).all()
    again = Features.unpack(packed)
    assert (again.dense == features.dense).all()
    assert (again.ids == features.ids).all()
    assert (again.counts == features.counts).all()


def test_start_end_and_length_count_and_the_middle_does_not() -> None:
    start, end = "s" * HEAD_CHARS, "e" * TAIL_CHARS
    one, other = (extract(start + middle * 5_000 + end, FACTS) for middle in ("x ", "y "))
    assert one.pack() == other.pack()
    longer = extract(start + "x " * 9_000 + end, FACTS)
    assert value(longer, "chars") > value(one, "chars")
    assert extract("t" + start[1:] + "x " * 5_000 + end, FACTS).pack() != one.pack()
    assert extract(start + "x " * 5_000 + end[:-1] + " f", FACTS).pack() != one.pack()


def test_a_long_chat_is_read_at_both_ends() -> None:
    chat = [("user", f"turn {i} " * 40) for i in range(400)]
    other = [*chat[:200], ("user", "something else " * 40), *chat[201:]]
    assert extract(chat, FACTS).ids.tolist() == extract(other, FACTS).ids.tolist()
    assert value(extract(chat, FACTS), "turns") == pytest.approx(np.log(400), rel=1e-3)


def test_of_many_words_a_sample_is_kept_that_similar_prompts_share() -> None:
    one = extract(" ".join(f"w{i}x" for i in range(600)), FACTS)
    other = extract(" ".join(f"w{i}x" for i in range(5, 605)), FACTS)
    assert len(one.ids) == len(other.ids) == MAX_IDS
    assert len(np.intersect1d(one.ids, other.ids)) > 0.9 * MAX_IDS


@pytest.mark.parametrize(
    ("text", "name", "least", "most"),
    [
        ("Summarise it in 500 words.", "asked_tokens", 6.0, 7.0),
        ("Give me 10 ideas for a party.", "asked_items", 2.3, 2.5),
        ("Summarise it.", "asked_tokens", 0.0, 0.0),
        ("Write 1,250-word essays, 3 pages", "asked_tokens", 5.8, 5.9),
        ("3 4 ideas", "asked_items", 1.38, 1.39),
        ("abc12 ideas", "asked_items", 0.0, 0.0),
        ("5 big great ideas, 7 tips", "asked_items", 2.07, 2.09),
        ("12345 and 7", "largest_number", 9.4, 9.5),
        ("Привет, как дела?", "beyond_latin", 0.6, 0.9),
    ],
)
def test_cues_are_found(text: str, name: str, least: float, most: float) -> None:
    assert least <= value(extract(text, FACTS), name) <= most


def test_what_was_not_stated_differs_from_any_value() -> None:
    unstated = RequestFacts().numbers()
    for stated in (RequestFacts(temperature=0.0), RequestFacts(top_p=0.0), RequestFacts(top_k=0)):
        assert stated.numbers() != unstated


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\0" + data[1:],
        lambda data: data[:1] + b"\x63" + data[2:],
        lambda data: data[:8] + b"\x00\x7e" + data[10:],
        lambda data: data[:-1] + b"\0",
    ],
    ids=["empty", "short", "long", "foreign", "version", "nan", "count of zero"],
)
def test_damaged_features_are_refused(damage) -> None:
    with pytest.raises(FeaturesRefused):
        Features.unpack(damage(extract(PAGE, FACTS).pack()))


def test_packed_features_hold_no_text() -> None:
    packed = extract("correct horse battery staple", FACTS).pack()
    assert not any(word in packed for word in (b"horse", b"battery", b"staple", b"correct"))


def test_signatures_need_the_key() -> None:
    one, same, other = (Signer(key).sign(PAGE) for key in (b"a", b"a", b"b"))
    assert one == same
    assert one.exact != other.exact
    assert not set(one.near) & set(other.near)


def test_near_duplicates_share_bands_and_strangers_do_not() -> None:
    signer = Signer(b"key")
    near = signer.sign(PAGE.replace("wordca", "changed"))
    own = signer.sign(PAGE)
    assert near.exact != own.exact
    assert len(set(near.near) & set(own.near)) >= 2
    assert not set(signer.sign(PAGE[::-1]).near) & set(own.near)


def test_roles_and_turns_are_part_of_a_prompt() -> None:
    signer = Signer(b"key")
    chats = [[("user", "ab")], [("system", "ab")], [("user", "a"), ("user", "b")]]
    assert len({signer.sign(chat).exact for chat in chats}) == 3


@given(st.text(alphabet="0123456789., -_aé\n") | st.text())
def test_numbers_are_the_same_wherever_they_are_looked_for(text: str) -> None:
    """A letter beyond ASCII takes the other way; here it stands where it cannot matter."""
    text = text.encode("ascii", "ignore").decode()
    for name in ("numbers", "largest_number", "asked_tokens", "asked_items"):
        assert value(extract(text, FACTS), name) == value(extract(text + " é", FACTS), name)


def test_prompts_that_differ_in_the_middle_alone_are_told_apart() -> None:
    signer = Signer(b"key")
    one, other = ("s" * 9_000 + middle + "e" * 9_000 for middle in ("x", "y"))
    assert read(one).seen == read(other).seen
    assert signer.sign(one).exact != signer.sign(other).exact
    assert signer.sign(one).near == signer.sign(other).near
