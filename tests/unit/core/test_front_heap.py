"""The heap with a sorted front gives entries out in order, whatever is done to it. Mutants: see ``MUTANTS``."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import pytest

from router_ext.core.front_heap import _MAX_FRONT, FrontHeap

Entry = tuple[float, int]


def played(seed: int, *, steps: int = 1_500) -> None:
    """Random operations, each answer compared with that of a sorted list."""
    rng = random.Random(seed)
    model: list[Entry] = sorted((rng.random(), number) for number in range(rng.choice([0, 3, 100])))
    heap: FrontHeap[Entry] = FrontHeap(list(model))
    for number in range(1_000, 1_000 + steps):
        # Few different keys, so that many are equal; mostly new ones of the size of the smallest, as in decisions.
        low = model[0][0] if model and rng.random() < 0.5 else 0.0
        entry = (low + rng.choice([0.0, rng.random() / 10, rng.randrange(4) / 4]), number)
        what = rng.random()
        if what < 0.4 or not model:
            heap.push(entry)
            model = sorted([*model, entry])
        elif what < 0.65:
            assert heap.pop() == model.pop(0)
        elif what < 0.75:
            assert heap.first() == model[0]
        elif what < 0.95:
            assert heap.peek() == model[0]
            heap.replace(entry)
            model = sorted([*model[1:], entry])
        else:
            bar = rng.random()
            heap.keep(lambda each, bar=bar: each[0] < bar or each[1] % 3 > 0)  # type: ignore[misc]
            model = [each for each in model if each[0] < bar or each[1] % 3 > 0]
        assert len(heap) == len(model)
        assert heap.front == sorted(heap.front)
        assert len(heap.front) <= _MAX_FRONT + 1
        assert not heap.front or not heap.rest or heap.front[-1] <= heap.rest[0]
        assert heap.peek() == (model[0] if model else None)
    assert [heap.pop() for _ in model] == model
    assert heap.first() is None


@pytest.mark.parametrize("seed", range(6))
def test_entries_come_in_order(seed: int) -> None:
    played(seed)


def _push_everything_behind(self: Any, entry: Entry) -> None:
    heapq.heappush(self.rest, entry)


def _push_everything_in_front(self: Any, entry: Entry) -> None:
    self.front.append(entry)
    self.front.sort()


def _replace_behind(self: Any, entry: Entry) -> None:
    heapq.heapreplace(self.rest, entry) if self.rest else self.front.__setitem__(0, entry)


def _keep_the_front(self: Any, is_kept: Callable[[Entry], bool]) -> None:
    self.rest = [each for each in self.rest if is_kept(each)]
    heapq.heapify(self.rest)


def _peek_behind(self: Any) -> Entry | None:
    return self.rest[0] if self.rest else self.front[0] if self.front else None


MUTANTS = {
    "push": [_push_everything_behind, _push_everything_in_front],
    "replace": [_replace_behind],
    "keep": [_keep_the_front],
    "peek": [_peek_behind],
}


@pytest.mark.parametrize(("name", "mutant"), [(name, each) for name, all_of in MUTANTS.items() for each in all_of])
def test_a_mutant_is_caught(name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrontHeap, name, mutant)
    with pytest.raises((AssertionError, IndexError)):
        any(map(played, range(6)))
