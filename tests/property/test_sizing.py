"""The cheapest slice against every other one, by adding up costs; and mutants that must be noticed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.core import sizing
from router_ext.core.sizing import KvPrice, cheapest
from router_ext.core.survival import Survival

Quantiles: TypeAlias = tuple[int, ...]
Cheapest: TypeAlias = Callable[..., int]

QUANTILES = st.lists(st.integers(1, 3_000), min_size=7, max_size=7).map(lambda values: tuple(sorted(values)))
EXAMPLES: list[Quantiles] = [
    (400,) * 7,
    (10, 20, 60, 150, 300, 700, 1_200),
    (50, 60, 80, 100, 150, 220, 300),
    (30, 60, 90, 120, 150, 180, 2_500),
    (250, 280, 330, 400, 480, 560, 620),
]
CAP, MOST = 4_096, 1_024
PROMPTS = (10, 100, 1_000, 5_000)
PRICES = (0.0005, 0.002, 0.008, 0.03)


def cost(quantiles: Quantiles, size: int, *, prompt: int, produced: int, price: float) -> float:
    """What a slice of this size costs, if whatever follows is sliced as cheaply as can be on a fine grid.

    Tokens processed again; by adding up steps, from the curve alone.
    """
    survival = Survival(quantiles)
    step = 32
    later: dict[int, float] = {}

    def of(start: int, new: int) -> float:
        end = min(start + new, CAP)
        reached = survival.beyond(start)
        steps = sum(survival.beyond(x + 8) for x in range(start, end, 16)) * 16 / reached
        goes_on = 0.0 if end >= CAP else survival.beyond(end) / reached
        return price * (prompt + end) * steps + goes_on * (prompt + end + 64 + (rest(end) if goes_on > 1e-4 else 0.0))

    def rest(start: int) -> float:
        if start not in later:
            later[start] = min(of(start, new) for new in range(step, MOST + 1, 4 * step))
        return later[start]

    return of(produced, size)


def is_cheap(choose: Cheapest, quantiles: Quantiles) -> bool:
    """No size on a grid of its own is cheaper by more than 4%, unless it ends where the answer surely goes on."""
    for prompt, price in ((100, 0.002), (100, 0.008), (1_000, 0.008)):
        size = choose(Survival(quantiles), prompt_tokens=prompt, produced=0, cap=CAP, most=MOST, price=price)
        mine = cost(quantiles, size, prompt=prompt, produced=0, price=price)
        others = range(max(16, quantiles[0]), MOST + 1, 96)
        best = min(cost(quantiles, other, prompt=prompt, produced=0, price=price) for other in others)
        if mine > 1.04 * best:
            return False
    return True


def sizes(choose: Cheapest, quantiles: Quantiles, produced: int = 0) -> list[list[int]]:
    """By prompt and price."""
    survival = Survival(quantiles)
    return [
        [choose(survival, prompt_tokens=prompt, produced=produced, cap=CAP, most=MOST, price=price) for price in PRICES]
        for prompt in PROMPTS
    ]


def follows_the_price(choose: Cheapest, quantiles: Quantiles) -> bool:
    """Dear KV makes slices shorter, and somewhere much shorter unless the length is certain."""
    table = sizes(choose, quantiles)
    is_falling = all(row[0] >= row[-1] for row in table)
    return is_falling and (quantiles[0] == quantiles[-1] or any(row[0] > 1.2 * row[-1] for row in table))


def spares_long_prompts(choose: Cheapest, quantiles: Quantiles) -> bool:
    """What is dear to send again is sent again more rarely: the level of the slice is no lower for a longer prompt."""
    table = sizes(choose, quantiles)
    return all(table[-1][at] >= table[0][at] for at in range(len(PRICES)))


def never_ends_for_sure(choose: Cheapest, quantiles: Quantiles) -> bool:
    """No fresh slice ends before the 0.05 quantile, if it may be that long."""
    return all(size >= min(quantiles[0], MOST) for row in sizes(choose, quantiles) for size in row)


def takes_a_certain_length(choose: Cheapest, quantiles: Quantiles) -> bool:
    """Where all quantiles agree the slice is the answer and 3% (where its tail is over), unless KV is nearly free."""
    if quantiles[0] != quantiles[-1]:
        return True
    dear = [row[1:] for row in sizes(choose, quantiles)[:-1]]
    return all(quantiles[0] <= size <= 1.03 * quantiles[0] + 1 for row in dear for size in row)


def looks_at_what_is_written(choose: Cheapest, quantiles: Quantiles) -> bool:
    """A continuation is judged by those answers that got as far (unless KV is nearly free)."""
    produced = quantiles[4]
    table = sizes(choose, quantiles, produced)
    return all(
        Survival(quantiles).beyond(produced + size) < Survival(quantiles).beyond(produced)
        and size <= max(64, 4 * (Survival(quantiles).total(produced, 0.95) - produced))
        for row in table[:-1]
        for size in row[1:]
    )


LAWS = [is_cheap, follows_the_price, spares_long_prompts, never_ends_for_sure, takes_a_certain_length]


def fixed_level(survival: Survival, *, produced: int, most: int, level: float = 0.97, **_: float) -> int:
    """The same quantile for everybody."""
    return min(most, survival.total(produced, level) - produced)


def without_future(survival: Survival, *, prompt_tokens: int, produced: int, cap: int, most: int, price: float) -> int:
    """Forgets that what goes on is sent again."""
    return cheapest(survival, prompt_tokens=prompt_tokens, produced=produced, cap=cap, most=most, price=1e3 * price)


def without_prompt(survival: Survival, *, prompt_tokens: int, produced: int, cap: int, most: int, price: float) -> int:
    """Holds and sends nothing but output."""
    del prompt_tokens
    return cheapest(survival, prompt_tokens=0, produced=produced, cap=cap, most=most, price=price)


def unconditional(survival: Survival, *, produced: int, **rest: float) -> int:
    """Forgets what has been written."""
    return (
        cheapest(survival, produced=0, **rest) if produced < 1 else max(1, cheapest(survival, produced=0, **rest) * 9)
    )  # type: ignore[arg-type]  # the same keywords


def thrifty(survival: Survival, **rest: float) -> int:
    """Divides whatever it can."""
    return min(64, cheapest(survival, **rest))  # type: ignore[arg-type]  # the same keywords


MUTANTS: list[tuple[Callable[[Cheapest, Quantiles], bool], Cheapest]] = [
    (is_cheap, fixed_level),
    (is_cheap, without_future),
    (is_cheap, thrifty),
    (follows_the_price, fixed_level),
    (spares_long_prompts, lambda survival, **rest: 64 if rest["prompt_tokens"] > 500 else cheapest(survival, **rest)),
    (never_ends_for_sure, thrifty),
    (takes_a_certain_length, thrifty),
    (looks_at_what_is_written, unconditional),
]


@pytest.mark.parametrize("law", [*LAWS, looks_at_what_is_written])
@pytest.mark.parametrize("quantiles", EXAMPLES)
def test_law(law: Callable[[Cheapest, Quantiles], bool], quantiles: Quantiles) -> None:
    assert law(cheapest, quantiles)


@pytest.mark.parametrize(("law", "mutant"), MUTANTS)
def test_a_mutant_breaks_its_law(law: Callable[[Cheapest, Quantiles], bool], mutant: Cheapest) -> None:
    assert not all(law(mutant, quantiles) for quantiles in EXAMPLES)


def by_trying(ends: list[int], left: list[float], prompt: int, most: int, price: float, kept: float) -> list[float]:
    """Cost by where a slice begins, over every pair of lengths (times the share of answers that get there)."""
    costs = [0.0] * len(ends)
    for begin in range(len(ends) - 2, -1, -1):
        steps, best = 0.0, math.inf
        for end in range(begin + 1, len(ends)):
            steps += (left[end - 1] + left[end]) / 2.0 * (ends[end] - ends[end - 1])
            if ends[end] - ends[begin] > most:
                break
            held = prompt + ends[end]
            again = (1.0 - kept) * (prompt + ends[begin]) + ends[end] - ends[begin] + 64
            best = min(best, price * held * steps + left[end] * again + costs[end])
        costs[begin] = best
    return costs


@given(
    QUANTILES,
    st.sampled_from(PROMPTS),
    st.integers(0, 3_500),
    st.sampled_from(PRICES),
    st.sampled_from((MOST, CAP)),
    st.sampled_from((0.0, 0.7, 1.0)),
)
def test_what_is_found_is_what_trying_all_finds(
    quantiles: Quantiles, prompt: int, produced: int, price: float, most: int, kept: float
) -> None:
    """Whether the longest slice forbids anything or not."""
    survival = Survival(quantiles)
    ends, left = sizing._ends(survival, produced, CAP, most)
    assert ends == sorted(set(ends))
    assert (ends[0], ends[-1], left[0], left[-1]) == (produced, CAP, 1.0, 0.0)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(left))
    size = cheapest(survival, prompt_tokens=prompt, produced=produced, cap=CAP, most=most, price=price, kept=kept)
    assert 1 <= size <= most
    costs = by_trying(ends, left, prompt, most, price, kept)
    end = ends.index(produced + size)
    steps = sum((left[at - 1] + left[at]) / 2.0 * (ends[at] - ends[at - 1]) for at in range(1, end + 1))
    held = prompt + ends[end]
    mine = price * held * steps + left[end] * ((1.0 - kept) * (prompt + produced) + size + 64) + costs[end]
    assert mine <= (1.0 + 1e-9) * costs[0]


@pytest.mark.parametrize("quantiles", EXAMPLES)
def test_slices_are_shorter_where_they_go_on_in_place(quantiles: Quantiles) -> None:
    """What is still held need not be sent again in full."""
    shares = (0.0, 0.5, 1.0)
    found = [
        cheapest(Survival(quantiles), prompt_tokens=1_000, produced=0, cap=CAP, most=MOST, price=0.002, kept=kept)
        for kept in shares
    ]
    assert found == sorted(found, reverse=True)
    if quantiles == EXAMPLES[1]:
        assert found[0] > 2 * found[-1]


def test_the_price_knows_how_many_go_on_in_place() -> None:
    price = KvPrice()
    assert price.onward == 0.0
    for number in range(600):
        price.observe_resumed(is_onward=number % 4 > 0)
    assert price.onward == pytest.approx(0.75, abs=0.02)


def test_the_price_follows_what_is_observed() -> None:
    price = KvPrice()
    assert (price.held_s, price.resent_s, price.level) == (None, None, 1.0)
    for _ in range(300):
        price.observe(step_s=0.03, prefill_rate=5_000.0, kv_tokens=10_000, level=0.7)
    assert price.ratio == pytest.approx(0.03 * 0.4 / 10_000 * 5_000.0)
    assert price.level == pytest.approx(0.7)
    price.observe(step_s=0.03, prefill_rate=1e9, kv_tokens=10_000, level=0.7)
    assert price.ratio < 1.03 * 0.03 * 0.4 / 10_000 * 5_000.0
    before = price.ratio
    price.observe(step_s=0.03, prefill_rate=None, kv_tokens=10_000, level=0.7)
    assert price.ratio == before
