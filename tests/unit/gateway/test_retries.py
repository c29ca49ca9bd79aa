"""The retry budget: what it grants, what draws on it, and that a failing pool is not sent more than its share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routers import backend
from support.scripted import Peer, World, running, stream, until

from router_ext.backends.fake import Ending, FakeBackend, Script
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.retries import WINDOW_S, RetryBudget
from router_ext.obs.metrics import BackendReading, Metrics, Readings


def test_the_floor_is_granted_without_traffic() -> None:
    budget = RetryBudget(ratio=0.2, floor=3)
    assert [budget.take(1.0) for _ in range(5)] == [True, True, True, False, False]
    assert (budget.granted, budget.refused, budget.left(1.0)) == (3, 2, 0)


def test_a_share_of_the_dispatches_is_granted() -> None:
    budget = RetryBudget(ratio=0.2, floor=0)
    for _ in range(50):
        budget.dispatched(1.0)
    assert budget.left(1.0) == 10
    assert sum(budget.take(1.0) for _ in range(50)) == 10


def test_the_window_slides() -> None:
    budget = RetryBudget(ratio=0.0, floor=1)
    assert budget.take(0.0)
    assert not budget.take(WINDOW_S - 0.01)
    assert budget.take(WINDOW_S + 0.01)


@given(
    events=st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=200),
    ratio=st.sampled_from([0.0, 0.2, 1.0]),
    floor=st.integers(0, 5),
)
def test_no_window_holds_more_than_the_budget(events: list[tuple[float, bool]], ratio: float, floor: int) -> None:
    """Counted apart: of what lies in the last window, to a bucket's width, retries are within floor and share."""
    budget = RetryBudget(ratio=ratio, floor=floor)
    now = 0.0
    dispatches: list[float] = []
    retries: list[float] = []
    for gap, is_retry in events:
        now += gap
        if is_retry:
            if not budget.take(now):
                continue
            retries.append(now)
            # A bucket goes when its first second is a window old; what is younger than that counts in full.
            sure = sum(at > now - WINDOW_S + 1.0 for at in retries)
            most = sum(at > now - WINDOW_S for at in dispatches)
            assert sure <= floor + ratio * most
        else:
            budget.dispatched(now)
            dispatches.append(now)
        assert budget.left(now) >= 0


class Failing(World):
    """Backends on which the next generations meet ``fates``, whatever they are; later ones are served."""

    def __init__(self, *, backends: int = 2) -> None:
        super().__init__()
        self.setup.backends = [backend(1), *(backend(n, f"number {n}") for n in range(2, backends + 1))]
        self.fates: list[Script] = []
        self.always: Script | None = None
        self.sent: list[str] = []

    def make_client(self, record: Any) -> FakeBackend:
        name = record.backend
        client = FakeBackend(lambda path, body: self.meet(name, path, body))
        self.client = client
        return client

    def meet(self, name: str, path: str, body: bytes) -> Script:
        if path != "/generate_stream":
            return self.play(path, body)
        self.sent.append(name)
        if self.always is not None:
            return self.always
        return self.fates.pop(0) if self.fates else self.generation


GARBAGE = Script(status=500, pieces=(b"<html>oops</html>",))
CUT = Script(ending=Ending.CUT)
REFUSED = Script(ending=Ending.REFUSED)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Failing]:
    async with running(tmp_path, Failing()) as made:
        assert isinstance(made, Failing)
        await until(lambda: len(engine_of(made).backends.up) == 2)
        yield made
        assert engine_of(made).scheduler.audit() == []
        assert not engine_of(made)._generations


def engine_of(world: World) -> PoolEngine:
    return world.router.engines["pol_main"]


def ask(world: World, *, path: str = "/generate_stream", **parameters: Any) -> Peer:
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 5, "details": True, **parameters}}
    return Peer(world, path, body)


async def test_a_pool_that_fails_whole_is_sent_a_fifth_more_at_most(world: Failing) -> None:
    engine = engine_of(world)
    engine.retries = RetryBudget(ratio=0.2, floor=2)
    world.always = GARBAGE
    for _ in range(60):
        # Each backend's breaker is another bound, and not the one looked at here.
        for member in engine.backends.up:
            member.stream_failures = 0
        peer = ask(world)
        assert b"error" in await peer.wait()
        assert peer.status == 502
    assert len(world.sent) <= 60 * 1.2 + 2
    assert engine.retries.refused > 0
    page = world.router.metrics.page().decode()
    assert f'fairlane_retries_refused_total{{model="main"}} {engine.retries.refused}' in page.replace(".0\n", "\n")
    assert 'fairlane_retry_budget_requests{model="main"} 0.0' in page


async def test_a_spent_budget_ends_a_suspect_with_its_error_and_not_with_a_verdict(world: Failing) -> None:
    engine_of(world).retries = RetryBudget(ratio=0.0, floor=0)
    world.fates = [CUT]
    peer = ask(world)
    assert b"closed the stream" in await peer.wait()
    assert (peer.status, len(world.sent)) == (502, 1)
    assert not engine_of(world).suspects.recent


async def test_a_refused_connection_costs_no_budget(world: Failing) -> None:
    engine_of(world).retries = RetryBudget(ratio=0.0, floor=0)
    world.fates = [REFUSED]
    peer = ask(world)
    assert b'"generated_tokens":5' in await peer.wait()
    assert peer.headers["x-fairlane-attempts"] == "2" if peer.headers else b"x-fairlane-attempts: 2" in peer.data


async def test_an_answer_that_has_begun_goes_on_without_the_budget(world: Failing) -> None:
    engine_of(world).retries = RetryBudget(ratio=0.0, floor=0)
    world.cut = Script(pieces=(b'[{"id":1},{"id":2},{"id":3},{"id":101},{"id":102}]',))
    world.fates = [stream(2, ending=Ending.CUT)]
    data = await ask(world, max_new_tokens=9).wait()
    assert b"error" not in data
    assert len(world.sent) == 2


@pytest.mark.parametrize(("path", "is_stream"), [("/generate_stream", True), ("/generate", False)])
async def test_attempts_are_told_and_billed_once(world: Failing, path: str, is_stream: bool) -> None:
    """The client package tries again by itself: each of its tries is a request, each of ours is none."""
    world.fates = [GARBAGE, GARBAGE]
    peer = ask(world, path=path)
    data = await peer.wait()
    assert b"x-fairlane-attempts: 3" in data if is_stream else peer.headers["x-fairlane-attempts"] == "3"
    stats = engine_of(world).stats()
    (tenant,) = [t for t in stats.tenants if t.tenant == "ten_alice"]
    assert (tenant.prompt_tokens_total, tenant.output_tokens_total) == (3, 5)
    assert world.router.ledger.pending_events == 1


async def test_slices_are_no_attempts(tmp_path: Path) -> None:
    world = Failing()
    world.setup.scheduling = {"max_slice_tokens": 2, "min_slice_tokens": 2}
    async with running(tmp_path, world):
        world.cut = Script(pieces=(b'[{"id":1},{"id":2},{"id":3},{"id":101},{"id":102}]',))
        data = await ask(world, max_new_tokens=9).wait()
        assert b"x-fairlane-attempts: 1" in data


def test_metrics_tell_where_a_breaker_stands() -> None:
    reading = BackendReading(
        pool="main",
        backend="b",
        is_up=True,
        running=0,
        reserved_tokens=0,
        kv_tokens=1,
        queue_size=None,
        breaker="half-open",
        openings=3,
    )
    page = Metrics(lambda: Readings(backends=[reading])).page().decode()
    assert 'fairlane_backend_breaker_state{backend="b",model="main"} 1.0' in page
    assert 'fairlane_backend_breaker_openings_total{backend="b",model="main"} 3.0' in page
