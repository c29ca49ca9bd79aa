"""The compiled core decides exactly as its sources do: whole simulations, and events in any order.

Mutants: another rule in one policy, and one counter that is off by a billionth.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from router_ext.core.config import COST_MODELS, PoolConfig, build_pool
from router_ext.core.events import Event
from router_ext.core.scheduler import Scheduler
from tests.property import test_machine
from tests.property.test_machine import SchedulerMachine
from tests.support.cores import built, printed

_SUITES = ("overload-multi", "mixed", "burst", "weights", "tiers", "agents", "kv-overreserve", "adversary-flood")

_SIMULATIONS = """
import dataclasses, json, os, sys
from router_ext import compiled
compiled.activate(os.environ)
from router_ext.core.config import policy_names
from router_ext.core.fairness.slo_fair import SloFair
from router_ext.sim.engine import Run
from router_ext.sim.suites import SuiteChoice

suite, mutant = sys.argv[1:]
if mutant == "urgency":
    SloFair._may_pass = lambda self, queue, floor: True
found = {"core": compiled.running()}
shown = dataclasses.replace(SuiteChoice(name=suite).build(), duration_s=20.0)
for policy in policy_names():
    recording = Run(shown, policy, 7).run()
    recording.cpu_s = 0.0
    found[policy] = [recording.digest, json.dumps(dataclasses.asdict(recording), sort_keys=True)]
print(json.dumps(found))
"""

_EVENTS = """
import json, math, os, sys
from router_ext import compiled
compiled.activate(os.environ)
from router_ext.core import config, events
from router_ext.core.scheduler import Scheduler

file, mutant = sys.argv[1:]
names = {**vars(config), **vars(events), "inf": math.inf}
print(compiled.running())
for number, line in enumerate(open(file)):
    now, text = json.loads(line)
    told = eval(text, names)
    if isinstance(told, config.PoolConfig):
        scheduler = Scheduler(told)
        continue
    if mutant == "counter" and number >= 500 and scheduler._tenants.by_id:
        next(iter(scheduler._tenants.by_id.values())).counter += 1e-9
        mutant = "played"
    for action in scheduler.handle(told, now):
        print(action)
    print(json.dumps([scheduler.snapshot(), scheduler.save()], sort_keys=True))
    for request in scheduler.snapshot()["requests"]:
        print(scheduler.explain(request["request"]), scheduler.timeline(request["request"]))
"""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with what the state machine of the property tests told one scheduler after another, a line each.

    Under every cost model. Played by hypothesis once: what it tries depends on the constants of the sources loaded.
    """
    told: list[str] = []

    class Told(SchedulerMachine):
        known: Scheduler | None = None

        def send(self, event: Event) -> None:
            if self.scheduler is not self.known:
                self.known = self.scheduler
                told.append(json.dumps([self.now, repr(self.config)]))
            told.append(json.dumps([self.now, repr(event)]))
            super().send(event)

    def some_pool(**rows: Any) -> PoolConfig:
        config = build_pool(**rows)
        return replace(config, cost_model=COST_MODELS[len(repr(config)) % len(COST_MODELS)])

    checks, phases = list(HealthCheck), [Phase.generate]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_machine, "build_pool", some_pool)
        run_state_machine_as_test(
            Told,
            settings=settings(
                max_examples=80,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                suppress_health_check=checks,
                phases=phases,
            ),
        )
    file = tmp_path_factory.mktemp("events") / "events"
    file.write_text("\n".join(told))
    return file


def simulated(suite: str, core: str, mutant: str = "none") -> dict[str, list[str]]:
    found: dict[str, Any] = json.loads(printed(_SIMULATIONS, suite, mutant, core=core))
    assert found.pop("core") == core
    return found


def driven(events: Path, core: str, mutant: str = "none") -> list[str]:
    """What the events led to, a line each."""
    lines = printed(_EVENTS, str(events), mutant, core=core).splitlines()
    assert lines.pop(0) == core
    return lines


@pytest.mark.parametrize("suite", _SUITES)
def test_every_policy_simulates_the_same(suite: str) -> None:
    built()
    compiled, source = simulated(suite, "compiled"), simulated(suite, "source")
    assert len(source) >= 10
    for policy, recording in source.items():
        assert compiled[policy] == recording, policy


def test_another_rule_in_one_policy_is_noticed() -> None:
    whole, mutated = simulated("adversary-flood", "source"), simulated("adversary-flood", "source", "urgency")
    assert [policy for policy in whole if whole[policy] != mutated[policy]] == ["slo-fair"]


def test_events_in_any_order_lead_to_the_same_actions_and_state(events: Path) -> None:
    built()
    compiled, source = driven(events, "compiled"), driven(events, "source")
    assert len(source) > 2_000
    for line, (one, other) in enumerate(zip(compiled, source, strict=True)):
        assert one == other, f"line {line}"


def test_a_counter_that_differs_by_a_billionth_is_noticed(events: Path) -> None:
    assert driven(events, "source") != driven(events, "source", "counter")
