"""Which tokens may come, and with what probability, after TGI's processors and warpers."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from router_ext.devserver.engine import Sampled, Sampling, Sequence
from router_ext.devserver.grammars import ScriptedGuide
from router_ext.devserver.torch_sampling import choose, is_sampled


def draw(logits: list[float], prompt: list[int], output: list[int] | None = None, **sampling: Any) -> Sampled:
    options = Sampling(top_n_tokens=len(logits), **sampling)
    sequence = Sequence(sequence_id=0, prompt_ids=prompt, sampling=options, output_ids=output or [])
    generator = torch.Generator().manual_seed(options.seed) if is_sampled(options) else None
    (sample,) = choose(torch.tensor([logits]), [sequence], [generator])
    return sample


def softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def probabilities(sample: Sampled) -> dict[int, float]:
    return {token_id: math.exp(logprob) for token_id, logprob in sample.top}


LOGITS = [1.0, 3.0, -1.0, 2.0, 0.5, -2.0]


def test_greedy_takes_the_best_and_reports_its_probability() -> None:
    sample = draw(LOGITS, [0])
    assert sample.token_id == 1
    assert probabilities(sample) == pytest.approx(dict(enumerate(softmax(LOGITS))))
    assert [token_id for token_id, _ in sample.top] == [1, 3, 0, 4, 2, 5]


@pytest.mark.parametrize(
    ("sampling", "sampled"),
    [
        ({}, False),
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.5, "watermark": True}, False),
        ({"do_sample": True}, True),
        ({"temperature": 0.5}, True),
        ({"top_k": 3}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.9}, True),
    ],
)
def test_any_warper_switches_sampling_on(sampling: dict[str, Any], sampled: bool) -> None:
    assert is_sampled(Sampling(**sampling)) is sampled


def test_temperature_divides_the_logits() -> None:
    expected = dict(enumerate(softmax([x / 0.5 for x in LOGITS])))
    assert probabilities(draw(LOGITS, [0], temperature=0.5)) == pytest.approx(expected, abs=1e-6)


def test_top_k_keeps_k_and_what_ties_with_the_last() -> None:
    assert probabilities(draw(LOGITS, [0], top_k=2)).keys() == {1, 3}
    assert probabilities(draw([2.0, 1.0, 1.0, 0.0], [0], top_k=2)).keys() == {0, 1, 2}
    assert len(probabilities(draw(LOGITS, [0], top_k=10**9))) == len(LOGITS)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.7, 0.9, 0.999])
@pytest.mark.parametrize("size", [6, 5000])
def test_top_p_keeps_the_smallest_set_that_holds_it(top_p: float, size: int) -> None:
    rng = random.Random(size)
    logits = [rng.gauss(0, 2) for _ in range(size)]
    p = softmax(logits)
    kept, mass = set(), 0.0
    for token_id in sorted(range(size), key=lambda i: -p[i]):
        kept.add(token_id)
        mass += p[token_id]
        if mass >= top_p:
            break
    assert probabilities(draw(logits, [0], top_p=top_p)).keys() == kept


@pytest.mark.parametrize("mass", [0.05, 0.4, 0.95])
def test_typical_p_keeps_what_is_closest_to_the_entropy(mass: float) -> None:
    p = softmax(LOGITS)
    entropy = -sum(x * math.log(x) for x in p)
    kept, reached = set(), 0.0
    for token_id in sorted(range(len(p)), key=lambda i: abs(-math.log(p[i]) - entropy)):
        kept.add(token_id)
        reached += p[token_id]
        if reached >= mass:
            break
    assert probabilities(draw(LOGITS, [0], typical_p=mass)).keys() == kept


def test_repetition_penalty_lowers_what_was_seen_once_however_often() -> None:
    lowered = [1.0, 3.0 / 1.5, -1.0 * 1.5, 2.0, 0.5, -2.0]
    once = draw(LOGITS, [1], [2], repetition_penalty=1.5)
    often = draw(LOGITS, [1, 1, 2], [2, 1], repetition_penalty=1.5)
    assert probabilities(once) == pytest.approx(dict(enumerate(softmax(lowered))))
    assert probabilities(often) == pytest.approx(probabilities(once))


def test_frequency_penalty_lowers_by_the_share_of_prompt_and_output() -> None:
    lowered = [1.0, 3.0 - 2.0 * 3 / 4, -1.0, 2.0 - 2.0 / 4, 0.5, -2.0]
    sample = draw(LOGITS, [1, 3], [1, 1], frequency_penalty=2.0)
    assert probabilities(sample) == pytest.approx(dict(enumerate(softmax(lowered))), abs=1e-6)


def test_watermark_favours_half_of_the_vocabulary_by_the_token_before() -> None:
    def favoured(previous: int) -> set[int]:
        p = probabilities(draw([0.0] * 100, [9, previous], watermark=True))
        low, high = min(p.values()), max(p.values())
        assert high / low == pytest.approx(math.exp(2.0), rel=1e-4)
        return {token_id for token_id, x in p.items() if x > math.sqrt(low * high)}

    assert len(favoured(5)) == 50
    assert favoured(5) == favoured(5) != favoured(6)


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    sequence = Sequence(sequence_id=0, prompt_ids=[0], sampling=Sampling(do_sample=True))

    def series(seed: int, n: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [choose(torch.tensor([LOGITS]), [sequence], [generator])[0].token_id for _ in range(n)]

    counts, n = Counter(series(1, 4000)), 4000
    for token_id, p in enumerate(softmax(LOGITS)):
        assert abs(counts[token_id] - n * p) < 5 * math.sqrt(n * p * (1 - p))
    assert series(2**64 - 1, 20) == series(2**64 - 1, 20) != series(3, 20)


def test_rows_do_not_influence_each_other() -> None:
    options = [Sampling(), Sampling(top_p=0.5, seed=3), Sampling(repetition_penalty=1.5), Sampling(top_k=1, seed=4)]
    sequences = [Sequence(sequence_id=i, prompt_ids=[1], sampling=s) for i, s in enumerate(options)]

    def pick(rows: list[int]) -> list[tuple[int, float]]:
        seeded = [torch.Generator().manual_seed(options[i].seed) if is_sampled(options[i]) else None for i in rows]
        samples = choose(torch.tensor([LOGITS] * len(rows)), [sequences[i] for i in rows], seeded)
        return [(sample.token_id, sample.logprob) for sample in samples]

    assert pick([0, 1, 2, 3]) == [pick([i])[0] for i in range(4)]


def test_impossible_tokens_are_never_among_the_top() -> None:
    assert draw(LOGITS, [0], top_k=1).top == ((1, pytest.approx(0.0)),)


def test_top_tokens_include_ties_with_the_last() -> None:
    sequence = Sequence(sequence_id=0, prompt_ids=[0], sampling=Sampling(top_n_tokens=2))
    (sample,) = choose(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), [sequence], [None])
    assert {token_id for token_id, _ in sample.top} == {0, 1, 2}


def bound(guide: ScriptedGuide, **sampling: Any) -> tuple[Sequence, Sampled]:
    sequence = Sequence(sequence_id=0, prompt_ids=[0], sampling=Sampling(top_n_tokens=6, **sampling))
    sequence.guide, sequence.guide_state = guide, guide.initial
    generator = torch.Generator().manual_seed(1) if is_sampled(sequence.sampling) else None
    (sample,) = choose(torch.tensor([LOGITS]), [sequence], [generator])
    return sequence, sample


class AnyOf(ScriptedGuide):
    """Allows the ids of the script, all at once."""

    def allowed(self, state: int) -> tuple[int, ...]:
        return self._ids


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}, {"top_k": 1}, {"top_p": 0.5}, {"typical_p": 0.1}])
def test_a_grammar_leaves_what_it_allows(sampling: dict[str, Any]) -> None:
    sequence, sample = bound(AnyOf([0, 4], 5), **sampling)
    assert sample.token_id in (0, 4, 5)
    assert set(probabilities(sample)) <= {0, 4, 5}
    assert sum(probabilities(sample).values()) == pytest.approx(1)
    assert sequence.guide_state == 1


def test_an_only_token_is_certain() -> None:
    _, sample = bound(ScriptedGuide([3], 5))
    assert (sample.token_id, sample.logprob) == (3, 0.0)


def test_a_grammar_that_is_over_binds_nothing() -> None:
    sequence = Sequence(sequence_id=0, prompt_ids=[0], sampling=Sampling(), guide=ScriptedGuide([3], 5))
    (sample,) = choose(torch.tensor([LOGITS]), [sequence], [None])
    assert sample.token_id == 1
