"""Preemption: who is cut, for whom, who never is, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from router_ext.core.actions import Action, Dispatch, Preempt, SetTimer
from router_ext.core.admission import Backend, Gates
from router_ext.core.config import PoolConfig
from router_ext.core.events import (
    Cancelled,
    Event,
    Failed,
    Finished,
    Preempted,
    Reconfigured,
    SliceEnded,
    Stepped,
    TimerFired,
)
from router_ext.core.ids import BackendId, RequestId, TenantId, TierName
from router_ext.core.placement import Placement
from router_ext.core.queues import Tenant, TierQueue
from router_ext.core.request import Request
from router_ext.core.snapshot import PoolStats
from tests.unit.core.builders import arrival, dispatched, down, pool, said, started

STEP_S = 0.05
QUICK = [{"name": "chat", "rank": 1, "ttft_target_s": 0.3}, {"name": "batch", "rank": 10}]


class Play:
    """A scheduler and the clock of a server that gives every running request a token per step."""

    def __init__(self, config: PoolConfig, *, is_warm: bool = True) -> None:
        self.scheduler = started(config)
        self.now = 0.0
        self.running: dict[str, int] = {}
        """Tokens shown in the running slice."""
        self.prompts: dict[str, int] = {}
        self.shown: dict[str, int] = {}
        if is_warm:
            self.warm_up()

    def warm_up(self) -> None:
        """Let the pool show what it can do, so that the waste budget has its full capacity."""
        for index in range(40):
            self.arrive(f"w{index}", "w", prompt=1, cap=25)
        self.steps(24)
        for name in list(self.running):
            self.finish(name)
        assert self.stats().waste_tokens == 1_000.0

    def send(self, event: Event, *, after: float = 0.0) -> list[Action]:
        self.now += after
        actions = self.scheduler.handle(event, self.now)
        for action in actions:
            if isinstance(action, Dispatch):
                self.running[action.request_id] = 0
        assert self.scheduler.audit() == []
        return actions

    def arrive(self, name: str, tenant: str = "a", tier: str = "batch", **fields: Any) -> list[Action]:
        fields.setdefault("predicted_output_tokens", fields.get("cap", 100))
        self.prompts[name] = fields.get("prompt", 100)
        self.shown[name] = 0
        return self.send(arrival(name, tenant, tier, **fields))

    def steps(self, count: int) -> list[Action]:
        """Every running request shows so many tokens."""
        actions: list[Action] = []
        for _ in range(count):
            tokens = [(RequestId(name), 1) for name in self.running]
            for name in self.running:
                self.running[name] += 1
                self.shown[name] += 1
            actions += self.send(Stepped(tokens=tokens), after=STEP_S)
        return actions

    def decide(self) -> list[Action]:
        return self.send(TimerFired())

    def stop(self, name: str, dropped: int = 0) -> list[Action]:
        """Report that a stream was closed at the scheduler's word."""
        del self.running[name]
        self.shown[name] -= dropped
        return self.send(
            Preempted(
                request_id=RequestId(name),
                dropped_tokens=dropped,
                next_prompt_tokens=self.prompts[name] + self.shown[name],
            )
        )

    def finish(self, name: str) -> list[Action]:
        del self.running[name]
        return self.send(Finished(request_id=RequestId(name)))

    def stats(self) -> PoolStats:
        return self.scheduler.stats()

    def said(self, name: str) -> str:
        return " ".join(said(self.scheduler, name))


def cuts(actions: list[Action]) -> list[str]:
    return [str(action.request_id) for action in actions if isinstance(action, Preempt)]


def full(*, early: int = 40, late: int = 20, is_warm: bool = True, prefix: tuple[int, ...] = (), **fields: Any) -> Play:
    """One server of 1,000 tokens, full with two batch requests of tenant a: ``early`` and ``late``, in this order."""
    play = Play(pool(**fields), is_warm=is_warm)
    play.arrive("early", cap=400)
    play.steps(early - late)
    play.arrive("late", cap=400, prefix=prefix)
    play.steps(late)
    play.decide()
    assert set(play.running) == {"early", "late"}
    return play


# --- the deadline trigger --------------------------------------------------------------------------------------------


def test_an_urgent_head_that_no_release_serves_in_time_gets_what_costs_least() -> None:
    play = full()
    actions = play.arrive("chat", "b", "chat", prompt=50, cap=50)
    assert cuts(actions) == ["late"]
    assert dispatched(actions) == []
    assert dispatched(play.stop("late")) == []
    # The server needs the rest of its step to notice; then the head is first in line.
    timers = [action.at_s for action in play.decide() if isinstance(action, SetTimer)]
    play.now += 2 * STEP_S
    assert dispatched(play.decide()) == ["chat"]
    assert timers == [] or timers[-1] <= play.now
    assert play.stats().preempted_total == {"deadline": 1, "gap": 0}


def test_an_urgent_head_waits_for_a_release_that_is_expected_in_time() -> None:
    play = full(early=380, late=20)
    assert cuts(play.arrive("chat", "b", "chat", prompt=50, cap=50)) == []
    play.steps(19)
    assert dispatched(play.finish("early")) == ["chat"]


def test_an_expected_release_is_believed_until_the_last_moment_at_which_a_cut_still_helps() -> None:
    """The first request was to end after 400 tokens, and goes on."""
    play = Play(pool())
    play.arrive("early", cap=800, prompt=100, predicted_output_tokens=400)
    play.steps(380)
    play.arrive("late", cap=80, prompt=20, predicted_output_tokens=80)
    play.steps(1)
    play.decide()
    actions = play.arrive("chat", "b", "chat", prompt=50, cap=50)
    assert cuts(actions) == []
    wake = next(action.at_s for action in actions if isinstance(action, SetTimer))
    assert play.now + 1.5 < wake < play.now + 2.0
    arrived = play.now
    while play.now + STEP_S < wake:
        assert cuts(play.steps(1)) == []
    play.now = wake
    assert cuts(play.decide()) == ["late"]
    assert play.now < arrived + 2.0


def test_a_head_that_is_late_already_cuts_nobody() -> None:
    play = full(tiers=[{"name": "chat", "rank": 1, "ttft_target_s": 0.01}, {"name": "batch", "rank": 10}])
    assert cuts(play.arrive("chat", "b", "chat", prompt=50, cap=50)) == []


def test_kv_on_its_way_is_not_asked_for_twice() -> None:
    play = full()
    assert cuts(play.arrive("chat", "b", "chat", prompt=50, cap=50)) == ["late"]
    assert cuts(play.decide()) == []
    assert cuts(play.stop("late")) == []
    play.now += STEP_S / 10
    assert cuts(play.decide()) == []


def test_kv_on_its_way_counts_although_steps_have_become_shorter_since() -> None:
    """The instant was estimated while more ran; with one fewer a step would end before it."""
    play = Play(pool(tiers=[{"name": "chat", "rank": 1, "ttft_target_s": 0.08}, {"name": "batch", "rank": 10}]))
    for index in range(3):
        play.arrive(f"a{index}", prompt=100, cap=230, predicted_output_tokens=230)
    backend = play.scheduler._fleet.backends[BackendId("bke_0")]
    play.steps(20)
    play.decide()
    for _ in range(200):
        backend.step_fit.observe(1, 0.01)
    assert cuts(play.arrive("chat", "b", "chat", prompt=200, cap=50)) == ["a2"]
    lag_s = backend.cut_lag_s()
    assert cuts(play.stop("a2")) == []
    assert backend.cut_lag_s() < lag_s
    assert cuts(play.decide()) == []


def test_two_heads_need_more_than_one() -> None:
    play = full()
    assert cuts(play.arrive("chat_1", "b", "chat", prompt=400, cap=50)) == ["late"]
    assert cuts(play.arrive("chat_2", "c", "chat", prompt=400, cap=50)) == ["early"]


def test_a_small_second_head_fits_beside_the_first() -> None:
    play = full()
    assert cuts(play.arrive("chat_1", "b", "chat", prompt=50, cap=50)) == ["late"]
    assert cuts(play.arrive("chat_2", "c", "chat", prompt=50, cap=50)) == []


def test_where_a_stream_is_closing_is_claimed_before_where_one_is_only_expected_to_end() -> None:
    """Else somebody else could take what is free there already, and the cut would have freed too little."""
    config = pool(kv=[1_001, 1_001])
    expected, closing = (Backend(each) for each in config.backends.values())
    placement = Placement(Gates(headroom_ratio=0.0, is_on=True), {})
    tier = config.tiers[TierName("batch")]
    tenant = Tenant(config.tenants[TenantId("a")])
    requests = []
    for ticket, name in enumerate(("ends", "cut", "waits")):
        spec = arrival(name, prompt=500, cap=300, predicted_output_tokens=1).request
        request = Request(spec, tenant=tenant, queue=TierQueue(tenant, tier), seq=ticket, arrival_s=0.0)
        request.ticket, request.slice_tokens = ticket, 300
        requests.append(request)
    ends, cut, waits = requests
    expected.start(ends, 799, 0.0)
    closing.start(cut, 799, 0.0)
    closing.stop(cut)
    closing.close(cut.ticket, 5.0)
    assert ends.release_at_s < 1.0
    claim = placement.claim(waits, 300, [expected, closing], 0.0, is_urgent=True)
    assert claim is not None
    assert (claim.backend, claim.at_s) == (closing, 5.0)
    claim = placement.claim(waits, 300, [closing, expected], 0.0, is_urgent=True)
    assert claim is not None
    assert claim.backend is closing


# --- who is never cut ------------------------------------------------------------------------------------------------


def test_nobody_is_cut_if_all_together_free_too_little() -> None:
    play = Play(pool())
    play.arrive("whole", cap=800, prompt=100, is_sliceable=False)
    play.arrive("small", cap=50, prompt=20)
    play.steps(30)
    play.decide()
    assert cuts(play.arrive("chat", "b", "chat", prompt=200, cap=50)) == []


@pytest.mark.parametrize(
    ("guard", "first"),
    [
        ("cannot be resumed", {"is_sliceable": False}),
        ("late in its run", {"predicted_output_tokens": 49}),
        ("has a target itself", {"tier": "chat"}),
        ("too much to send again", {"prompt": 400, "cap": 500}),
    ],
)
def test_a_protected_request_is_passed_over(guard: str, first: dict[str, Any]) -> None:
    play = Play(pool(backend={"prefill_budget_tokens": 420}, tiers=QUICK))
    play.arrive("other", **{"prompt": 200, "cap": 300, "predicted_output_tokens": 300})
    play.arrive("guarded", **{"prompt": 50, "cap": 400, "predicted_output_tokens": 400, **first})
    play.steps(40)
    play.decide()
    assert set(play.running) == {"guarded", "other"}, guard
    assert cuts(play.arrive("chat", "b", "chat", prompt=100, cap=50)) == ["other"]


def test_whoever_would_be_cut_without_that_guard_is_the_other() -> None:
    """The case above would show nothing if the guarded request lost more anyway."""
    play = Play(pool(backend={"prefill_budget_tokens": 420}, tiers=QUICK))
    play.arrive("other", prompt=200, cap=300, predicted_output_tokens=300)
    play.arrive("guarded", prompt=50, cap=400, predicted_output_tokens=400)
    play.steps(40)
    play.decide()
    assert cuts(play.arrive("chat", "b", "chat", prompt=100, cap=50)) == ["guarded"]


@pytest.mark.parametrize(("limit", "expected"), [(93, []), (94, ["long"])])
def test_what_might_be_too_long_to_be_sent_again_is_left_alone(limit: int, expected: list[str]) -> None:
    """90 tokens may be 94 once their text is tokenised again."""
    play = Play(pool(backend={"max_input_tokens": limit}, tiers=QUICK))
    play.arrive("long", prompt=50, cap=920, predicted_output_tokens=900)
    play.steps(40)
    play.decide()
    assert cuts(play.arrive("chat", "b", "chat", prompt=50, cap=50)) == expected


def test_a_prompt_in_prefill_is_not_cut() -> None:
    play = full()
    play.finish("late")
    play.arrive("fresh", prompt=100, cap=400)
    assert cuts(play.arrive("chat", "b", "chat", prompt=50, cap=50)) == ["early"]


@pytest.mark.parametrize(("limit", "second"), [(1, []), (2, ["late"])])
def test_a_request_is_cut_so_often_and_no_more(limit: int, second: list[str]) -> None:
    play = full(max_preemptions=limit)
    play.arrive("chat_1", "b", "chat", prompt=50, cap=50)
    play.stop("late")
    play.now += 2 * STEP_S
    assert dispatched(play.decide()) == ["chat_1"]
    play.finish("early")
    assert "late" in play.running
    play.arrive("whole", prompt=100, cap=250, is_sliceable=False)
    play.finish("chat_1")
    play.steps(1)
    assert set(play.running) == {"late", "whole"}
    assert cuts(play.arrive("chat_2", "b", "chat", prompt=250, cap=50)) == second


@pytest.mark.parametrize("fields", [{"max_preemptions": 0}, {"policy": "fifo"}, {"policy": "vtc"}])
def test_preemption_can_be_switched_off_and_belongs_to_policies_that_want_it(fields: dict[str, Any]) -> None:
    play = full(**fields)
    assert cuts(play.arrive("chat", "b", "chat", prompt=50, cap=50)) == []


def test_it_is_switched_on_and_off_while_requests_run() -> None:
    play = full(max_preemptions=0)
    assert cuts(play.arrive("chat", "b", "chat", prompt=50, cap=50)) == []
    assert cuts(play.send(Reconfigured(config=pool()))) == ["late"]


# --- the gap trigger -------------------------------------------------------------------------------------------------


def ahead(**fields: Any) -> Play:
    """Tenant a fills the server and runs; then b comes, who gets nothing while a receives more and more."""
    play = Play(pool(tiers=[{"name": "batch", "rank": 10}], **fields))
    for index in range(4):
        play.arrive(f"a{index}", prompt=100, cap=150)
    play.steps(10)
    play.arrive("a4", prompt=100, cap=150)
    play.arrive("b0", "b", prompt=100, cap=100)
    play.decide()
    return play


def test_a_tenant_ahead_of_the_floor_by_more_than_theta_is_cut_for_the_one_in_turn() -> None:
    """U' is 2,002, theta 50: seven steps of four running requests bring a tenant that far ahead."""
    play = ahead()
    assert cuts(play.steps(5)) == []
    actions = play.steps(5) + play.decide()
    assert cuts(actions) == ["a3"]
    play.stop("a3")
    play.now += 2 * STEP_S
    assert dispatched(play.decide()) == ["b0"]
    assert play.stats().preempted_total == {"deadline": 0, "gap": 1}


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_scaling_all_weights_changes_nothing(factor: float) -> None:
    play = ahead(tenants={"a": factor, "b": factor})
    assert cuts(play.steps(5)) == []
    assert cuts(play.steps(5) + play.decide()) == ["a3"]


def test_a_larger_theta_waits_longer() -> None:
    play = ahead(theta_ratio=0.25)
    assert cuts(play.steps(10) + play.decide()) == []


def test_the_gap_trigger_leaves_half_of_the_budget_to_deadlines() -> None:
    """A third cut would be affordable, but not out of the upper half."""
    tiers = [{"name": "chat", "rank": 1, "ttft_target_s": 2.0}, {"name": "batch", "rank": 10}]
    play = Play(pool(kv=9_801, tiers=tiers, theta_ratio=0.0, waste_ratio=0.0))
    # One request with a target makes the tier active.
    play.arrive("chat", "b", "chat", prompt=10, cap=2)
    play.steps(2)
    play.finish("chat")
    for index in range(20):
        play.arrive(f"a{index}", prompt=200, cap=300)
    play.steps(20)
    for index in range(10):
        play.arrive(f"b{index}", "b", prompt=200, cap=300)
    level = play.stats().waste_tokens
    assert level == 1_000.0
    seen: list[str] = []
    for _ in range(40):
        for name in cuts(play.steps(1) + play.decide()):
            seen.append(name)
            play.stop(name)
        if play.stats().waste_tokens <= level / 2:
            break
    spent = play.stats().waste_tokens
    assert seen
    assert spent <= level / 2
    for _ in range(10):
        assert cuts(play.steps(1) + play.decide()) == []


def alternating(**fields: Any) -> list[int]:
    """Cuts in each sixth of a run of two equal tenants that always have work of just above half of the server."""
    play = Play(pool(tiers=[{"name": "batch", "rank": 10}], max_preemptions=100, **fields))
    live: dict[str, list[str]] = {"a": [], "b": []}
    counts, arrived = [0] * 6, 0
    for step in range(3_000):
        for tenant, names in live.items():
            while len(names) < 2:
                arrived += 1
                names.append(f"{tenant}{arrived}")
                play.arrive(names[-1], tenant, prompt=40, cap=960)
        for name in cuts(play.steps(1) + play.decide()):
            counts[step // 500] += 1
            play.stop(name)
        play.decide()
        assert len(play.running) <= 1
        for name in [name for name in play.running if play.shown[name] >= 960]:
            play.finish(name)
            live[name[0]].remove(name)
    return counts


def test_two_tenants_that_alternate_just_above_half_stop_cutting_each_other() -> None:
    """What may be computed again is soon spent, and is not earned back by what the pair delivers."""
    first, *later = alternating(waste_ratio=0.0)
    assert first > 3
    assert later == [0] * 5
    assert sum(alternating()[1:]) <= 1


def test_with_a_budget_that_pays_for_all_they_go_on() -> None:
    assert sum(alternating(waste_ratio=1.0)[1:]) > 3


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_nothing_is_cut_before_the_pool_has_shown_its_rate() -> None:
    play = Play(pool(), is_warm=False)
    play.arrive("first", cap=400)
    play.arrive("second", cap=400)
    play.steps(5)
    assert cuts(play.arrive("chat", "b", "chat", prompt=50, cap=50)) == []
    assert play.stats().waste_tokens == 0.0


def test_the_estimate_is_taken_at_the_cut_and_settled_when_the_victim_starts_again() -> None:
    play = full(waste_ratio=0.0)
    before = play.stats().waste_tokens
    play.arrive("chat", "b", "chat", prompt=50, cap=50)
    assert play.stats().waste_tokens == pytest.approx(before - 120)
    play.stop("late", dropped=2)
    play.now += 2 * STEP_S
    play.decide()
    assert play.stats().recomputed_tokens_total == 0
    assert dispatched(play.finish("early")) == ["late"]
    assert play.stats().waste_tokens == pytest.approx(before - 118)
    assert play.stats().recomputed_tokens_total == 118
    # The tenant paid for its prompts and its output once; the two tokens dropped are paid for already.
    paid = play.stats().tenants[0]
    assert (paid.prompt_tokens_total, paid.output_tokens_total) == (200, 60)
    play.steps(2)
    assert play.stats().tenants[0].output_tokens_total == 60
    play.steps(1)
    assert play.stats().tenants[0].output_tokens_total == 61


def test_a_prompt_that_is_probably_still_cached_is_not_counted() -> None:
    play = full(waste_ratio=0.0, prefix=(1,))
    before = play.stats().waste_tokens
    play.arrive("chat", "b", "chat", prompt=50, cap=50)
    play.stop("late")
    assert dispatched(play.finish("early")) == ["chat"]
    play.now += 2 * STEP_S
    assert dispatched(play.decide()) == ["late"]
    assert play.stats().recomputed_tokens_total == 120 - 64
    assert play.stats().waste_tokens == pytest.approx(before - 120 + 64)


@pytest.mark.parametrize("overtaker", ["finish", "slice end", "cancel", "failure", "retry"])
def test_a_cut_that_was_overtaken_or_never_resumed_costs_nothing(overtaker: str) -> None:
    play = full(waste_ratio=0.0)
    before = play.stats().waste_tokens
    assert cuts(play.arrive("chat", "b", "chat", prompt=50, cap=50)) == ["late"]
    name = RequestId("late")
    events: dict[str, Event] = {
        "finish": Finished(request_id=name),
        "slice end": SliceEnded(request_id=name, dropped_tokens=0, next_prompt_tokens=120),
        "cancel": Cancelled(request_id=name),
        "failure": Failed(request_id=name, is_retryable=False),
        "retry": Failed(request_id=name, is_retryable=True, next_prompt_tokens=120),
    }
    play.send(events[overtaker])
    assert play.stats().waste_tokens == before
    # The answer to the cut comes after what overtook it, and is about nobody.
    play.send(Preempted(request_id=name, dropped_tokens=0, next_prompt_tokens=120))
    play.now += 2 * STEP_S
    play.decide()
    assert play.stats().recomputed_tokens_total == 0
    assert "chat" in play.running


def test_a_victim_that_leaves_while_it_waits_costs_nothing() -> None:
    play = full(waste_ratio=0.0)
    before = play.stats().waste_tokens
    play.arrive("chat", "b", "chat", prompt=50, cap=50)
    play.stop("late")
    play.send(Cancelled(request_id=RequestId("late")))
    assert play.stats().waste_tokens == before


def test_the_budget_refills_from_output() -> None:
    play = full(waste_ratio=0.5)
    play.arrive("chat", "b", "chat", prompt=50, cap=50)
    spent = play.stats().waste_tokens
    play.stop("late")
    play.steps(20)
    play.decide()
    assert play.stats().waste_tokens == pytest.approx(spent + 0.5 * (20 + 18), abs=1.0)


def test_more_room_is_kept_for_urgent_heads_once_cuts_have_become_dear() -> None:
    play = full(waste_ratio=0.0)
    gates = play.scheduler._decider._gates
    assert not gates.is_waste_low
    assert cuts(play.arrive("chat", "b", "chat", prompt=500, cap=50)) == ["late", "early"]
    assert play.stats().waste_tokens == 740.0
    play.stop("late")
    assert gates.is_waste_low


def test_an_empty_budget_cuts_nobody() -> None:
    play = full(early=45, late=20, waste_ratio=0.0, is_warm=False)
    level = play.stats().waste_tokens
    assert 0.0 < level < 120.0
    assert cuts(play.arrive("chat_1", "b", "chat", prompt=300, cap=50)) == ["late"]
    assert play.stats().waste_tokens <= 0.0
    assert cuts(play.arrive("chat_2", "c", "chat", prompt=400, cap=50)) == []


# --- afterwards ------------------------------------------------------------------------------------------------------


def test_a_victim_goes_on_before_fresh_requests_of_its_tenant() -> None:
    play = full()
    play.arrive("fresh", prompt=100, cap=400)
    play.arrive("chat", "b", "chat", prompt=50, cap=50)
    play.stop("late")
    play.now += 2 * STEP_S
    assert dispatched(play.decide()) == ["chat"]
    assert dispatched(play.finish("early"))[0] == "late"


def test_a_victim_does_not_come_back_as_backfill() -> None:
    """Tenant b is in turn and waits for more KV than is free; a's victim would fit, but it is not a's turn."""
    play = full(backfill_ratio=10.0)
    play.arrive("chat", "b", "chat", prompt=50, cap=50)
    play.stop("late")
    play.arrive("large", "b", prompt=600, cap=100)
    play.now += 2 * STEP_S
    assert dispatched(play.decide()) == ["chat"]
    assert dispatched(play.finish("chat")) == []
    assert play.stats().queued == 2


@pytest.mark.parametrize("is_reported", [False, True], ids=["told to stop", "stopped"])
def test_the_backend_dies_while_a_victim_stops(is_reported: bool) -> None:
    play = full()
    play.arrive("chat", "b", "chat", prompt=50, cap=50)
    if is_reported:
        play.stop("late")
    play.send(down())
    for name in list(play.running):
        del play.running[name]
        event = Failed(
            request_id=RequestId(name), is_retryable=True, next_prompt_tokens=play.prompts[name] + play.shown[name]
        )
        play.send(event)
    play.now += 1.0
    play.decide()
    stats = play.stats()
    assert (stats.queued, stats.running) == (3, 0)
    assert stats.backends[0].reserved_tokens == 0


def test_victim_and_beneficiary_are_told_why_without_names() -> None:
    play = full()
    actions = play.arrive("chat", "b", "chat", prompt=50, cap=50)
    cut = next(action for action in actions if isinstance(action, Preempt))
    assert cut.reason == "deadline: an urgent request could not start in time otherwise"
    play.stop("late")
    assert "told to stop once for others (deadline: an urgent request" in play.said("late")
    play.now += 2 * STEP_S
    play.decide()
    play.finish("early")
    assert "120 tokens were computed again, at the system's expense" in play.said("late")
    picture = play.scheduler.snapshot()
    entry = next(each for each in picture["requests"] if each["request"] == "late")
    assert (entry["num_preempted"], entry["cut_tokens"]) == (1, 0)
