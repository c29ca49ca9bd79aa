"""Waiting calls of agents, in the order of their agents' tags (``core.agents``).

The agent with the smallest tag is first; ties: whose first call came first. Within it, calls that ran before go first,
then by arrival. Tags never change, so neither does the order of the agents that are here.

Cost: O(log n) amortised per call, n the number of waiting agents.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeAlias

from router_ext.core.request import Request

if TYPE_CHECKING:
    from router_ext.core.agents import Agent

_SLACK = 64
"""Forgotten entries tolerated beside as many live ones, before the heap is rebuilt."""

_Entry: TypeAlias = "tuple[float, int, Agent]"
"""(tag, order of first calls, agent)."""

_Calls: TypeAlias = list[tuple[bool, int, Request]]
"""(is resumed, -seq, call), ascending: who goes first is last, where a list gives it up cheaply."""


class TagOrder:
    """See the module. Every request it is given has its agent."""

    __slots__ = ("_calls", "_heap", "_indexed", "_num")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        """One entry at most for each agent in ``_calls``, and forgotten ones."""
        self._calls: dict[Agent, _Calls] = {}
        self._indexed: set[Agent] = set()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def first(self) -> Request | None:
        """Who goes next."""
        agent = self._top()
        return None if agent is None else self._calls[agent][-1][2]

    def next(self, count: int) -> list[Request]:
        """Who goes next, alone: behind it tags decide, and nothing else may."""
        first = self.first()
        return [] if first is None else [first]

    def add(self, call: Request) -> None:
        """One more call of its agent waits."""
        agent = call.agent
        assert agent is not None
        self._num += 1
        calls = self._calls.get(agent)
        if calls is None:
            calls = self._calls[agent] = []
            if agent not in self._indexed:
                self._indexed.add(agent)
                heapq.heappush(self._heap, (agent.tag, agent.seq, agent))
        insort(calls, (call.is_resumed, -call.seq, call))

    def remove(self, call: Request) -> None:
        """The call waits no longer."""
        agent = call.agent
        assert agent is not None
        self._num -= 1
        calls = self._calls[agent]
        del calls[bisect_left(calls, (call.is_resumed, -call.seq))]
        if calls:
            return
        del self._calls[agent]
        if len(self._heap) > 2 * len(self._calls) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in self._calls]
            heapq.heapify(self._heap)
            self._indexed = set(self._calls)

    def sort(self) -> None:
        """The order is kept as calls come, in whatever order they do."""

    def requests(self) -> list[Request]:
        """All waiting calls, in order. O(n log n)."""
        agents = sorted(self._calls, key=lambda agent: (agent.tag, agent.seq))
        return [call for agent in agents for _, _, call in reversed(self._calls[agent])]

    def walk(self, num_agents: int, num_calls: int) -> Generator[Request, None, None]:
        """The first calls of the first agents, at most so many. Close it before anything is added or removed."""
        popped: list[_Entry] = []
        try:
            while len(popped) < num_agents and (agent := self._top()) is not None:
                popped.append(heapq.heappop(self._heap))
                for _, _, call in self._calls[agent][: -num_calls - 1 : -1]:
                    yield call
        finally:
            for entry in popped:
                heapq.heappush(self._heap, entry)

    def _top(self) -> Agent | None:
        """The waiting agent with the smallest tag; forgotten ones before it are dropped."""
        heap = self._heap
        while heap:
            agent = heap[0][2]
            if agent in self._calls:
                return agent
            heapq.heappop(heap)
            self._indexed.discard(agent)
        return None
