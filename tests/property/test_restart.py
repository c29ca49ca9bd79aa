"""Row 24: restarts that restore saved counters add at most one U' to any gap, however many there are.

Two siblings (tenants of a pool, members of a group, or keys of a tenant) always wait. Every so often the scheduler is
lost with everything that ran; what it had saved goes through JSON into another one, and the clients send everything
again, the one that was served more first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from router_ext.core.actions import Action, Dispatch, Preempt
from router_ext.core.bounds import pair_bound, peak_service
from router_ext.core.config import GroupConfig, PoolConfig
from router_ext.core.events import (
    Arrived,
    BackendChanged,
    Event,
    Finished,
    Progressed,
    RequestSpec,
    SliceEnded,
)
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.scheduler import Scheduler
from tests.property.tgi_steps import StepServer, Stream
from tests.unit.core.builders import pool

KV = 121
SIZES = {"a": (10, 110), "b": (5, 20)}
"""(prompt, output): a request of the first fills the server, five of the second do."""

LEVELS = ["tenants", "members", "keys"]

Restart = Callable[["Restarts"], None]


@dataclass
class Restarts:
    """Drives schedulers one after the other over the same logical backlog."""

    policy: str
    level: str
    weights: dict[str, float]
    delivered: dict[str, float] = field(default_factory=lambda: {"a": 0.0, "b": 0.0})
    low: float = 0.0
    high: float = 0.0
    now: float = 0.0

    def __post_init__(self) -> None:
        tenants = {"both": 1.0} if self.level == "keys" else self.weights
        config = pool(kv=KV, policy=self.policy, tenants=tenants, max_preemptions=0)
        if self.level == "members":
            shares = {name: replace(share, group="both") for name, share in config.tenants.items()}
            config = replace(config, tenants=shares, groups={"both": GroupConfig(group="both", weight=3.0)})
        self.config: PoolConfig = config
        self.begin(None)

    def begin(self, saved: object) -> None:
        """A scheduler, what it restores, and everybody's requests before its server is up."""
        self.server = StepServer(kv_tokens=KV, block_size=1)
        self.running: dict[str, tuple[str, int]] = {}
        self.num_sent = 0
        self.scheduler = Scheduler(self.config)
        if saved is not None:
            assert self.scheduler.restore(saved, self.now) == []
        for who in sorted(self.delivered, key=lambda who: -self.delivered[who] / self.weights[who]):
            for _ in range(8):
                self.arrive(who)
        self.send(BackendChanged(backend=BackendId("bke_0"), is_up=True))

    def arrive(self, who: str) -> None:
        self.num_sent += 1
        prompt, cap = SIZES[who]
        spec = RequestSpec(
            request_id=RequestId(f"{who}{self.num_sent}"),
            tenant=TenantId("both" if self.level == "keys" else who),
            key=KeyId(who),
            tier=TierName("batch"),
            prompt_tokens=prompt,
            max_new_tokens=cap,
        )
        self.send(Arrived(request=spec))

    def send(self, event: Event) -> None:
        actions: list[Action] = self.scheduler.handle(event, self.now)
        for action in actions:
            assert not isinstance(action, Preempt)
            if isinstance(action, Dispatch):
                who = action.request_id[0]
                prompt, cap = SIZES[who]
                done = self.running.pop(action.request_id, (who, 0))[1]
                self.charge(who, 0.0 if action.segment else float(prompt))
                self.running[action.request_id] = (who, done)
                self.server.open(Stream(action.request_id, prompt + done, action.slice_tokens, cap - done))

    def charge(self, who: str, service: float) -> None:
        self.delivered[who] += service
        gap = self.delivered["a"] / self.weights["a"] - self.delivered["b"] / self.weights["b"]
        self.low, self.high = min(self.low, gap), max(self.high, gap)

    def step(self) -> None:
        self.now += 0.05
        for name, what in self.server.step():
            request_id = RequestId(name)
            who, done = self.running[name]
            if what == "token":
                self.running[name] = (who, done + 1)
                self.charge(who, 2.0)
                self.send(Progressed(request_id=request_id, output_tokens=1))
            elif what == "end" or done >= SIZES[who][1]:
                del self.running[name]
                self.arrive(who)
                self.send(Finished(request_id=request_id))
            else:
                self.send(SliceEnded(request_id=request_id, dropped_tokens=0, next_prompt_tokens=SIZES[who][0] + done))

    def restart(self) -> None:
        self.begin(json.loads(json.dumps(self.scheduler.save())))

    @property
    def allowed(self) -> float:
        """The pair bound, and one U' for the restarts."""
        peak = peak_service(self.config)
        if self.level == "keys":
            return 3.0 * peak
        shares = list(self.config.tenants.values())
        pair = pair_bound(self.config, shares[0], shares[1])
        assert pair is not None
        return pair + peak / min(self.weights.values())

    def go(self, *, every: int, times: int, restart: Restart) -> float:
        """Largest drift over the whole time, as a share of what is allowed."""
        for _ in range(times):
            for _ in range(every):
                self.step()
            restart(self)
        return (self.high - self.low) / self.allowed


def everybody_at_zero(restarts: Restarts) -> None:
    restarts.begin({"version": 1, "cost_model": "linear", "tenants": {}})


def cases(policy: str, level: str) -> list[Restarts]:
    weights = [{"a": 1.0, "b": 1.0}] if level == "keys" else [{"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 0.5}]
    return [Restarts(policy, level, share) for share in weights]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("every", [15, 90, 120])
@pytest.mark.parametrize("policy", ["slo-fair", "vtc"])
def test_restarts_add_at_most_one_pool_of_service_to_a_gap(policy: str, every: int, level: str) -> None:
    for case in cases(policy, level):
        assert case.go(every=every, times=20, restart=Restarts.restart) <= 1.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", ["slo-fair", "vtc"])
def test_restoring_everybody_at_zero_would_add_as_much_at_every_restart(policy: str, level: str) -> None:
    """The mutant of the test above."""
    for case in cases(policy, level):
        assert case.go(every=90, times=20, restart=everybody_at_zero) > 1.0


def test_without_settling_whoever_returns_first_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the rule that a level settles."""
    monkeypatch.setattr("router_ext.core.fairness.counters.Counters.settle", lambda self: None)
    monkeypatch.setattr("router_ext.core.siblings.Siblings.settle", lambda self: None)
    for level in LEVELS:
        assert cases("vtc", level)[0].go(every=90, times=20, restart=Restarts.restart) > 1.0
