"""What the fleet says of its speed is what its backends have shown by now."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from router_ext.core.config import BackendConfig
from router_ext.core.events import Finished
from router_ext.core.fleet import Fleet
from router_ext.core.ids import BackendId, RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, down, pool, started, tokens, up


def follow(seed: int) -> None:
    """Prompts take other times on every backend and at every hour; backends come and go."""
    rng = random.Random(seed)
    scheduler = started(pool(kv=[2_000, 2_000, 2_000]))
    running: list[str] = []
    now = 0.0
    for number in range(120):
        now += rng.choice([0.01, 0.2, 1.5])
        name = f"r{number}"
        tier = rng.choice(["chat", "batch"])
        running += dispatched(scheduler.handle(arrival(name, tier=tier, prompt=rng.randint(10, 600)), now))
        judge(scheduler)
        rng.shuffle(running)
        if running and rng.random() < 0.8:
            now += rng.choice([0.01, 0.5, 3.0])
            first = running.pop()
            scheduler.handle(tokens(first), now)
            judge(scheduler)
            running += dispatched(scheduler.handle(Finished(request_id=RequestId(first)), now))
        if rng.random() < 0.1:
            backend = f"bke_{rng.randrange(3)}"
            is_up = scheduler._fleet.backends[BackendId(backend)].is_up
            running += dispatched(scheduler.handle(down(backend) if is_up else up(backend), now))
        judge(scheduler)


def judge(scheduler: Scheduler) -> None:
    """The line that is kept is that of a usable backend as it is."""
    fleet = scheduler._fleet
    shown = fleet.first_token_s(0), fleet.first_token_s(1_000) - fleet.first_token_s(0)
    lines = [backend.first_token_line() for backend in fleet.usable]
    if not lines:
        assert shown == (0.0, 0.0)
        return
    assert any(shown == pytest.approx((base, 1_000 * slope)) for base, slope in lines)


@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_backend_is_known_by_what_was_observed_last(seed: int) -> None:
    follow(seed)


def test_the_faster_one_is_told_from_the_slower() -> None:
    fleet = Fleet()
    stated = {BackendId(name): BackendConfig(backend=BackendId(name), kv_tokens=1_000) for name in ("slow", "fast")}
    fleet.apply(stated, ())
    for backend in fleet.backends.values():
        backend.is_up = True
    fleet.refresh(0.0)
    for name, rate in (("slow", 0.01), ("fast", 0.001)):
        for prompt in (10, 500, 900):
            fleet.backends[BackendId(name)].prefill_fit.observe(prompt, 0.02 + rate * prompt)
    fleet.speed_changed()
    assert fleet.first_token_s(400) == pytest.approx(0.42, rel=0.2)
    fleet.backends[BackendId("fast")].is_up = False
    fleet.refresh(1.0)
    assert fleet.first_token_s(400) == pytest.approx(4.02, rel=0.2)


def _keep_who_left(self: Any, now: float) -> bool:
    kept = self._fastest
    changed = original(self, now)
    self._fastest = kept
    return changed


original = Fleet.refresh


@pytest.mark.parametrize(
    ("name", "mutant"), [("speed_changed", lambda self: None), ("refresh", _keep_who_left)], ids=["observed", "left"]
)
def test_a_speed_that_is_out_of_date_is_noticed(
    name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fleet, name, mutant)
    with pytest.raises(AssertionError):
        any(map(follow, range(8)))
