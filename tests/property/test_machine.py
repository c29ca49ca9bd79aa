"""Any order of legal events leaves the scheduler's books in order: a state machine that hypothesis drives and shrinks.

Unlike the random pools, nothing here behaves like a server: tokens, ends, failures, outages and changes of the
configuration come in any order.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router_ext.core.actions import Action, Dispatch, Expire, Preempt, Reject, SetTimer
from router_ext.core.config import BackendConfig, PoolConfig, build_pool
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Cancelled,
    Event,
    Failed,
    Finished,
    Heir,
    Inherited,
    Preempted,
    Progressed,
    PromptMeasured,
    Reconfigured,
    RequestSpec,
    SliceEnded,
    Stepped,
    TimerFired,
)
from router_ext.core.fairness import POLICIES
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.scheduler import Scheduler

TENANTS = ["ten_a", "ten_b", "ten_c"]
GROUPS = ["grp_a", "grp_b"]
BACKENDS = ["bke_a", "bke_b", "bke_c"]
TIERS = ["chat", "batch"]
INDEX = st.integers(min_value=0, max_value=1_000)


@st.composite
def configurations(draw: st.DrawFn) -> PoolConfig:
    backends = draw(st.lists(st.sampled_from(BACKENDS), unique=True, max_size=3))
    tenants = draw(st.lists(st.sampled_from(TENANTS), unique=True, max_size=3))
    groups = draw(st.lists(st.sampled_from(GROUPS), unique=True, max_size=2))
    return build_pool(
        pool={
            "name": "p",
            "policy": draw(st.sampled_from(["slo-fair", "slo-fair", *POLICIES])),
            "rpm_limit": draw(st.sampled_from([2, 60])),
            "gamma": draw(st.sampled_from([0.0, 0.5])),
            "max_queued": draw(st.sampled_from([6, 1_000])),
            "backend_wait_s": 5.0,
            "max_slice_tokens": draw(st.sampled_from([8, 1_024])),
            "min_slice_tokens": 4,
            "aging_s": 1.0,
            "aging_ratio": 0.5,
            "headroom_ratio": 0.0,
            "max_preemptions": draw(st.sampled_from([0, 1, 100])),
            "theta_ratio": draw(st.sampled_from([0.0, 0.025])),
            "waste_ratio": 1.0,
        },
        backends=[
            {
                "backend": name,
                "kv_tokens": draw(st.integers(20, 200)),
                "block_size": draw(st.sampled_from([1, 4])),
                "max_concurrent_requests": draw(st.sampled_from([2, 100])),
                "prefill_budget_tokens": draw(st.sampled_from([10, 10_000])),
                "is_cordoned": draw(st.sampled_from([False, False, False, True])),
            }
            for name in backends
        ],
        tiers=[
            {"name": "chat", "rank": 1, "ttft_target_s": draw(st.sampled_from([None, 0.5, 10.0]))},
            {
                "name": "batch",
                "rank": draw(st.sampled_from([0, 5])),
                "max_queue_wait_s": draw(st.sampled_from([None, 3.0])),
            },
        ],
        tenants=[
            {
                "tenant": name,
                "weight": draw(st.sampled_from([0.5, 1.0, 3.0])),
                "group": draw(st.sampled_from([None, *groups])),
            }
            for name in tenants
        ],
        groups=[{"group": name, "weight": draw(st.sampled_from([0.5, 2.0]))} for name in groups],
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Knows of each request only whether it waits, runs or has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.specs: dict[str, RequestSpec] = {}
        self.place: dict[str, str] = {}
        self.output: dict[str, int] = {}
        self.backend_of: dict[str, str] = {}
        self.limit: dict[str, int] = {}
        self.stopping: set[str] = set()
        """Those of the running ones that were told to stop."""
        self.up: set[str] = set()
        self.trial: set[str] = set()
        """Those of them that are given one request at a time."""
        self.timer: float | None = None

    @initialize(config=configurations(), is_crowded=st.sampled_from([True, True, False]))
    def start(self, config: PoolConfig, is_crowded: bool) -> None:
        """``is_crowded``: one server is full of batch work and has shown its rate, so that running work may be cut."""
        if is_crowded:
            server = BackendConfig(backend=BackendId("bke_a"), kv_tokens=121, max_input_tokens=200)
            tiers = {name: replace(config.tiers[name], max_queue_wait_s=None) for name in config.tiers}
            config = replace(
                config,
                policy="slo-fair",
                backends={server.backend: server},
                tiers=tiers,
                max_preemptions=1,
                max_slice_tokens=1_024,
            )
        self.config = config
        self.scheduler = Scheduler(config)
        for backend in config.backends:
            self.send(BackendChanged(backend=backend, is_up=True))
            self.up.add(backend)
        if is_crowded:
            for tenant in "abab":
                self.arrive(
                    f"ten_{tenant}",
                    "batch",
                    10,
                    50,
                    preferred=1_024,
                    is_sliceable=True,
                    sequences=1,
                    prefix=(),
                    key="key_a",
                    agent=None,
                )
            for _ in range(2):
                self.flow(4)

    def send(self, event: Event) -> None:
        actions = self.scheduler.handle(event, self.now)
        for action in actions:
            self.carry_out(action)
        assert self.scheduler.audit() == []

    def carry_out(self, action: Action) -> None:
        match action:
            case Dispatch():
                name = action.request_id
                assert self.place[name] == "waiting"
                assert action.backend in self.up
                if action.backend in self.trial:
                    assert not [n for n in self.those("running") if self.backend_of[n] == action.backend]
                assert action.backend in self.config.backends
                assert not self.config.backends[action.backend].is_cordoned
                assert 1 <= action.slice_tokens <= self.specs[name].max_new_tokens - self.output[name]
                self.place[name] = "running"
                self.stopping.discard(name)
                self.backend_of[name] = action.backend
                self.limit[name] = self.output[name] + action.slice_tokens
            case Preempt():
                name = action.request_id
                assert self.place[name] == "running"
                assert name not in self.stopping
                assert action.backend == self.backend_of[name]
                assert self.specs[name].is_sliceable
                assert self.output[name] > 0
                self.stopping.add(name)
            case Reject() | Expire():
                assert self.place[action.request_id] == "waiting"
                assert action.detail
                self.place[action.request_id] = "ended"
            case SetTimer():
                assert self.timer is None or action.at_s < self.timer
                self.timer = action.at_s

    def those(self, place: str) -> list[str]:
        return [name for name, where in self.place.items() if where == place]

    def one(self, place: str, index: int) -> str | None:
        names = self.those(place)
        return names[index % len(names)] if names else None

    @rule(
        tenant=st.sampled_from(TENANTS),
        tier=st.sampled_from(TIERS),
        prompt=st.integers(1, 60),
        cap=st.integers(1, 100),
        preferred=st.sampled_from([4, 16, 1_024]),
        is_sliceable=st.sampled_from([True, True, False]),
        sequences=st.sampled_from([1, 1, 2]),
        prefix=st.sampled_from([(), (1,), (1, 2), (1, 3), (1, 2, 4), (2, 1, 1)]),
        key=st.sampled_from(["key_a", "key_a", "key_b", "key_c"]),
        agent=st.sampled_from([None, None, "agent_a", "agent_b"]),
    )
    def arrive(
        self,
        tenant: str,
        tier: str,
        prompt: int,
        cap: int,
        preferred: int,
        is_sliceable: bool,
        sequences: int,
        prefix: tuple[int, ...],
        key: str,
        agent: str | None,
    ) -> None:
        name = f"req_{len(self.specs)}"
        spec = RequestSpec(
            request_id=RequestId(name),
            tenant=TenantId(tenant),
            key=KeyId(key),
            agent_id=agent,
            tier=TierName(tier),
            prompt_tokens=prompt,
            max_new_tokens=cap,
            slice_tokens=preferred,
            is_sliceable=is_sliceable,
            num_sequences=sequences,
            prefix=prefix,
        )
        self.specs[name] = spec
        self.place[name] = "waiting"
        self.output[name] = 0
        self.send(Arrived(request=spec))

    @rule(index=INDEX, tokens=st.integers(1, 8))
    def progress(self, index: int, tokens: int) -> None:
        name = self.one("running", index)
        if name is None:
            return
        tokens = min(tokens, self.limit[name] - self.output[name])
        if tokens > 0:
            self.output[name] += tokens
            self.send(Progressed(request_id=RequestId(name), output_tokens=tokens))

    @rule(tokens=st.integers(1, 4))
    def flow(self, tokens: int) -> None:
        """A second in which every running request gets some tokens."""
        self.now += 1.0
        shown = []
        for name in self.those("running"):
            count = min(tokens, self.limit[name] - self.output[name])
            if count > 0:
                self.output[name] += count
                shown.append((RequestId(name), count))
        self.send(Stepped(tokens=shown))
        self.timer = None
        self.send(TimerFired())

    @rule(index=INDEX, dropped=st.integers(0, 2))
    def end_slice(self, index: int, dropped: int) -> None:
        name = self.one("running", index)
        if name is None or not self.specs[name].is_sliceable or self.output[name] == 0:
            return
        if self.output[name] >= self.specs[name].max_new_tokens:
            return
        dropped = min(dropped, self.output[name])
        self.output[name] -= dropped
        self.place[name] = "waiting"
        prompt = self.specs[name].prompt_tokens + self.output[name]
        self.send(SliceEnded(request_id=RequestId(name), dropped_tokens=dropped, next_prompt_tokens=prompt))

    @rule(index=INDEX, dropped=st.integers(0, 2), is_overtaken=st.booleans())
    def stop(self, index: int, dropped: int, is_overtaken: bool) -> None:
        """The stream of a request that was told to stop is closed; its end may have come first."""
        names = sorted(self.stopping)
        if not names:
            return
        name = names[index % len(names)]
        prompt = self.specs[name].prompt_tokens + self.output[name]
        self.stopping.discard(name)
        if is_overtaken or self.output[name] >= self.specs[name].max_new_tokens:
            self.place[name] = "ended"
            self.send(Finished(request_id=RequestId(name)))
        else:
            dropped = min(dropped, self.output[name])
            self.output[name] -= dropped
            self.place[name] = "waiting"
            prompt -= dropped
        self.send(Preempted(request_id=RequestId(name), dropped_tokens=dropped, next_prompt_tokens=prompt))

    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        if (name := self.one("running", index)) is not None:
            self.place[name] = "ended"
            self.send(Finished(request_id=RequestId(name)))

    @rule(index=INDEX, is_retryable=st.booleans())
    def fail(self, index: int, is_retryable: bool) -> None:
        if (name := self.one("running", index)) is not None:
            self.report_failure(name, is_retryable=is_retryable)

    def report_failure(self, name: str, *, is_retryable: bool) -> None:
        is_retryable = is_retryable and self.output[name] < self.specs[name].max_new_tokens
        self.place[name] = "waiting" if is_retryable else "ended"
        prompt = self.specs[name].prompt_tokens + self.output[name]
        self.send(Failed(request_id=RequestId(name), is_retryable=is_retryable, next_prompt_tokens=prompt))

    @rule(index=INDEX, place=st.sampled_from(["waiting", "running", "ended"]))
    def cancel(self, index: int, place: str) -> None:
        """A cancel may cross with the end of its request."""
        if (name := self.one(place, index)) is not None:
            self.place[name] = "ended"
            self.send(Cancelled(request_id=RequestId(name)))

    @rule(index=INDEX, place=st.sampled_from(["waiting", "running"]), prompt=st.integers(1, 60))
    def measure(self, index: int, place: str, prompt: int) -> None:
        name = self.one(place, index)
        if name is not None and self.output[name] == 0:
            self.specs[name] = replace(self.specs[name], prompt_tokens=prompt)
            self.send(PromptMeasured(request_id=RequestId(name), prompt_tokens=prompt))

    @rule(rounds=st.sampled_from([1, 1, 2]))
    def hand_over(self, rounds: int) -> None:
        """The process is replaced: another scheduler has the counters, and takes everybody in."""
        for _ in range(rounds):
            standings, closing = self.scheduler.leave(self.now)
            saved = json.loads(json.dumps(self.scheduler.save()))
            before = {(str(s.request_id), s.backend, s.is_preempting) for s in standings}
            held = self.held()
            leads = self.leads()
            self.scheduler = Scheduler(self.config)
            self.timer = None
            for backend in sorted(self.up & self.config.backends.keys()):
                is_on_trial = backend in self.trial
                self.send(BackendChanged(backend=BackendId(backend), is_up=True, is_on_trial=is_on_trial))
            self.scheduler.restore(saved, self.now)
            heirs = [Heir(request=self.specs[standing.request_id], standing=standing) for standing in standings]
            actions = self.scheduler.handle(Inherited(requests=heirs, closing=closing), self.now)
            assert self.scheduler.audit() == []
            taken, _ = self.scheduler.leave(self.now)
            started = {a.request_id for a in actions if isinstance(a, Dispatch)}
            told = {a.request_id for a in actions if isinstance(a, Preempt)}
            after = {
                (str(s.request_id), None if s.request_id in started else s.backend, s.is_preempting)
                for s in taken
                if s.request_id not in told
            }
            ended = {a.request_id for a in actions if isinstance(a, Expire)}
            assert after == {each for each in before if each[0] not in ended | told}
            if not actions:
                stated = self.config.backends
                assert all(self.held()[name] == tokens for name, tokens in held.items() if name in stated)
                assert self.leads() == pytest.approx(leads)
            for action in actions:
                self.carry_out(action)

    def leads(self) -> dict[str, float]:
        """How far each of the configured tenants in line that are in no group is ahead of the last of them.

        Of a tenant that is configured no more no counter is kept, so it says nothing of the others' either.
        """
        lines = [t for t in self.scheduler._tenants.by_id.values() if t.is_backlogged and t.unit is t]
        counters = {str(t.tenant_id): t.counter for t in lines if t.is_configured}
        floor = min(counters.values(), default=0.0)
        return {tenant: counter - floor for tenant, counter in counters.items()}

    def held(self) -> dict[str, int]:
        """Reserved tokens by backend."""
        return {str(b.backend): b.reserved_tokens for b in self.scheduler.stats().backends}

    @rule(backend=st.sampled_from(BACKENDS))
    def lose_backend(self, backend: str) -> None:
        if backend not in self.up:
            return
        self.up.discard(backend)
        self.send(BackendChanged(backend=BackendId(backend), is_up=False))
        for name in self.those("running"):
            if self.backend_of[name] == backend:
                self.report_failure(name, is_retryable=True)

    @rule(backend=st.sampled_from(BACKENDS), is_on_trial=st.booleans())
    def find_backend(self, backend: str, is_on_trial: bool) -> None:
        """It is back, or its trial begins or is over."""
        if backend in self.config.backends:
            self.up.add(backend)
            (self.trial.add if is_on_trial else self.trial.discard)(backend)
        self.send(BackendChanged(backend=BackendId(backend), is_up=True, is_on_trial=is_on_trial))

    @rule(config=configurations())
    def reconfigure(self, config: PoolConfig) -> None:
        self.config = config
        self.up &= set(config.backends)
        self.trial &= self.up
        self.send(Reconfigured(config=config))

    @rule(seconds=st.sampled_from([0.001, 0.05, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.send(TimerFired())

    @rule()
    def save_and_restore_elsewhere(self) -> None:
        """What was saved is taken over whole, but for what is not configured any more."""
        saved = json.loads(json.dumps(self.scheduler.save()))
        other = Scheduler(self.config)
        assert all("is not configured" in reason for reason in other.restore(saved, self.now))
        assert other.audit() == []
        again = json.loads(json.dumps(other.save()))
        for tenant, entry in again["tenants"].items():
            assert entry["ahead"] == pytest.approx(saved["tenants"][tenant]["ahead"])
        assert again["groups"] == pytest.approx(saved["groups"])

    @rule()
    def spurious_timer(self) -> None:
        self.timer = None
        self.send(TimerFired())

    @rule(index=INDEX)
    def explain(self, index: int) -> None:
        for place in ("waiting", "running", "ended"):
            if (name := self.one(place, index)) is not None:
                reasons = self.scheduler.explain(RequestId(name))
                moments = self.scheduler.timeline(RequestId(name))
                assert [moment.at_s for moment in moments] == sorted(moment.at_s for moment in moments)
                lines = [each.text for each in (*reasons, *moments)]
                assert not any(tenant in line for line in lines for tenant in TENANTS)

    @precondition(lambda self: hasattr(self, "scheduler"))
    @invariant()
    def nobody_is_forgotten(self) -> None:
        self.stopping &= set(self.those("running"))
        stats = self.scheduler.stats()
        assert stats.queued == len(self.those("waiting"))
        assert stats.running == len(self.those("running"))
        json.dumps(self.scheduler.snapshot())

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for name in self.those("running"):
            self.place[name] = "ended"
            self.send(Finished(request_id=RequestId(name)))
        while remaining := self.those("waiting") + self.those("running"):
            self.place[remaining[0]] = "ended"
            self.send(Cancelled(request_id=RequestId(remaining[0])))
        self.now += 3_600.0
        self.send(TimerFired())
        stats: Any = self.scheduler.stats()
        assert stats.queued == stats.running == 0
        assert all(backend.reserved_tokens == 0 for backend in stats.backends)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_a_successor_lifts_nobody_while_it_takes_requests_in() -> None:
    """Of both tenants one request runs and one waits, and one is ahead: taking in what runs empties queues."""
    machine = SchedulerMachine()
    config = build_pool(
        pool={"name": "p", "min_slice_tokens": 4, "headroom_ratio": 0.0, "waste_ratio": 1.0},
        backends=[],
        tiers=[{"name": "chat", "rank": 1}, {"name": "batch", "rank": 0}],
        tenants=[{"tenant": "ten_a", "weight": 1.0}, {"tenant": "ten_b", "weight": 0.5}],
        groups=[],
    )
    machine.start(config=config, is_crowded=True)
    assert machine.leads() == {"ten_a": 0.0, "ten_b": pytest.approx(16.0)}
    machine.hand_over(rounds=1)
    assert machine.leads() == {"ten_a": 0.0, "ten_b": pytest.approx(16.0)}
