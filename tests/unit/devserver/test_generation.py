"""Stop strings, ends and texts of a generation, by TGI's rules."""

from __future__ import annotations

import pytest

from router_ext.devserver import toy
from router_ext.devserver.codec import Codec
from router_ext.devserver.engine import Sampled, Sampling
from router_ext.devserver.generation import Generation, StopMatcher, Timing, logprob_json
from router_ext.devserver.validation import ValidRequest


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(toy.tokenizer())


class Nowhere:
    def on_token(self, *_: object) -> None: ...

    def on_error(self, *_: object) -> None: ...


def generation(codec: Codec, *, limit: int = 100, stops: tuple[str, ...] = (), seed: int = 3) -> Generation:
    request = ValidRequest(
        inputs="the",
        input_ids=codec.encode("the", add_special_tokens=True),
        piece_tokens=limit,
        total_new_tokens=limit,
        max_new_tokens=limit,
        stops=stops,
        sampling=Sampling(seed=seed),
        add_special_tokens=True,
        truncate=None,
        decoder_input_details=False,
    )
    return Generation(request, Nowhere(), codec, frozenset((toy.EOS_ID,)), Timing(arrived=0.0))


def fed(made: Generation, ids: list[int]) -> list[tuple[str, str | None]]:
    """(text, reason) of each event."""
    events = []
    for i in ids:
        token, reason = made.advance(Sampled(made.sequence, i, -0.5))
        events.append((token.text, reason))
    return events


class TestStopMatcher:
    def test_matches_only_at_the_end_of_the_text(self) -> None:
        assert StopMatcher(("ari",)).matches("Paris") is False
        assert StopMatcher(("ris",)).matches("Paris") is True

    def test_matches_across_tokens_and_tolerates_one_line_break(self) -> None:
        matcher = StopMatcher(("a b",))
        assert [matcher.matches(t) for t in ("a", " ", "b")] == [False, False, True]
        assert StopMatcher(("end",)).matches("end\n") is True
        assert StopMatcher(("end",)).matches("end\n\n") is False

    def test_the_buffer_forgets_what_is_long_past(self) -> None:
        matcher = StopMatcher(("x" * 250,))
        assert not any(matcher.matches("x") for _ in range(249))
        assert matcher.matches("x")
        long = StopMatcher(("y" * 290 + "z",))
        for _ in range(301):
            long.matches("y")
        assert not long.matches("z")


class TestEnds:
    def test_length_is_tested_before_eos(self, codec: Codec) -> None:
        made = generation(codec, limit=2)
        the = codec.encode(" the", add_special_tokens=False)
        assert fed(made, [the[0], toy.EOS_ID]) == [(" the", None), ("</s>", "length")]
        assert made.piece_text() == " the"

    def test_length_is_tested_before_stop_strings(self, codec: Codec) -> None:
        the = codec.encode(" the", add_special_tokens=False)
        assert fed(generation(codec, limit=1, stops=("the",)), the) == [(" the", "length")]
        assert fed(generation(codec, limit=2, stops=("the",)), the) == [(" the", "stop_sequence")]

    def test_eos_is_shown_as_a_token_and_left_out_of_the_text(self, codec: Codec) -> None:
        made = generation(codec)
        assert fed(made, [toy.SEPARATOR_ID, toy.EOS_ID]) == [("<|sep|>", None), ("</s>", "eos_token")]
        assert made.piece_text() == ""

    def test_a_character_shows_with_its_last_token(self, codec: Codec) -> None:
        ids = codec.encode("😀", add_special_tokens=False)
        made = generation(codec)
        assert [text for text, _ in fed(made, ids)] == ["", "", "", "😀"]
        assert made.piece_text() == "😀"

    def test_text_that_ends_inside_a_character_is_lost_whole(self, codec: Codec) -> None:
        made = generation(codec)
        fed(made, [*codec.encode(" the", add_special_tokens=False), *codec.encode("😀", add_special_tokens=False)[:2]])
        assert made.piece_text() == ""

    def test_bytes_that_are_no_character_come_out_when_something_follows(self, codec: Codec) -> None:
        broken = codec.encode("😀", add_special_tokens=False)[:2]
        made = generation(codec)
        assert [t for t, _ in fed(made, [*broken, *codec.encode(" the", add_special_tokens=False)])] == [
            "",
            "",
            "\ufffd the",
        ]

    def test_the_seed_is_reported_only_when_sampling(self, codec: Codec) -> None:
        assert generation(codec).ending("length", "").seed is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0"), (-0.25807284, "-0.25807285"), (-1.0, "-1.0"), (float("nan"), "null"), (-11.539295, "-11.539295")],
)
def test_logprobs_are_the_shortest_text_of_a_float32(value: float, text: str) -> None:
    assert logprob_json(value) == text.encode()
