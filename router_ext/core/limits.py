"""Who may not wait, or not any longer.

Refused on arrival: what no backend could ever hold, what comes while no backend has been usable for
``backend_wait_s``, what finds the tenant's or the pool's queue full, by number or bytes, with too little of lower tiers
in it that may be displaced (``core.shedding``), and what would certainly outstay its tier's ``max_queue_wait_s``
(``core.waits``). Expired while waiting: what outstays its
tier's ``max_queue_wait_s`` (until something of it has been shown), everybody at the end of ``backend_wait_s`` without a
backend, everybody who has been parked for that long, and what stopped fitting because of a changed configuration or a
longer prompt than estimated.
"""

from __future__ import annotations

from router_ext.core.actions import Action, Expire, Reject, RejectCode
from router_ext.core.books import Books
from router_ext.core.config import PoolConfig, same_but_shares
from router_ext.core.fleet import Fleet
from router_ext.core.lifecycle import State, Trigger, advance
from router_ext.core.queues import Tenant
from router_ext.core.request import Request
from router_ext.core.slicing import room_tokens
from router_ext.core.tiers import Tiers
from router_ext.core.waits import CERTAIN, Waits

_FOREVER = float("inf")


class Limits:
    """See the module.

    Attributes:
        waits: what comes off the queue per second, from which all retry hints follow.
    """

    __slots__ = ("_books", "_config", "_fleet", "_room", "_tiers", "waits")

    def __init__(self, config: PoolConfig, *, books: Books, tiers: Tiers, fleet: Fleet, waits: Waits) -> None:
        self.waits = waits
        self._config = config
        self._books = books
        self._room = books.room
        self._tiers = tiers
        self._fleet = fleet

    # --- on arrival ------------------------------------------------------------------------------------------------

    def refusal(self, request: Request, now: float) -> Reject | None:
        """Why this request may not even wait, or None. Plans its first slice on the way."""
        if not self._books.plan(request):
            return Reject(request_id=request.request_id, code=RejectCode.TOO_LARGE, detail=self._too_large(request))
        fleet = self._fleet
        if not fleet.usable and fleet.down_since is not None:
            waited = now - fleet.down_since
            if waited >= self._config.backend_wait_s:
                return Reject(
                    request_id=request.request_id,
                    code=RejectCode.NO_BACKEND,
                    detail=f"no backend has been usable for {waited:.0f} s",
                    retry_after_s=self._outage_hint_s(),
                )
        shedding = self._room.shedding
        for tenant in (request.member, None):
            num, num_bytes = self._excess(request, tenant, num_arriving=1)
            if (num or num_bytes) and not shedding.suffices(request, num, num_bytes, of=tenant):
                return Reject(
                    request_id=request.request_id,
                    code=RejectCode.QUEUE_FULL,
                    detail=self._full(tenant, is_bytes=not num),
                    retry_after_s=self.waits.drain_s(tenant),
                )
        return self._in_vain(request, now)

    def make_room(self, request: Request, now: float, actions: list[Action]) -> None:
        """A request has just been queued, perhaps above a limit: displace what ``refusal`` has found to suffice."""
        shedding = self._room.shedding
        for tenant in (request.member, None):
            num, num_bytes = self._excess(request, tenant, num_arriving=0)
            while num > 0 or num_bytes > 0:
                victim = shedding.next(request, of=tenant)
                if victim is None:
                    break
                num -= 1
                num_bytes -= victim.prompt_bytes
                detail = f"displaced by a request of a higher tier: {self._full(tenant, is_bytes=num < 0)}"
                hint_s = self.waits.drain_s(victim.member)
                self._expire(victim, RejectCode.QUEUE_FULL, detail, hint_s, now, actions)

    def _excess(self, request: Request, tenant: Tenant | None, *, num_arriving: int) -> tuple[int, int]:
        """Requests and bytes that must go for this one, of its tenant or (None) of the pool; never more than it takes.

        ``num_arriving``: 1 before it is queued, 0 after that.
        """
        size = request.prompt_bytes
        if tenant is None:
            num, most, most_bytes = self._room.num_waiting, self._config.max_queued, self._config.max_queued_bytes
            num_bytes = self._room.queued_bytes
        else:
            num, most, most_bytes = tenant.num_queued, tenant.max_queued, self._config.tenant_queued_bytes
            num_bytes = tenant.queued_bytes
        others = num + num_arriving - 1
        num_bytes += num_arriving * size
        return int(others >= most), min(size, max(0, num_bytes - most_bytes)) if others else 0

    def _full(self, tenant: Tenant | None, *, is_bytes: bool) -> str:
        room, config = self._room, self._config
        if tenant is None:
            if is_bytes:
                return f"{room.queued_bytes} bytes are waiting, the pool's limit is {config.max_queued_bytes}"
            return f"{room.num_waiting} requests are waiting, the pool's limit is {config.max_queued}"
        if is_bytes:
            return f"{tenant.queued_bytes} bytes of this tenant are waiting, its limit is {config.tenant_queued_bytes}"
        return f"{tenant.num_queued} requests of this tenant are waiting, its limit is {tenant.max_queued}"

    def _in_vain(self, request: Request, now: float) -> Reject | None:
        """Refuse a request that would certainly outstay its tier's limit in line."""
        allowed_s = self._tiers.get(request.queue.name).max_queue_wait_s
        if allowed_s is None or not self._fleet.usable:
            return None
        least_s = self.waits.least_s(request, now)
        if least_s is None or least_s <= CERTAIN * allowed_s:
            return None
        return Reject(
            request_id=request.request_id,
            code=RejectCode.DEADLINE_UNREACHABLE,
            detail=f"it would wait at least {least_s:.0f} s for its turn, the tier allows {allowed_s:g} s",
            retry_after_s=max(1.0, least_s - allowed_s),
        )

    # --- while waiting ---------------------------------------------------------------------------------------------

    def watch(self, request: Request) -> None:
        """Apply the time limit of its tier to a waiting request that has shown nothing yet."""
        wait_s = self._tiers.get(request.queue.name).max_queue_wait_s
        if wait_s is not None:
            self._room.limit(request, request.arrival_s + wait_s)

    def replan(self, request: Request, now: float, actions: list[Action]) -> None:
        """The prompt of a waiting request proved longer or shorter."""
        if not self._books.plan(request):
            self.expire_too_large(request, now, actions)
        elif request.held_s is not None:
            return
        elif request.is_stuck is not (request.parked_s is not None):
            self._books.settle([request], now)
        elif not request.is_stuck:
            self._room.note_need(request)

    def recheck(self, now: float, actions: list[Action]) -> None:
        """Hold everybody who waits against the backends of now: plan slices anew, park, bring back. O(everybody)."""
        books = self._books
        fitting: list[Request] = []
        for request in list(self._room.waiting()):
            if books.plan(request):
                fitting.append(request)
            else:
                self.expire_too_large(request, now, actions)
        books.settle(fitting, now)
        self._room.measure_needs()

    def apply(self, config: PoolConfig, now: float, actions: list[Action]) -> None:
        """Hold everybody who waits against a changed configuration. Shares of tenants limit nobody who waits."""
        before, self._config = self._config, config
        if same_but_shares(before, config):
            return
        self.recheck(now, actions)
        self._room.forget_limits()
        for request in self._room.waiting():
            self.watch(request)
        self.expire_due(now, actions)

    def expire_too_large(self, request: Request, now: float, actions: list[Action]) -> None:
        """No backend can ever hold what the waiting request needs next."""
        self._expire(request, RejectCode.TOO_LARGE, self._too_large(request), None, now, actions)

    def expire_due(self, now: float, actions: list[Action]) -> None:
        """Expire those whose time is over."""
        for request in self._room.overdue(now):
            if request.state is State.QUEUED:
                allowed_s = self._tiers.get(request.queue.name).max_queue_wait_s
                detail = f"waited {now - request.arrival_s:.1f} s, the tier allows {allowed_s:g} s"
                self._expire(request, RejectCode.QUEUE_TIMEOUT, detail, None, now, actions)
        down_since = self._fleet.down_since
        if down_since is not None and now >= down_since + self._config.backend_wait_s:
            detail = f"no backend has been usable for {now - down_since:.0f} s"
            for request in list(self._room.waiting()):
                self._expire(request, RejectCode.NO_BACKEND, detail, self._outage_hint_s(), now, actions)
        parked = self._room.parked
        while parked:
            request = next(iter(parked.values()))
            assert request.parked_s is not None
            if now < request.parked_s + self._config.backend_wait_s:
                break
            detail = self._stuck(request, now - request.parked_s)
            self._expire(request, RejectCode.NO_BACKEND, detail, self._outage_hint_s(), now, actions)

    def _expire(
        self,
        request: Request,
        code: RejectCode,
        detail: str,
        retry_after_s: float | None,
        now: float,
        actions: list[Action],
    ) -> None:
        state = advance(request.state, Trigger.EXPIRE)
        self._books.dequeue(request, now)
        self._books.end(request, state, now)
        if code is RejectCode.QUEUE_TIMEOUT:
            # Only what still waits is ahead of another try.
            retry_after_s = self.waits.drain_s(request.member)
        actions.append(Expire(request_id=request.request_id, code=code, detail=detail, retry_after_s=retry_after_s))

    def next_due_s(self) -> float:
        """The next instant at which time alone changes something; infinity if there is none."""
        room = self._room
        fleet = self._fleet
        due = fleet.lags[0][0] if fleet.lags and room.count else _FOREVER
        limit = room.next_limit_s()
        if limit is not None and limit < due:
            due = limit
        if fleet.down_since is not None and room.num_waiting:
            due = min(due, fleet.down_since + self._config.backend_wait_s)
        if room.parked:
            first = next(iter(room.parked.values()))
            assert first.parked_s is not None
            due = min(due, first.parked_s + self._config.backend_wait_s)
        if room.held and (recovered_s := fleet.recovered_s()) is not None:
            due = min(due, recovered_s)
        return due

    # --- hints -----------------------------------------------------------------------------------------------------

    def _outage_hint_s(self) -> float:
        return max(1.0, self._config.backend_wait_s / 2.0)

    def _too_large(self, request: Request) -> str:
        backends = self._config.backends.values()
        limit = max((room_tokens(b, request.num_sequences) for b in backends), default=0)
        longest = max((b.max_input_tokens for b in backends), default=0)
        return (
            f"{request.input_tokens} input tokens and {request.remaining_tokens()} new tokens do not fit: no backend "
            f"holds more than {limit} tokens of one request or takes more than {longest} input tokens"
        )

    def _stuck(self, request: Request, waited_s: float) -> str:
        """What a parked request waited for in vain."""
        size = f"{request.input_tokens} input tokens and {request.remaining_tokens()} new tokens"
        usable = self._fleet.shapes
        if not usable:
            return f"{size} have waited {waited_s:.0f} s for a backend that holds them; none is usable at all"
        sequences = request.num_sequences
        largest = max(usable, key=lambda config: room_tokens(config, sequences))
        return (
            f"{size} have waited {waited_s:.0f} s for a backend that holds them: the largest usable one, "
            f"{largest.backend}, holds {room_tokens(largest, sequences)} tokens of one request and takes "
            f"{largest.max_input_tokens} input tokens"
        )
