"""Random small pools with grammars and suspects: who is exposed is alone, and the bound holds with what stalls cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from router_ext.core import bounds
from router_ext.core.actions import Action, Dispatch
from router_ext.core.books import Books
from router_ext.core.events import Event, Failed
from router_ext.core.exposure import Exposure
from router_ext.core.placement import Placement
from tests.property.harness import Run, Scenario, scenario
from tests.property.oracle import SLACK, Job, LawBroken

STALL_RATIO = 0.2


class ExposedRun(Run):
    """Every third request has one of a few grammars; what fails may be a suspect. Judged apart from the product."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.odd = random.Random(self.scenario.seed + 3_000_003)
        self.grammars: dict[str, str | None] = {}
        self.suspects: set[str] = set()
        self.compiled: dict[str, set[str]] = {name: set() for name in self.servers}
        self.exposed: dict[str, str] = {}
        """Server to the stream that must be alone there."""
        self.exposed_suspects: set[str] = set()
        self.num_alone = 0
        self.fields = self.grammar_of

    def grammar_of(self, job: Job) -> dict[str, Any]:
        digest = f"g{self.odd.randrange(6)}" if self.odd.random() < 0.33 else None
        self.grammars[job.name] = digest
        return {"grammar": digest, "stall_s": 0.0 if digest is None else self.odd.choice([0.05, 0.5, 3.0])}

    def send(self, event: Event, *, decides: bool = True) -> None:
        if isinstance(event, Failed) and event.is_retryable and self.jobs[event.request_id].output == 0:
            if self.odd.random() < 0.7:
                self.suspects.add(event.request_id)
                event = replace(event, is_suspect=True)
            else:
                self.suspects.discard(event.request_id)
        super().send(event, decides=decides)

    def upstream(self, name: str, what: str) -> None:
        job = self.streams[name]
        if what == "token":
            self.shown(job)
        super().upstream(name, what)

    def shown(self, job: Job) -> None:
        if self.exposed.get(job.backend) == job.upstream:
            del self.exposed[job.backend]
        self.exposed_suspects.discard(job.upstream)
        self.suspects.discard(job.name)
        grammar = self.grammars[job.name]
        if grammar is not None:
            self.compiled[job.backend].add(grammar)

    def crash(self, name: str) -> None:
        super().crash(name)
        self.compiled[name].clear()

    def carry_out(self, action: Action) -> None:
        super().carry_out(action)
        if not isinstance(action, Dispatch):
            return
        job = self.jobs[action.request_id]
        server = self.servers[job.backend]
        # Who is in the server's own prefill, or behind it, has no first token: closed streams too until it notices.
        waiting = {s.name for s in [*server.queue, *server.running] if s.produced == 0} - {job.upstream}
        open_ones = waiting & self.streams.keys()
        alone = self.exposed.get(job.backend)
        if alone in waiting:
            raise LawBroken(f"alone: {job.name} was sent to {job.backend}, where {alone} is exposed")
        self.exposed.pop(job.backend, None)
        grammar = self.grammars[job.name]
        is_suspect = job.name in self.suspects
        self.exposed_suspects = {name for name in self.exposed_suspects if name in self.streams}
        if is_suspect and self.exposed_suspects:
            raise LawBroken(f"suspects: {job.name} is exposed together with {self.exposed_suspects}")
        if is_suspect or (grammar is not None and grammar not in self.compiled[job.backend]):
            self.num_alone += 1
            if open_ones:
                raise LawBroken(f"alone: {job.name} is exposed on {job.backend}, where {open_ones} wait")
            self.exposed[job.backend] = job.upstream
            if is_suspect:
                self.exposed_suspects.add(job.upstream)

    def step(self, step: int, arrivals: list[Any], *, with_faults: bool) -> None:
        super().step(step, arrivals, with_faults=with_faults)
        self.judge_bound()

    def judge_bound(self) -> None:
        """``c_f - min c <= (U' + S) / w_f + pass_f`` over those who wait, read from the product's own counters."""
        stats = self.scheduler.stats()
        config = self.scenario.config()
        waiting = [t for t in stats.tenants if t.queued]
        if len(waiting) < 2:
            return
        floor = min(t.raw_counter for t in waiting)
        for numbers in waiting:
            bound = bounds.counter_bound(config, config.tenants[numbers.tenant])
            assert bound is not None
            if numbers.raw_counter - floor > bound + SLACK:
                raise LawBroken(f"bound: {numbers.tenant} is {numbers.raw_counter - floor:g} ahead, {bound:g} allowed")


def case(seed: int, **options: Any) -> Scenario:
    found = scenario(seed, steps=250, with_faults=True, preemptive=seed % 2 == 0, **options)
    return replace(found, knobs={**found.knobs, "stall_ratio": STALL_RATIO}, fail_rate=0.03)


def run(seed: int, **options: Any) -> ExposedRun:
    outcome = ExposedRun(case(seed, **options), frozenset({"ledger", "server_queue_empty", "audit"}))
    outcome.go()
    return outcome


@pytest.mark.parametrize("seed", range(500, 516))
def test_the_exposed_are_alone_and_the_bound_holds(seed: int) -> None:
    outcome = run(seed)
    assert outcome.num_alone > 0
    assert all(job.outcomes for job in outcome.jobs.values()), "somebody waits for ever"


def run_many(seeds: range, options: dict[str, Any]) -> None:
    for seed in seeds:
        ExposedRun(case(seed, **options), frozenset({"ledger"})).go()


def not_alone(patch: pytest.MonkeyPatch) -> None:
    """The exposed start wherever there is room."""
    begin, exposes = Exposure.begin, Exposure.exposes
    beginning: list[bool] = []

    def began(self: Any, request: Any) -> None:
        beginning.append(True)
        begin(self, request)
        beginning.pop()

    patch.setattr(Exposure, "begin", began)
    patch.setattr(Exposure, "exposes", lambda self, request: bool(beginning) and exposes(self, request))


def joined(patch: pytest.MonkeyPatch) -> None:
    """Others are sent to where somebody is exposed."""
    original = Exposure.begin

    def begin(self: Any, request: Any) -> None:
        original(self, request)
        self.ticket = 0

    patch.setattr(Exposure, "begin", begin)


def all_suspects_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "_is_suspect_exposed", lambda self: False)
    patch.setattr(Books, "_hold", lambda self, request, now: self._come_back([request]))


def stalls_without_limit(patch: pytest.MonkeyPatch) -> None:
    """A stall is charged by its seconds, whether anybody felt it or not."""

    def charge(self: Any, request: Any, backend: Any) -> None:
        self.policy.charge(request, 1_000.0 * request.stall_s)

    patch.setattr(Books, "_charge_stall", charge)


MUTANTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = [
    ("alone", not_alone, {}),
    ("alone", joined, {}),
    ("suspects", all_suspects_at_once, {"num_servers": 3}),
    ("bound", stalls_without_limit, {"weighted": False, "with_targets": False, "passes": (0.0, 0.0)}),
]


@pytest.mark.parametrize(
    ("law", "mutant", "options"), [pytest.param(*row, id=f"{row[0]}-{row[1].__name__}") for row in MUTANTS]
)
def test_a_mutant_breaks_its_law(
    law: str, mutant: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(LawBroken, match=f"^({law}|audit)"):
        run_many(range(600, 616), options)
