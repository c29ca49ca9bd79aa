"""The prediction worker's service: what it answers and what it learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.msgpack import encode as msgpack
from support.lengths import trained

from router_ext.errors import ArtifactRefused
from router_ext.predict import model_file, residuals
from router_ext.predict.features import DENSE, Features, RequestFacts, extract
from router_ext.predict.memory import Memory
from router_ext.predict.messages import Answer, Ask, Ended, plausible
from router_ext.predict.predictor import Predictor
from router_ext.predict.service import LengthService

TEXT = "explain briefly rivers and bread and chess and maps, number 5"
OTHER = "write a long essay about engines and gardens and trade, number 17"
BASE = (50, 60, 80, 100, 120, 140, 150)


def ask(number: int, prompt: str = TEXT, *, pool: str = "plain", tenant: str = "t", **changes: object) -> Ask:
    fields = {
        "id": number, "pool": pool, "model": pool, "tenant": tenant, "key": "k", "prompt": prompt, "is_chat": False,
        "max_new_tokens": 4_096, "temperature": 0.7, "top_p": 1.0, "is_greedy": False, "has_stop": False, "base": BASE,
    }  # fmt: skip
    return Ask(**{**fields, **changes})


def answer(service: LengthService, question: Ask) -> Answer:
    answers, refused = service.answer([question])
    assert not refused
    return answers[0]


def median(found: Answer) -> float:
    assert found.quantiles is not None
    return found.quantiles[3]


@pytest.fixture
def service() -> LengthService:
    """One with a model for two pools, at a clock that stands still."""
    service = LengthService(clock=lambda: 1_000.0)
    model = service.load(trained().artifact)
    service.assign("plain", "d1", model)
    service.assign("wordy", "d1", model)
    return service


def test_without_a_model_features_are_made_and_nothing_is_said(service: LengthService) -> None:
    found = answer(LengthService(), ask(1))
    assert (found.quantiles, found.source, found.runaway, found.model) == (None, "", None, None)
    assert found.features is not None
    assert len(Features.unpack(found.features).ids) > 5


def test_without_a_model_a_known_prompt_corrects_the_empirical_quantiles() -> None:
    service = LengthService()
    for number in range(6):
        answer(service, ask(number))
        service.ended(Ended(number, 300, True))
    found = answer(service, ask(10))
    assert found.source == "memory"
    assert 200 < median(found) < 310
    assert answer(service, ask(11, OTHER)).quantiles is None


def test_a_model_answers_for_its_pools_and_no_other(service: LengthService) -> None:
    found = answer(service, ask(1))
    assert (found.source, found.model) == ("model", "d1")
    assert found.runaway is not None
    assert answer(service, ask(2, pool="elsewhere")).quantiles is None
    service.assign("plain", None, None)
    assert answer(service, ask(3)).quantiles is None
    assert answer(service, ask(4, pool="wordy")).quantiles is not None


def test_what_one_model_wrote_teaches_the_expectation_for_another(service: LengthService) -> None:
    cold = answer(service, ask(1, pool="wordy"))
    long = round(2.0 * median(answer(service, ask(9))))
    for number in range(10, 15):
        answer(service, ask(number))
        service.ended(Ended(number, long, True))
    warm = answer(service, ask(2, pool="wordy"))
    assert warm.source == "memory"
    # What one tenant asked says nothing of the prompts of another.
    assert answer(service, ask(5, pool="wordy", tenant="other")).quantiles == cold.quantiles
    assert 1.3 < median(warm) / median(cold) < 2.2
    assert median(answer(service, ask(3, OTHER, pool="wordy"))) == pytest.approx(
        median(answer(service, ask(4, OTHER, pool="wordy"))), rel=1e-6
    )


def test_a_tenant_whose_answers_are_longer_is_learned_without_repeating_a_prompt(service: LengthService) -> None:
    def prompt(number: int) -> str:
        return f"explain briefly {' '.join(f'{chr(97 + number % 26)}{chr(97 + i)}{number}' for i in range(20))}"

    ratios = []
    for number in range(60):
        found = answer(service, ask(number, prompt(number), tenant="long"))
        service.ended(Ended(number, 120, True))
        ratios.append(median(found) / 120.0)
    assert abs(math.log(sum(ratios[-10:]) / 10)) < 0.25
    assert abs(math.log(ratios[0])) > abs(math.log(sum(ratios[-10:]) / 10))


def test_the_histories_of_a_pool_begin_anew_with_another_model(service: LengthService) -> None:
    before = median(answer(service, ask(1, OTHER)))
    for number in range(10, 50):
        answer(service, ask(number, f"{TEXT} {number} {number * 7919}"))
        service.ended(Ended(number, 900, True))
    assert median(answer(service, ask(2, OTHER))) > 1.2 * before
    service.assign("plain", "d2", service.load(trained(2).artifact))
    fresh = LengthService()
    fresh.assign("plain", "d2", fresh.load(trained(2).artifact))
    assert median(answer(service, ask(3, OTHER))) == pytest.approx(median(answer(fresh, ask(3, OTHER))), rel=0.25)


@pytest.mark.parametrize("news", [Ended(77, 100, True), Ended(1, 0, True), Ended(1, 5, False)])
def test_news_that_teach_nothing_change_nothing(service: LengthService, news: Ended) -> None:
    answer(service, ask(1))
    service.ended(news)
    assert service.known == 0


def test_answers_come_for_all_pools_of_a_batch(service: LengthService) -> None:
    questions = [ask(i, pool=pool) for i, pool in enumerate(["plain", "elsewhere", "wordy", "plain"])]
    answers, refused = service.answer(questions)
    assert not refused
    assert sorted(found.id for found in answers) == [0, 1, 2, 3]
    assert {found.id for found in answers if found.quantiles is None} == {1}


def test_a_question_that_trips_a_defect_is_named_and_the_others_are_answered(service: LengthService) -> None:
    answers, refused = service.answer([ask(1), ask(2, prompt=None), ask(3)])
    assert refused == [2]
    assert sorted(found.id for found in answers) == [1, 3]


def test_numbers_that_overflow_are_said_to_be_none_and_teach_nothing(service: LengthService) -> None:
    """Weights that overflow on words; a file of them would be refused."""
    header, tensors = model_file.unpack(trained().artifact)
    weights = tensors["mixture0.first.weight"].copy()
    weights[:, len(DENSE) : len(DENSE) + len(tensors["scaling.word_scale"])] = 3e38
    tensors["mixture0.first.weight"] = weights
    service.assign("plain", "d2", Predictor(header, tensors))
    with np.errstate(all="ignore"):
        found = answer(service, ask(1))
    assert found.quantiles is not None
    assert plausible(found.quantiles) is None
    service.ended(Ended(1, 70, True))
    assert service.known == 0
    LengthService().restore(service.dump())


def test_another_process_goes_on_with_what_was_learned(service: LengthService) -> None:
    for number in range(5):
        answer(service, ask(number))
        service.ended(Ended(number, 700, True))
    other = LengthService(clock=lambda: 1_000.0)
    other.restore(service.dump())
    other.assign("plain", "d1", other.load(trained().artifact))
    assert other.known == service.known > 0
    assert answer(other, ask(9)) == answer(service, ask(9))


@pytest.mark.parametrize(
    "state",
    [[], [b""], [b"{}"], [b"\x80"], [msgpack(["head", 1, bytes(32)])], [msgpack(["slice", 0, b""])]]
    + [[msgpack(["head", 2, bytes(32)]), *rest] for rest in ([msgpack(["slice", 3, b"\x90"])], [b"x"])],
)
def test_a_foreign_state_is_refused(state: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"."):
        LengthService().restore(state)


def test_what_is_learned_holds_no_text(service: LengthService) -> None:
    answer(service, ask(1))
    service.ended(Ended(1, 70, True))
    assert not any(word.encode() in b"".join(service.dump()) for word in TEXT.split() if len(word) > 4)


def test_a_file_that_is_no_model_is_refused(service: LengthService) -> None:
    with pytest.raises(ArtifactRefused):
        service.load(b"model")


def test_all_that_a_request_states_of_sampling_is_a_feature() -> None:
    stated: dict[str, object] = {"top_k": 40, "typical_p": 0.9, "repetition_penalty": 1.2}
    facts = RequestFacts(
        max_new_tokens=4_096, temperature=0.7, top_p=1.0, top_k=40, typical_p=0.9, repetition_penalty=1.2
    )
    assert answer(LengthService(), ask(1, **stated)).features == extract(TEXT, facts).pack()
    for field in stated:
        other = answer(LengthService(), ask(1, **{**stated, field: None})).features
        assert other != extract(TEXT, facts).pack()


def test_a_state_is_whole_whatever_is_learned_while_it_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of two rows, and between any two of them more is learned than is remembered at all."""
    monkeypatch.setattr(residuals, "SLICE", 2)
    monkeypatch.setattr("router_ext.predict.service.Memory", lambda **_: Memory(capacity=8))
    service = LengthService()
    number = 0

    def learn(n: int) -> None:
        nonlocal number
        for _ in range(n):
            number += 1
            answer(service, ask(number, f"{TEXT} {number % 40} {number % 7}" * 3, tenant=f"t{number % 3}"))
            service.ended(Ended(number, 100 + number, True))

    learn(30)
    for pause in (0, 1, 3, 20):
        slices = []
        for each in service.dump():
            slices.append(each)
            learn(pause)
        assert len(slices) > 5
        other = LengthService()
        other.restore(slices)
        assert 0 < other.known <= service.known
        again = LengthService()
        again.restore(other.dump())
        assert list(again.dump()) == list(other.dump())
        if not pause:
            assert list(other.dump()) == slices


def test_dear_prompts_are_left_for_the_next_batch() -> None:
    times = iter(0.0004 * tick for tick in range(1_000))
    service = LengthService(timer=lambda: next(times))
    questions = [ask(number) for number in range(10)]
    sizes = []
    while questions:
        answers, refused = service.answer(questions)
        assert [found.id for found in answers] == [question.id for question in questions[: len(answers)]]
        assert not refused
        sizes.append(len(answers))
        del questions[: len(answers)]
    assert sizes == [4, 4, 2]


def test_a_prompt_is_answered_however_dear_it_is() -> None:
    times = iter(range(1_000))
    assert len(LengthService(timer=lambda: next(times)).answer([ask(1), ask(2)])[0]) == 1
