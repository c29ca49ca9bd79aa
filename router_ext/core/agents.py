"""Agents: requests that serve one task of one user, ordered by when a fluid pool would be done with them.

Rule: an *agent* is all requests of one tenant that carry the same agent id; a request without one is an agent of one
call. In the *fluid reference* the pool's KV is shared by the active agents in proportion to their weights, so virtual
time runs at ``dV/dt = rate / sum of active weights`` and stands still while nobody is active. An agent that comes at
``a`` with cost ``C`` leaves the fluid pool at ``V = F``, its *tag*:

    F = V(a) + C / weight

The tag is made at the agent's first call and never again: neither progress nor later arrivals change it.

Cost of an agent: KV token-time, ``sum of p * d + d * (d + 1) / 2`` over its calls (prompt ``p``, output ``d``), which
is what its tokens hold over the steps they are held. Declared by the client, or predicted: the cost of the first call
at its predicted length times the mean number of calls of that tenant's last agents. Either is corrected by what that
tenant's last agents really cost over what was said of them, up to a factor of ``MAX_BIAS``.

The rate is ``SPEED`` times what the pool really delivers. A clock faster than the pool, if only by a few per cent, is
always done with everybody: then tags order by arrival alone.

Guarantee: tags are immutable and ``V`` never falls, so an arrival never reorders the agents that are there. An agent
whose cost is said too small goes ahead by the error, at the expense of its peers; a tenant that does so always, or
predictions that always err one way, gain nothing.

An agent is *over* when none of its calls has been here for ``QUIET_S``; a later call with its id begins another.

Cost: O(log n) amortised per agent, n the number of active ones; O(1) per call.

Units: ``rate`` is KV token-time (tokens x decode steps) per second; ``V`` and tags are KV token-time per weight.

Source: Justitia (arXiv 2510.17015): cost, fluid reference and tags. Predicted costs, their correction and the measured
rate are this product's own: on the simulator's ``agents`` an agent is done after 152 s in the mean with the KV tokens
per step as rate, 100 s with the measured one, 98 s with corrected costs, 96 s with ``SPEED`` 0.9.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from router_ext.core.ids import TenantId
from router_ext.core.queues import Tenant
from router_ext.core.request import Request

QUIET_S = 60.0
"""Between two stages an agent runs tools; longer than a minute and its next call is as good as a new task."""

SPEED = 0.9
"""Of the fluid pool, over the real one. Estimates err, and too slow costs little: the promise is that of a pool so much
slower, and small agents go ahead a little more."""

MAX_BIAS = 2.0
"""A tenant's agents count for at most so much more, or less, than is said of them."""

_MAX_QUIET = 8_192
"""Quiet agents remembered; beyond it the one that has been quiet longest is over."""

_MAX_COST = 1e12
"""No agent counts for more: 100,000 KV tokens held for ten million steps. One that claims more would stay in the fluid
pool for ever and slow virtual time down for all."""

_MAX_ACTIVE = 65_536
"""Agents in the fluid pool. Costs that promise more than is ever served (overestimates, cancelled work) would fill it
for ever; beyond this many, virtual time goes on to the smallest tag."""

_KEEP = 31.0 / 32.0
"""Habits are those of about the last thirty agents of a tenant."""


def call_cost(prompt_tokens: int, output_tokens: int) -> float:
    """KV token-time of one call: the prompt is held for every output token, each of those from its step on."""
    return prompt_tokens * output_tokens + output_tokens * (output_tokens + 1) / 2.0


class FluidClock:
    """Virtual time of the fluid reference.

    Attributes:
        virtual_time: ``V`` as of the last ``advance``. Never falls.
    """

    __slots__ = ("_active", "_entered", "_now", "_rate", "_weight", "virtual_time")

    def __init__(self, rate: Callable[[], float]) -> None:
        self.virtual_time = 0.0
        self._rate = rate
        self._now = 0.0
        self._active: list[tuple[float, int, float]] = []
        """(tag, order of entry, weight) of those the fluid pool still serves."""
        self._weight = 0.0
        self._entered = 0

    def advance(self, now: float) -> None:
        """Let the fluid pool work until ``now``; those it is done with leave. An earlier instant changes nothing."""
        elapsed = now - self._now
        if elapsed <= 0.0:
            return
        self._now = now
        active = self._active
        if not active:
            return
        work = SPEED * self._rate() * elapsed
        while active:
            tag, _, weight = active[0]
            needed = (tag - self.virtual_time) * self._weight
            if needed > work:
                self.virtual_time += work / self._weight
                return
            work -= needed
            self.virtual_time = tag
            heapq.heappop(active)
            self._weight -= weight
        # The sum of the weights is exact again.
        self._weight = 0.0

    def enter(self, cost: float, weight: float) -> float:
        """Tag of an agent that comes at the present virtual time."""
        tag = self.virtual_time + cost / weight
        self._entered += 1
        self._weight += weight
        heapq.heappush(self._active, (tag, self._entered, weight))
        if len(self._active) > _MAX_ACTIVE:
            self.virtual_time, _, done = heapq.heappop(self._active)
            self._weight -= done
        return tag

    def __len__(self) -> int:
        return len(self._active)


class Habits:
    """What the last agents of one tenant were like. Older ones fade.

    Attributes:
        num, num_calls: how many with an id are remembered (at most 32), and the sum of their calls.
        said, real: sums of costs, of all agents.
    """

    __slots__ = ("num", "num_calls", "real", "said")

    def __init__(self) -> None:
        self.num = self.num_calls = self.said = self.real = 0.0

    def observe(self, agent: Agent) -> None:
        """An agent is over."""
        if agent.key is not None:
            self.num = _KEEP * self.num + 1.0
            self.num_calls = _KEEP * self.num_calls + agent.num_calls
        self.said = _KEEP * self.said + agent.said
        self.real = _KEEP * self.real + agent.real

    def calls_per_agent(self) -> float:
        """Their mean number of calls; 1 before the first."""
        return self.num_calls / self.num if self.num else 1.0

    def bias(self) -> float:
        """What a cost that is said has to be multiplied by."""
        return min(MAX_BIAS, max(1.0 / MAX_BIAS, self.real / self.said)) if self.said > 0.0 else 1.0


class Agent:
    """One agent, from its first call until it is over.

    Attributes:
        tag: its place in the order, fixed for ever; ``seq``: of its first call, the tie-break.
        said, real: its cost as declared or predicted, and what its calls have cost so far.
        num_calls: calls so far. num_open: those of them that wait or run.
        is_whole: no call of it was given up.
    """

    __slots__ = ("is_whole", "key", "num_calls", "num_open", "quiet_since_s", "real", "said", "seq", "tag", "tenant")

    def __init__(self, key: tuple[TenantId, str] | None, tenant: Tenant, seq: int) -> None:
        self.key = key
        self.tenant = tenant
        self.seq = seq
        self.tag = self.said = self.real = 0.0
        self.num_calls = 0
        self.num_open = 0
        self.is_whole = True
        self.quiet_since_s = 0.0


class Agents:
    """Every agent that is not over. One per pool; outlives policies, as service counters do.

    Args:
        rate: KV token-time the pool's backends deliver per second.
    """

    __slots__ = ("_by_key", "_quiet", "clock")

    def __init__(self, rate: Callable[[], float]) -> None:
        self.clock = FluidClock(rate)
        self._by_key: dict[tuple[TenantId, str], Agent] = {}
        self._quiet: OrderedDict[tuple[TenantId, str], Agent] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def join(self, request: Request, now: float) -> Agent:
        """Give a request its agent, at most once, when it comes. The agent's first call makes the tag."""
        if request.agent is not None:
            return request.agent
        self._forget_quiet(now)
        if request.agent_id is None:
            agent = self._begin(None, request, now)
        else:
            key = (request.member.tenant_id, request.agent_id)
            known = self._by_key.get(key)
            if known is None:
                agent = self._by_key[key] = self._begin(key, request, now)
            else:
                agent = known
                self._quiet.pop(key, None)
        agent.num_calls += 1
        agent.num_open += 1
        request.agent = agent
        return agent

    def deliver(self, request: Request) -> float:
        """A slice of a request is over. Returns the KV token-time it has delivered."""
        agent = request.agent
        cost = call_cost(request.input_tokens, request.slice_output)
        if agent is not None:
            agent.real += cost
        return cost

    def leave(self, request: Request, now: float, *, is_finished: bool) -> None:
        """A request is over; nothing happens if it never got an agent."""
        agent = request.agent
        if agent is None:
            return
        agent.num_open -= 1
        agent.is_whole = agent.is_whole and is_finished
        if agent.num_open == 0:
            if agent.key is None:
                _learn(agent)
            else:
                agent.quiet_since_s = now
                self._quiet[agent.key] = agent
        self._forget_quiet(now)

    def _begin(self, key: tuple[TenantId, str] | None, request: Request, now: float) -> Agent:
        tenant = request.member
        habits = tenant.habits
        if habits is None:
            habits = tenant.habits = Habits()
        cost = request.agent_cost
        if cost is None or not cost > 0.0:
            output = min(request.predicted_output_tokens, request.max_new_tokens)
            cost = call_cost(request.prompt_tokens, max(1, output))
            if key is not None:
                cost *= habits.calls_per_agent()
        agent = Agent(key, tenant, request.seq)
        agent.said = min(cost, _MAX_COST)
        self.clock.advance(now)
        agent.tag = self.clock.enter(agent.said * habits.bias(), request.tenant.weight)
        return agent

    def _forget_quiet(self, now: float) -> None:
        """Those quiet for too long are over."""
        quiet = self._quiet
        while quiet:
            key, agent = next(iter(quiet.items()))
            if now - agent.quiet_since_s < QUIET_S and len(quiet) <= _MAX_QUIET:
                return
            del quiet[key]
            del self._by_key[key]
            _learn(agent)


def _learn(agent: Agent) -> None:
    """The tenant's habits are those of agents that ran to their end."""
    habits = agent.tenant.habits
    if agent.is_whole and habits is not None:
        habits.observe(agent)
