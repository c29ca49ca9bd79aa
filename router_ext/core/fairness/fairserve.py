"""``fairserve``: interactions are not cut short, and what counts is how much of a normal answer a tenant received.

An *interaction* is all requests of one tenant that carry the same agent id; a request without one is an interaction
of its own. A key stands for an application.

Rule:
    1. *On arrival* (overload and interaction throttling) a request is refused with ``rate_limit_exceeded`` only if all
       of this holds: requests wait and at least ``fairserve_overload`` of the KV is reserved; its tenant has sent
       ``fairserve_limit * weight`` requests in the last minute, or its key ``fairserve_key_limit``; and it begins an
       interaction. Only accepted requests count.
    2. *In the queue* (weighted service counter) requests of interactions that run go first, among them those of the
       tenant with the smallest counter; then those that begin one, likewise; of one tenant by arrival. If the request
       in turn does not fit, nobody goes.
    3. A request charges its tenant ``actual / expected / weight`` as it is served, ``actual`` being its prompt and
       output tokens and ``expected`` their mean over the last requests of the same key and stage (beginning or going
       on). A tenant that becomes backlogged is lifted to the smallest counter of those that wait.

Guarantee: an interaction once begun is never refused by this policy, while it is remembered (an hour of silence, or
65,536 later ones, end it; limits of queues and time are the pool's and hold for everybody). Below the overload mark
nothing is refused. Applications whose requests are all as large as they are expected to be are served at equal rates
of requests per weight. A refused request that comes again after ``retry_after_s`` is within its limits, unless others
of its tenant came in between. No bound on service in tokens: large requests of an application where all are large
count no more than small ones elsewhere.

Cost: O(log n) amortised per decision and per request. Memory: the interactions, one instant per request accepted in
the last minute, and one mean per key and stage.

Failure mode: a tenant that puts everything into one interaction is never refused and always goes first, at its share
among such. One that makes its requests larger little by little shifts what is expected of it.

Source: FairServe (arXiv 2411.15997), known to us from notes on it: the conditions of throttling, the order, charges
relative to what is expected. This product's own: charging as tokens come instead of at the end (the sum is the same,
and nobody has a pool full of work uncharged), keys for applications, and no price of their own for system prompts,
which a router cannot tell from others.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar, TypeAlias

from router_ext.core.actions import Reject, RejectCode
from router_ext.core.fairness.base import NOBODY, Candidates, FairnessPolicy, Standing, Surroundings
from router_ext.core.fairness.line import Line
from router_ext.core.ids import KeyId, TenantId
from router_ext.core.interactions import Interactions
from router_ext.core.last_minute import LastMinute
from router_ext.core.lifecycle import State
from router_ext.core.queues import Tenant
from router_ext.core.request import Request
from router_ext.core.siblings import MinIndex

_MAX_MEANS = 16_384
"""Keys and stages whose mean size is remembered."""

_MEAN_SHARE = 1.0 / 32.0
"""Of the newest request in the mean of its key and stage."""

_HEAD = Standing.HEAD

_Whose: TypeAlias = tuple[TenantId, KeyId, bool]
"""Tenant, key, and whether it goes on with an interaction."""


class _Served:
    """How a request is charged: against whose mean, what that was at its start, and tokens charged so far."""

    __slots__ = ("expected", "tokens", "whose")

    def __init__(self, whose: _Whose, expected: float, tokens: int) -> None:
        self.whose = whose
        self.expected = expected
        self.tokens = tokens


class FairServe(FairnessPolicy):
    """See the module. ``Tenant.account``: its counter, a float."""

    is_watching: ClassVar[bool] = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        config = around.config
        self.charge = self._charge
        self._around = around
        self._overload = config.fairserve_overload
        self._limit = config.fairserve_limit
        self._key_limit = config.fairserve_key_limit
        self._going_on, self._beginning = Line(_account), Line(_account)
        self._tenants: MinIndex[Tenant] = MinIndex(_account)
        self._interactions = Interactions()
        self._recent_tenants: LastMinute[TenantId] = LastMinute()
        self._recent_keys: LastMinute[tuple[TenantId, KeyId]] = LastMinute()
        self._means: OrderedDict[_Whose, float] = OrderedDict()
        self._served: dict[Request, _Served] = {}
        """Those that ran and are not over."""

    def inherit(self, before: Any) -> None:
        """Limits, interactions and means go on as they were."""
        self._interactions = before._interactions
        self._recent_tenants, self._recent_keys = before._recent_tenants, before._recent_keys
        self._means, self._served = before._means, before._served

    # --- on arrival ------------------------------------------------------------------------------------------------

    def refusal(self, request: Request, now: float) -> Reject | None:
        """Refuse what begins an interaction, under overload, over a limit."""
        around = self._around
        if (
            not around.room.count
            or 1.0 - around.free_ratio() < self._overload
            or self._interactions.get(request) is not None
        ):
            return None
        tenant = request.member
        limit = max(1, int(self._limit * tenant.weight))
        whose, until = "tenant", self._recent_tenants.full_until(tenant.tenant_id, limit, now)
        if until is None and self._key_limit:
            limit = self._key_limit
            whose, until = "key", self._recent_keys.full_until((tenant.tenant_id, request.key), limit, now)
        if until is None:
            return None
        return Reject(
            request_id=request.request_id,
            code=RejectCode.RATE_LIMITED,
            detail=f"the servers are overloaded and this {whose} has sent {limit} requests in the last minute",
            retry_after_s=until - now,
        )

    def arrived(self, request: Request, now: float) -> None:
        """It counts, and its interaction is known."""
        tenant = request.member.tenant_id
        self._recent_tenants.note(tenant, now)
        self._recent_keys.note((tenant, request.key), now)
        self._interactions.note(request, now)

    # --- the order -------------------------------------------------------------------------------------------------

    def candidates(self, now: float) -> Candidates:
        """The head in turn, and nobody else."""
        request = self._going_on.first() or self._beginning.first()
        return NOBODY if request is None else ((request, _HEAD),)

    def adopt(self, tenant: Tenant) -> None:
        """Enter a tenant that waits already, with all its requests; no lift."""
        if tenant.account is None:
            tenant.account = 0.0
        self._tenants.add(tenant)
        for queue in tenant.by_rank:
            for request in queue.requests():
                self.queued(request)

    def backlogged(self, tenant: Tenant) -> None:
        """Lift, as the service counters are."""
        first = self._tenants.top() or self._counters.last_left
        floor = 0.0 if first is None or first.account is None else first.account
        tenant.account = floor if tenant.account is None else max(tenant.account, floor)
        super().backlogged(tenant)
        self._tenants.add(tenant)

    def idle(self, tenant: Tenant) -> None:
        """The tenant is nobody's floor."""
        super().idle(tenant)
        self._tenants.discard(tenant)

    def queued(self, request: Request) -> None:
        """It goes on with something that runs, or would begin it."""
        known = self._interactions.get(request)
        if request.is_resumed or (known is not None and known.has_run):
            self._going_on.add(request)
            return
        self._beginning.add(request)
        if known is not None:
            known.waiting[request] = None

    def unqueued(self, request: Request) -> None:
        """It waits no longer."""
        if self._going_on.remove(request):
            return
        self._beginning.remove(request)
        known = self._interactions.get(request)
        if known is not None:
            known.waiting.pop(request, None)

    # --- charges ---------------------------------------------------------------------------------------------------

    def started(self, request: Request, now: float) -> None:
        """What its interaction has waiting goes on from here; its prompt is charged."""
        known = self._interactions.get(request)
        goes_on = known is not None and known.has_run
        if known is not None and not goes_on:
            known.has_run = True
            for other in known.waiting:
                self._beginning.remove(other)
                self._going_on.add(other)
            known.waiting = {}
        if request in self._served:
            return
        whose = (request.tenant.tenant_id, request.key, goes_on)
        expected = self._means.get(whose) or request.prompt_tokens + request.predicted_output_tokens
        # What it was served under another policy is not charged again.
        tokens = 0 if request.segment == 1 else request.paid_in + request.paid_out
        self._served[request] = _Served(whose, max(1.0, expected), tokens)
        self._charge(request, 0.0)

    def ended(self, request: Request) -> None:
        """What is expected of its key follows requests that came to their end."""
        served = self._served.pop(request, None)
        if served is None or request.state is not State.FINISHED:
            return
        means, actual = self._means, float(request.paid_in + request.paid_out)
        mean = means.get(served.whose, actual)
        means[served.whose] = mean + _MEAN_SHARE * (actual - mean)
        means.move_to_end(served.whose)
        if len(means) > _MAX_MEANS:
            means.popitem(last=False)

    def _charge(self, request: Request, service: float) -> None:
        """Keep the service counters, and charge what came since, as a share of what is expected."""
        self._counters.charge(request, service)
        served = self._served.get(request)
        if served is None:
            return
        tokens = request.paid_in + request.paid_out
        tenant = request.tenant
        if tenant.account is None:
            tenant.account = 0.0
        tenant.account += (tokens - served.tokens) / (served.expected * tenant.weight)
        if tokens < served.tokens:
            for index in (self._tenants, self._going_on.index, self._beginning.index):
                index.lowered(tenant)
        served.tokens = tokens


def _account(tenant: Tenant) -> float:
    return tenant.account  # type: ignore[no-any-return]  # nobody else writes it while this policy is in force
