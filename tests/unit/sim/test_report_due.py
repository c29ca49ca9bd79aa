"""What is due: dealing by weight, and its account over a run."""

from __future__ import annotations

import random

import pytest
from support.recordings import recording

from router_ext.sim.recording import Requests
from router_ext.sim.report.due import deal, due


def bisected(amount: float, wanted: list[float], weights: list[float]) -> list[float]:
    """The same by searching for the level."""
    low, high = 0.0, max(want / weight for want, weight in zip(wanted, weights, strict=True))
    for _ in range(200):
        level = (low + high) / 2
        if sum(min(want, level * weight) for want, weight in zip(wanted, weights, strict=True)) < amount:
            low = level
        else:
            high = level
    return [min(want, high * weight) for want, weight in zip(wanted, weights, strict=True)]


@pytest.mark.parametrize("seed", range(30))
def test_dealing_is_max_min_by_weight(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(1, 6)
    wanted = [rng.choice((0.0, rng.uniform(0.0, 100.0))) for _ in range(num)]
    weights = [rng.choice((0.1, 1.0, 3.0, 10.0)) for _ in range(num)]
    amount = rng.uniform(0.0, 1.5 * sum(wanted))
    shares, level = deal(amount, wanted, weights)
    assert shares == pytest.approx(bisected(amount, wanted, weights), abs=1e-6)
    assert level == pytest.approx(max(share / weight for share, weight in zip(shares, weights, strict=True)))


def demands(*rows: tuple[int, float, int]) -> Requests:
    """(tenant, arrival, tokens wanted)."""
    requests = Requests()
    for tenant, arrival, tokens in rows:
        requests.tenant.append(tenant)
        requests.arrival_s.append(arrival)
        requests.input_tokens.append(0)
        requests.wanted_tokens.append(tokens)
    return requests


def test_who_always_wants_more_gets_what_the_other_leaves() -> None:
    """One wants 2 tokens a second, the other everything; 10 a second are delivered, all of them to the other."""
    run = recording(rates=(0, 10), end_s=50)
    run.requests = demands((1, 0.0, 10_000), *((0, float(second), 2) for second in range(1, 51)))
    account = due(run)
    assert account.by_tenant[0][-1] == pytest.approx(2.0 * 2 * 50)
    assert account.by_tenant[1][-1] == pytest.approx(2.0 * 8 * 50)
    assert account.level[-1] == pytest.approx(2.0 * 8 * 50)


def test_nobody_is_owed_anything_for_idle_time() -> None:
    """Idle for 30 s, then backlogged beside the other: half of what comes after, nothing of what came before."""
    run = recording(rates=(0, 10), end_s=60)
    run.requests = demands((1, 0.0, 10_000), (0, 30.5, 10_000))
    account = due(run)
    assert account.by_tenant[0][30] == 0.0
    assert account.by_tenant[0][-1] == pytest.approx(2.0 * 10 * 30 / 2)


def test_what_is_dealt_is_what_was_delivered() -> None:
    run = recording(("a", "b", "c"), rates=(3, 5, 7), num_requests=400)
    account = due(run)
    for index in range(len(run.samples.at_s)):
        delivered = sum(run.service(tenant, index) for tenant in range(3))
        assert sum(course[index] for course in account.by_tenant) == pytest.approx(delivered)
