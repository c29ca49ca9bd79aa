"""What is on its way out of a backend is what a look at all that runs there finds. Mutants: notes that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from router_ext.core.admission import Backend
from router_ext.core.books import Books
from router_ext.core.events import Event
from router_ext.core.lifecycle import State, Trigger, advance
from tests.property.harness import scenario
from tests.property.oracle import LawBroken
from tests.unit.core.policies.load import Pool


def looked_for(backend: Backend, until_s: float) -> int:
    return sum(
        blocks
        for at_s, ticket, blocks in backend.releases
        if at_s <= until_s and (ticket in backend.closing or backend.running[ticket].state is State.PREEMPTING)
    )


class Watched(Pool):
    """A random pool with outages, cancels and forced cuts."""

    seen = 0

    def send(self, event: Event, *, decides: bool = True) -> None:
        super().send(event, decides=decides)
        for backend in self.scheduler._fleet.backends.values():
            for until_s in (self.now, self.now + 0.06, self.now + 0.3, float("inf")):
                blocks = looked_for(backend, until_s)
                self.seen += blocks > 0
                if backend.closing_blocks(until_s) != blocks:
                    raise LawBroken(f"leaving: {backend.closing_blocks(until_s)} blocks until {until_s}, not {blocks}")


def run(seed: int) -> Watched:
    pool = Watched(scenario(seed, steps=200, with_faults=True), cut_rate=0.03)
    pool.go()
    return pool


@pytest.mark.parametrize("seed", range(700, 706))
def test_blocks_on_their_way_out_are_counted(seed: int) -> None:
    assert run(seed).seen > 100


def _cut_without_a_note(self: Any, request: Any, lost_tokens: int, reason: str) -> None:
    request.state = advance(request.state, Trigger.PREEMPT)
    request.num_preempted += 1
    request.cuts = [*(request.cuts or ()), reason]
    self.waste.cut(request, lost_tokens)


def _never_forgotten(self: Any, request: Any) -> None:
    was_cut = request.ticket in self.cut
    original(self, request)
    if was_cut:
        self.cut.add(request.ticket)


original = Backend.stop


@pytest.mark.parametrize(
    ("kind", "name", "mutant", "said"),
    [
        (Books, "preempt", _cut_without_a_note, "leaving|told to stop"),
        (Backend, "stop", _never_forgotten, "told to stop"),
    ],
)
def test_a_note_that_is_wrong_is_noticed(
    kind: type, name: str, mutant: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, name, mutant)
    with pytest.raises(LawBroken, match=said):
        any(map(run, range(700, 706)))
