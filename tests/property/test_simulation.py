"""Determinism: the same suite and seed give the same decisions and the same recording, in any process.

Mutants: a clock that is read, and an order that follows hashes.
"""

from __future__ import annotations

import json

import pytest

from tests.support.interpreters import printed

_PROGRAM = """
import dataclasses, hashlib, json, sys, time
from router_ext.sim import engine
from router_ext.sim.suites import SuiteChoice
from router_ext.core.fairness import counters

mutant = sys.argv[1]
if mutant == "clock":
    handle = engine.Run._handle
    engine.Run._handle = lambda self, event, now: handle(self, event, now + time.perf_counter() % 1e-6)
elif mutant == "hashes":
    add = counters.MinIndex.add
    def by_hash(self, tenant):
        tenant.since = abs(hash(tenant.tenant_id))
        add(self, tenant)
    counters.MinIndex.add = by_hash

found = []
for suite, policy in (("overload-multi", "slo-fair"), ("mixed", "slo-fair"), ("overload-multi", "vtc")):
    suite = dataclasses.replace(SuiteChoice(name=suite).build(), duration_s=60.0)
    recording = engine.Run(suite, policy, 7).run()
    recording.cpu_s = 0.0
    whole = json.dumps(dataclasses.asdict(recording), sort_keys=True)
    found.append([recording.digest, hashlib.sha256(whole.encode()).hexdigest()])
print(json.dumps(found))
"""


def run(mutant: str, hash_seed: int) -> list[list[str]]:
    found: list[list[str]] = json.loads(printed(_PROGRAM, mutant, hash_seed=hash_seed))
    return found


def test_the_same_seed_gives_the_same_recording_in_any_process() -> None:
    assert run("none", 1) == run("none", 2)


@pytest.mark.parametrize("mutant", ["clock", "hashes"])
def test_a_mutant_is_caught(mutant: str) -> None:
    assert run(mutant, 1) != run(mutant, 2)
