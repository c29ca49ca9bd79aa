"""Who of several is next by service counter: the same rule at every level of the hierarchy.

Tenants of a pool, members of a group and keys of a tenant are *siblings* at their level. Of those that wait, the one
with the smallest counter is next; one that begins to wait is lifted to the smallest counter of the siblings that do,
or, if none does, to that of whoever stopped last: idling earns nothing.

Guarantee: at each level the bounds of ``core.bounds`` hold between siblings, because each level is the algorithm of
Sheng et al. (OSDI 2024) on its own, served whenever the level above picks it.

Cost: O(1) per charge; O(log n) amortised per look at who is next, n the number of siblings that wait. A level with
one sibling, as most tenants with one key, keeps no index at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from router_ext.core.front_heap import FrontHeap

_SLACK = 64
"""Forgotten entries tolerated beside as many live ones, before a heap is rebuilt."""

_NOBODY_ELSE = float("inf")


class Sibling(Protocol):
    """What has a counter and may wait. ``since``: number of its present period of waiting, 0 while it does not."""

    counter: float
    since: int


S = TypeVar("S", bound=Sibling)


def lift(counter: float, virtual_time: float) -> float:
    """Service counter of a tenant (member, key) that has just become backlogged.

    Whoever was idle must not return with stored credit, nor be punished for having been served before. Taking the
    larger of its own counter and virtual time gives both.

    Units: both arguments in service per weight.
    Invariants: result >= counter; result >= virtual_time.
    """
    return counter if counter > virtual_time else virtual_time


class MinIndex(Generic[S]):
    """Those that wait, by a key that mostly grows. Ties: whoever has waited longest.

    Since keys only grow, the heap may hold old ones: an entry that proves too small is moved down when it reaches the
    top.
    """

    __slots__ = ("_heap", "_key", "_live")

    def __init__(self, key: Callable[[S], float]) -> None:
        self._key = key
        self._heap: FrontHeap[tuple[float, int, S]] = FrontHeap()
        self._live: dict[S, float] = {}
        """Key of the one entry of each sibling that counts."""

    def __len__(self) -> int:
        return len(self._live)

    def add(self, sibling: S) -> None:
        """Enter one that has begun to wait (``since`` is set), or note that its key fell."""
        key = self._key(sibling)
        self._live[sibling] = key
        heap = self._heap
        heap.push((key, sibling.since, sibling))
        if len(heap) > 2 * len(self._live) + _SLACK:
            self.rebuild()

    def discard(self, sibling: S) -> None:
        """Forget one that waits no longer."""
        self._live.pop(sibling, None)

    def lowered(self, sibling: S) -> None:
        """The key of this one may have fallen."""
        live = self._live.get(sibling)
        if live is not None and self._key(sibling) < live:
            self.add(sibling)

    def rebuild(self) -> None:
        """Drop forgotten entries; O(n), paid for by as many forgotten ones."""
        for sibling in self._live:
            self._live[sibling] = self._key(sibling)
        self._heap = FrontHeap([(key, sibling.since, sibling) for sibling, key in self._live.items()])

    def top(self) -> S | None:
        """The one with the smallest key."""
        heap = self._heap
        live = self._live
        while (entry := heap.peek()) is not None:
            old, since, sibling = entry
            if sibling.since == since and live.get(sibling) == old:
                key = self._key(sibling)
                if key <= old:
                    return sibling
                live[sibling] = key
                heap.replace((key, since, sibling))
            else:
                heap.pop()
        return None

    def pop(self) -> tuple[float, int, S] | None:
        """Take the smallest entry out, to look at the next; give it back with ``restore``."""
        return self._heap.pop() if self.top() is not None else None

    def restore(self, entries: list[tuple[float, int, S]]) -> None:
        """Give popped entries back. One that stopped counting meanwhile is dropped."""
        for entry in entries:
            if entry[2].since == entry[1] and self._live.get(entry[2]) == entry[0]:
                self._heap.push(entry)

    def waiting(self) -> list[S]:
        """All that wait, next one first. O(n log n)."""
        return sorted(self._live, key=lambda sibling: (self._key(sibling), sibling.since))


class Siblings(Generic[S]):
    """One level: its members that wait, and who of them is next. Members are told to it by ``enter`` and ``leave``.

    Attributes:
        front: the one that is next, None while nobody waits. Always up to date if ``reorder`` is called as asked.
        rival: counter at which ``front`` has to be looked for anew; infinity while nobody else waits.
    """

    __slots__ = ("_forgotten_at", "_index", "_last_left", "_lead", "_next_since", "_only", "front", "rival")

    def __init__(self) -> None:
        self.front: S | None = None
        self.rival = _NOBODY_ELSE
        self._lead: float | None = 0.0
        self._only: S | None = None
        self._index: MinIndex[S] | None = None
        self._last_left: S | None = None
        self._forgotten_at = float("-inf")
        """Counter of the one that was last to leave, where that one is no sibling any more."""
        self._next_since = 1

    def floor(self) -> float:
        """What one that begins to wait is lifted to; minus infinity if nobody has ever waited."""
        front = self.front
        if front is not None:
            return front.counter
        return self._forgotten_at if self._last_left is None else self._last_left.counter

    def base(self) -> float:
        """Who is not above this owes its siblings nothing."""
        floor = self.floor()
        return 0.0 if floor == float("-inf") else floor - (self._lead or 0.0)

    def enter(self, sibling: S) -> None:
        """It has begun to wait: lift it."""
        if self._lead is None:
            self._lead = sibling.counter
        index = self._index
        if index is None:
            if self._only is None or self._only is sibling:
                self._only = self.front = sibling
                sibling.since = self._next_since
                return
            index = self._index = MinIndex(_counter)
            if self.front is not None:
                index.add(self.front)
        sibling.counter = lift(sibling.counter, self.floor() - self._lead)
        self._next_since += 1
        sibling.since = self._next_since
        index.add(sibling)
        front = self.front
        if front is None:
            self.front = sibling
        elif sibling.counter < front.counter:
            self.rival = front.counter
            self.front = sibling
        elif sibling.counter < self.rival:
            self.rival = sibling.counter

    def forget(self, sibling: S) -> None:
        """It does not wait, and is no sibling any more: its counter may mean something else from here on."""
        if self._last_left is sibling:
            self._last_left = None
            self._forgotten_at = sibling.counter
        if self._only is sibling:
            self._only = None

    def settle(self) -> None:
        """Counters were restored (``core.saved``): who comes back first lifts nobody to what it is ahead itself."""
        self._lead = None

    def settled(self) -> None:
        """Those that were expected back are here, or will not come."""
        self._lead = 0.0

    def leave(self, sibling: S) -> None:
        """It waits no longer."""
        sibling.since = 0
        self._last_left = sibling
        if self._index is not None:
            self._index.discard(sibling)
            if sibling is self.front:
                self._look()
        else:
            self.front = None

    def reorder(self) -> bool:
        """See who is next after the counter of ``front`` has reached ``rival``, or a counter has fallen.

        Returns:
            whether somebody else is.
        """
        before = self.front
        if self._index is not None:
            self._look()
        return self.front is not before

    def lowered(self, sibling: S) -> bool:
        """The counter of this one has fallen, by settlement. Whether somebody else is next."""
        if self._index is None or not sibling.since:
            return False
        self._index.lowered(sibling)
        return self.reorder()

    def level(self, siblings: Iterable[S]) -> None:
        """Make all start even, those that do not wait included: their service was counted in other units. O(n)."""
        for sibling in siblings:
            sibling.counter = 0.0
        if self._last_left is not None:
            self._last_left.counter = 0.0
        elif self._forgotten_at > float("-inf"):
            self._forgotten_at = 0.0
        if self._index is not None:
            self._index.rebuild()
            self._look()

    def waiting(self) -> list[S]:
        """All that wait, next one first. O(n log n)."""
        if self._index is not None:
            return self._index.waiting()
        return [] if self.front is None else [self.front]

    def _look(self) -> None:
        index = self._index
        assert index is not None
        first = index.pop()
        if first is None:
            self.front = None
            self.rival = _NOBODY_ELSE
            return
        self.front = first[2]
        second = index.top()
        self.rival = _NOBODY_ELSE if second is None else second.counter
        index.restore([first])


def _counter(sibling: Sibling) -> float:
    return sibling.counter
