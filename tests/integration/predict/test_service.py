"""What the worker's service answers: with a trained model, with the memory alone, and after a restart."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.length_models import artifact, prompt

from router_ext.core.survival import LEVELS
from router_ext.errors import ArtifactRefused
from router_ext.predict.features import DENSE, Features
from router_ext.predict.messages import Answer, Ask, Ended, plausible
from router_ext.predict.service import LengthService

BASE = (50, 70, 120, 200, 320, 500, 700)
DIGEST = "d" * 64


class Asking:
    """A service and who asks it."""

    def __init__(self, service: LengthService | None = None, *, has_model: bool = False) -> None:
        self.service = service or LengthService()
        self.number = 0
        if has_model:
            self.service.assign("pol", DIGEST, self.service.load(artifact()))

    def question(self, text: str | list[tuple[str, str]] = "how many?", **fields: Any) -> Ask:
        self.number += 1
        values: dict[str, Any] = {
            "id": self.number,
            "pool": "pol",
            "model": "main",
            "tenant": "ten_a",
            "key": "key_a",
            "prompt": text,
            "is_chat": False,
            "max_new_tokens": 0,
            "temperature": 0.7,
            "top_p": 1.0,
            "is_greedy": False,
            "has_stop": False,
            "base": BASE,
        }
        return Ask(**{**values, **fields})

    def ask(self, *given: Any, **fields: Any) -> Answer:
        answers, refused = self.service.answer([self.question(*given, **fields)])
        assert not refused
        assert len(answers) == 1
        return answers[0]

    def tell(self, tokens: int, *given: Any, is_complete: bool = True, **fields: Any) -> None:
        """Ask, and report how long the answer was."""
        self.service.ended(Ended(self.ask(*given, **fields).id, tokens, is_complete))


def median(answer: Answer) -> int:
    assert answer.quantiles is not None
    whole = plausible(answer.quantiles)
    assert whole is not None
    return whole[len(LEVELS) // 2]


def test_without_a_model_only_features_are_said_of_an_unknown_prompt() -> None:
    answer = Asking().ask()
    assert (answer.quantiles, answer.source, answer.runaway, answer.model) == (None, "", None, None)
    assert answer.features is not None
    assert len(answer.features) < 2_000
    assert Features.unpack(answer.features).dense.shape == (len(DENSE),)


def test_without_a_model_a_known_prompt_is_expected_to_be_answered_as_before() -> None:
    asking = Asking()
    for _ in range(4):
        asking.tell(20, "how many?")
    known = asking.ask("how many?")
    assert known.source == "memory"
    assert median(known) < 60
    assert asking.ask("another question about something else entirely").quantiles is None
    # Of another tenant's prompts nothing is said, be they equal.
    assert asking.ask("how many?", tenant="ten_b").quantiles is None
    # Without empirical quantiles there is nothing to correct.
    assert asking.ask("how many?", base=None).quantiles is None


def test_a_model_tells_short_answers_from_long_ones() -> None:
    asking = Asking(has_model=True)
    short, long = (asking.ask(prompt(size, 900)) for size in ("one sentence", "a long essay"))
    assert median(short) < 150 < 400 < median(long)
    assert (short.source, short.model) == ("model", DIGEST)
    assert short.runaway is not None
    assert 0.0 <= short.runaway <= 1.0
    limited = asking.ask(prompt("a long essay", 900), max_new_tokens=64)
    assert limited.quantiles is not None
    assert max(limited.quantiles) == 64


def test_a_batch_is_answered_as_its_questions_one_by_one() -> None:
    asking = Asking(has_model=True)
    asking.service.assign("other", "e" * 64, asking.service.load(artifact()))
    pools = ("pol", "other", "without")
    questions = [asking.question(prompt("a paragraph", n), pool=pools[n % 3]) for n in range(12)]
    together, refused = asking.service.answer(questions)
    assert not refused
    alone = {q.id: asking.service.answer([q])[0][0] for q in questions}
    assert sorted(a.id for a in together) == sorted(alone)
    for answer in together:
        assert answer.model == alone[answer.id].model
        if answer.quantiles is not None:
            assert answer.quantiles == pytest.approx(alone[answer.id].quantiles, rel=1e-4)


def test_history_puts_a_tenant_right_that_is_always_longer() -> None:
    asking = Asking(has_model=True)
    texts = [prompt("a paragraph", number) for number in range(600, 640)]
    before = [median(asking.ask(text)) for text in texts]
    for number, text in enumerate(texts):
        asking.tell(3 * before[number], prompt("a paragraph", 700 + number), tenant="ten_long", key="key_long")
        assert text
    ours = sum(median(asking.ask(text, tenant="ten_long", key="key_long")) for text in texts)
    assert ours > 1.5 * sum(before)


def test_memory_puts_a_prompt_right_that_is_answered_otherwise() -> None:
    asking = Asking(has_model=True)
    text = prompt("a paragraph", 800)
    before = median(asking.ask(text))
    for _ in range(3):
        asking.tell(4 * before, text)
    known = asking.ask(text)
    assert known.source == "memory"
    assert median(known) > 2 * before
    assert median(asking.ask(prompt("a paragraph", 801), tenant="ten_other", key="key_other")) < 2 * before


def test_an_answer_that_was_cut_early_says_nothing() -> None:
    asking = Asking(has_model=True)
    text = prompt("a long essay", 810)
    before = median(asking.ask(text))
    for _ in range(5):
        asking.tell(3, text, is_complete=False)
    assert median(asking.ask(text)) >= before
    for _ in range(5):
        asking.tell(8 * before, text, is_complete=False)
    assert median(asking.ask(text)) > before


def test_what_was_learned_goes_with_the_state_and_another_process_reads_it() -> None:
    first = Asking()
    for _ in range(4):
        first.tell(20, "how many?")
    second = Asking()
    second.service.restore(first.service.dump())
    assert second.service.known == first.service.known > 0
    assert median(second.ask("how many?")) == median(first.ask("how many?"))


def test_a_state_that_is_none_is_refused_and_changes_nothing() -> None:
    asking = Asking()
    asking.tell(20, "how many?")
    good = list(asking.service.dump())
    rng = random.Random(5)
    for _ in range(300):
        damaged = [bytearray(each) for each in good]
        one = rng.choice(damaged)
        one[rng.randrange(len(one))] ^= 1 << rng.randrange(8)
        try:
            Asking().service.restore(map(bytes, damaged))
        except ValueError:
            continue
    for state in ([], [b"\x90"], good[1:], [*good[:-1], good[-1][:-3]], [*good, b"x"]):
        with pytest.raises(ValueError, match=r".*"):
            asking.service.restore(state)
    assert asking.ask("how many?").source == "memory"


def test_a_model_that_is_damaged_is_refused() -> None:
    service = LengthService()
    good = artifact()
    for damaged in (b"", b"x" * 100, good[:-1], good[: len(good) // 2] + b"\0" + good[len(good) // 2 + 1 :]):
        with pytest.raises(ArtifactRefused):
            service.load(damaged)


def test_a_prompt_that_trips_a_defect_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from router_ext.predict import service as module

    plain = module.features_of

    def tripping(reading: Any, facts: Any) -> Features:
        if reading.prompt == "bad":
            raise ZeroDivisionError
        return plain(reading, facts)

    monkeypatch.setattr(module, "features_of", tripping)
    asking = Asking(has_model=True)
    questions = [asking.question(text) for text in ("good", "bad", "good")]
    answers, refused = asking.service.answer(questions)
    assert [a.id for a in answers] == [questions[0].id, questions[2].id]
    assert refused == [questions[1].id]


def test_no_prompt_trips_it() -> None:
    asking = Asking(has_model=True)
    for text in ("", " ", "\n" * 50, "\ud800", "\0", "🙂" * 3_000, "x" * 40_000, [("", "")], [("user", "")] * 256):
        for fields in ({"temperature": float("nan")}, {"top_p": float("inf")}, {"max_new_tokens": 1}, {}):
            answer = asking.ask(text, **fields)
            assert answer.quantiles is not None
            assert plausible(answer.quantiles) is not None


def test_what_waits_for_its_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_ext.predict.service.MAX_PENDING", 10)
    asking = Asking()
    first = [asking.ask("how many?").id for _ in range(30)]
    for question in first[:20]:
        asking.service.ended(Ended(question, 20, True))
    assert asking.service.known == 0
    for question in first[20:]:
        asking.service.ended(Ended(question, 20, True))
    assert asking.service.known > 0
