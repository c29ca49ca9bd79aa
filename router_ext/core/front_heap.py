"""A heap whose smallest few entries lie in order beside it.

Decisions look at the same few heads again and again. Taken out of a binary heap and put back, each of them costs two
walks through all levels; from the sorted front it costs next to nothing.

Invariant: no entry of ``front`` is larger than one of ``rest``.
Cost: ``push`` and ``pop`` O(log n), and O(1) for entries among the smallest ``_MAX_FRONT``.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

_MAX_FRONT = 16
"""What one decision looks at, twice over. More would only make inserting dearer."""

E = TypeVar("E", bound=tuple[Any, ...])


class FrontHeap(Generic[E]):
    """See the module. Entries are tuples, ascending.

    Attributes:
        front: the smallest few, in order; may be empty while ``rest`` is not. rest: a heap of all others.
    """

    __slots__ = ("front", "rest")

    def __init__(self, entries: list[E] | None = None) -> None:
        self.front: list[E] = []
        self.rest: list[E] = [] if entries is None else entries
        heapify(self.rest)

    def __len__(self) -> int:
        return len(self.front) + len(self.rest)

    def push(self, entry: E) -> None:
        """Add an entry."""
        rest = self.rest
        if rest and entry > rest[0]:
            heappush(rest, entry)
            return
        front = self.front
        insort(front, entry)
        if len(front) > _MAX_FRONT:
            heappush(rest, front.pop())

    def first(self) -> E | None:
        """The smallest entry, None if there is none."""
        front = self.front
        if not front:
            if not self.rest:
                return None
            front.append(heappop(self.rest))
        return front[0]

    def peek(self) -> E | None:
        """The same, left where it lies: for who mostly moves it, not takes it."""
        return self.front[0] if self.front else self.rest[0] if self.rest else None

    def replace(self, entry: E) -> None:
        """Put an entry in the place of the smallest one (there is one): a pop and a push for the price of one."""
        if self.front:
            del self.front[0]
            self.push(entry)
        else:
            heapreplace(self.rest, entry)

    def pop(self) -> E:
        """Take the smallest entry out (there is one)."""
        return self.front.pop(0) if self.front else heappop(self.rest)

    def keep(self, is_kept: Callable[[E], bool]) -> None:
        """Drop all other entries. O(n)."""
        self.rest = [entry for entry in (*self.front, *self.rest) if is_kept(entry)]
        self.front = []
        heapify(self.rest)
