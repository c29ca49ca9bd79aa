"""Executable laws of the scheduler, for tests and for the running router (a periodic check, logged and counted).

Each law is one function of the state that returns the sentences of what is wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from router_ext.core.ids import BackendId, RequestId, TenantId
from router_ext.core.lifecycle import State
from router_ext.core.queues import Group, Tenant, TierQueue, WaitingRoom
from router_ext.core.request import Request
from router_ext.core.waste import WasteBudget

if TYPE_CHECKING:
    from router_ext.core.admission import Backend
    from router_ext.core.fairness.counters import Counters


def violations(
    *,
    requests: Mapping[RequestId, Request],
    room: WaitingRoom,
    tenants: Mapping[TenantId, Tenant],
    groups: Mapping[str, Group],
    backends: Mapping[BackendId, Backend],
    counters: Counters,
    num_running: int,
    closing: set[tuple[BackendId, int]],
    waste: WasteBudget,
) -> list[str]:
    """Every law that does not hold. Cost: O(everything)."""
    return [
        *_ledger(requests, backends, closing),
        *_queues(requests, room, tenants),
        *_parking(room, backends),
        *_memory(room, tenants),
        *_running(requests, tenants, backends, num_running),
        *_groups(requests, tenants, groups),
        *_counters([*(t for t in tenants.values() if t.unit is t), *groups.values()], counters),
        *_preemption(requests, waste),
        *_exposure(backends),
    ]


def _ledger(
    requests: Mapping[RequestId, Request], backends: Mapping[BackendId, Backend], closing: set[tuple[BackendId, int]]
) -> Iterator[str]:
    """Blocks are conserved, and every block belongs to a running dispatch or to a stream that is closing."""
    owners: dict[tuple[BackendId, int], int] = {
        (r.backend.backend_id, r.ticket): r.blocks for r in requests.values() if r.backend is not None
    }
    for backend_id, backend in backends.items():
        ledger = backend.ledger
        held = sum(ledger.holdings.values())
        if ledger.reserved_blocks != held:
            yield f"{backend_id}: reserved {ledger.reserved_blocks} blocks, holdings are {held}"
        if ledger.free_blocks != ledger.usable_blocks - held:
            yield f"{backend_id}: free {ledger.free_blocks} is not usable {ledger.usable_blocks} - {held}"
        for ticket, blocks in ledger.holdings.items():
            owned = owners.pop((backend_id, ticket), None)
            if owned is None:
                if (backend_id, ticket) not in closing:
                    yield f"{backend_id}: ticket {ticket} holds {blocks} blocks for nobody"
            elif owned != blocks:
                yield f"{backend_id}: ticket {ticket} holds {blocks} blocks, its request thinks {owned}"
        if backend.prefill_tokens != sum(backend.prefill.values()):
            yield f"{backend_id}: prefill backlog {backend.prefill_tokens} is not the sum of its prompts"
    for (backend_id, ticket), blocks in owners.items():
        yield f"{backend_id}: running ticket {ticket} lacks its {blocks} blocks"


def _exposure(backends: Mapping[BackendId, Backend]) -> Iterator[str]:
    """Whoever is exposed is the only one in prefill; one suspect of the pool at most is."""
    suspects = 0
    for backend_id, backend in backends.items():
        exposure = backend.exposure
        suspects += exposure.is_suspect
        if exposure.ticket and list(backend.prefill) != [exposure.ticket]:
            yield f"{backend_id}: ticket {exposure.ticket} is to be alone, in prefill are {list(backend.prefill)}"
    if suspects > 1:
        yield f"{suspects} suspects are exposed at once"


def _memory(room: WaitingRoom, tenants: Mapping[TenantId, Tenant]) -> Iterator[str]:
    """Bytes that wait add up, and whoever may be displaced can be found."""
    waiting = list(room.waiting())
    if room.queued_bytes != sum(request.prompt_bytes for request in waiting):
        yield f"waiting room counts {room.queued_bytes} bytes, which is not what waits"
    for tenant_id, tenant in tenants.items():
        if tenant.queued_bytes != sum(r.prompt_bytes for r in waiting if r.member is tenant):
            yield f"{tenant_id}: counts {tenant.queued_bytes} bytes queued, which is not what waits"
    yield from room.shedding.audit(waiting)


def _queues(
    requests: Mapping[RequestId, Request], room: WaitingRoom, tenants: Mapping[TenantId, Tenant]
) -> Iterator[str]:
    """Who is QUEUED waits in exactly one queue; counts agree; backlogged means a non-empty queue."""
    waiting = {request_id for request_id, request in requests.items() if request.state is State.QUEUED}
    here = {request.request_id for request in room.waiting()}
    if waiting != here:
        yield f"queued requests and waiting room differ: {sorted(waiting ^ here)[:5]}"
    if room.count != len(room.in_line):
        yield f"waiting room counts {room.count} in line, holds {len(room.in_line)}"
    orders = [request.order for request in room.in_line.values()]
    if orders != sorted(orders):
        yield "requests in line have lost their order"
    outside = (*room.parked.values(), *room.held.values())
    open_requests: defaultdict[int, Counter[int]] = defaultdict(Counter)
    """Queue -> lane -> requests of it that have not ended."""
    for request in requests.values():
        open_requests[id(request.queue)][id(request.lane)] += 1
    for tenant_id, tenant in tenants.items():
        held = [request for queue in tenant.by_rank for request in queue.requests()]
        parked = sum(1 for request in outside if request.member is tenant)
        if (len(held) + parked, parked) != (tenant.num_queued, tenant.num_parked):
            yield (
                f"{tenant_id}: counts {tenant.num_queued} queued and {tenant.num_parked} parked, "
                f"queues hold {len(held)}, parked are {parked}"
            )
        if any(request.request_id not in waiting for request in held):
            yield f"{tenant_id}: a queue holds a request that is not waiting"
        if tenant.is_backlogged != bool(held):
            yield f"{tenant_id}: backlogged is {tenant.is_backlogged} with {len(held)} in line"
        if tenant.queued_tokens != sum(request.weight_tokens for request in held):
            yield f"{tenant_id}: queued tokens {tenant.queued_tokens} do not add up"
        for queue in tenant.by_rank:
            if queue.head is not next(iter(queue.requests()), None):
                yield f"{tenant_id}: head of {queue.name} is not its first request"
            if queue.queued_tokens != sum(request.weight_tokens for request in queue.requests()):
                yield f"{tenant_id}: queued tokens of {queue.name} do not add up"
            yield from _lanes(tenant_id, queue, open_requests[id(queue)])


def _lanes(tenant_id: TenantId, queue: TierQueue, here: Counter[int]) -> Iterator[str]:
    """Lanes that hold requests are waiting, the one in front has the smallest counter, open requests are counted."""
    where = f"{tenant_id}, {queue.name}"
    waiting = queue.keys.waiting()
    front = queue.keys.front
    lanes = [*queue.lanes.values(), *([queue.agent_lane] if queue.agent_lane else [])]
    for lane in lanes:
        if lane.queued_tokens != sum(request.weight_tokens for request in lane.line.requests()):
            yield f"{where}: queued tokens of the lane of {lane.key} do not add up"
    if {id(lane) for lane in lanes if lane.line} != {id(lane) for lane in waiting}:
        yield f"{where}: lanes with requests are not those that wait"
    if front is not (min(waiting, key=lambda lane: (lane.counter, lane.since)) if waiting else None):
        yield f"{where}: the lane in front has not received the least"
    if len(queue) != sum(len(lane.line) for lane in waiting):
        yield f"{where}: counts {len(queue)} in line, lanes hold {sum(len(lane.line) for lane in waiting)}"
    if any(lane.num_open != here.pop(id(lane), 0) for lane in lanes) or here:
        yield f"{where}: open requests of a lane are miscounted"


def _parking(room: WaitingRoom, backends: Mapping[BackendId, Backend]) -> Iterator[str]:
    """Whoever is in line fits on a usable backend that is empty, and whoever is parked does not (if one is usable)."""
    usable = [backend for backend in backends.values() if backend.is_usable]
    if not usable:
        return
    for request in (*room.in_line.values(), *room.parked.values()):
        tokens = max(request.slice_busy, request.slice_idle)  # what holds the larger slice holds the smaller
        fits = any(backend.can_hold(request, tokens) for backend in usable)
        if request.parked_s is None and not fits:
            yield f"{request.request_id} is in line, no usable backend could ever hold its next slice of {tokens}"
        elif request.parked_s is not None and fits:
            yield f"{request.request_id} is parked, a usable backend could hold its next slice of {tokens}"


def _running(
    requests: Mapping[RequestId, Request],
    tenants: Mapping[TenantId, Tenant],
    backends: Mapping[BackendId, Backend],
    num_running: int,
) -> Iterator[str]:
    """Running counts agree at every level."""
    running = [request for request in requests.values() if request.state.is_running]
    if len(running) != num_running:
        yield f"pool counts {num_running} running, {len(running)} are"
    for tenant_id, tenant in tenants.items():
        count = sum(1 for request in running if request.member is tenant)
        if count != tenant.num_running:
            yield f"{tenant_id}: counts {tenant.num_running} running, {count} are"
        held = sum(request.held_tokens for request in running if request.member is tenant)
        if held != tenant.held_tokens:
            yield f"{tenant_id}: counts {tenant.held_tokens} tokens held, {held} are"
    for lane in {request.lane for request in requests.values()}:
        held = sum(request.held_tokens for request in running if request.lane is lane)
        if held != lane.held_tokens:
            yield f"lane of {lane.key}: counts {lane.held_tokens} tokens held, {held} are"
    for backend_id, backend in backends.items():
        here = [request for request in running if request.backend is backend]
        if len(here) != backend.num_running or sum(r.num_sequences for r in here) != backend.seats:
            yield f"{backend_id}: counts {backend.num_running} running on {backend.seats} seats, {len(here)} are"
        if sorted(backend.running) != sorted(request.ticket for request in here):
            yield f"{backend_id}: {len(backend.running)} requests in its list of running ones, {len(here)} are"
        told = {request.ticket for request in here if request.state is State.PREEMPTING}
        if backend.cut != told:
            yield f"{backend_id}: {sorted(backend.cut)} are noted as told to stop, {sorted(told)} are"
        expected = sorted(ticket for _, ticket, _ in backend.releases)
        if expected != sorted([*backend.running, *backend.closing]):
            yield (
                f"{backend_id}: {len(expected)} expected releases for {len(here)} running, "
                f"{len(backend.closing)} closing"
            )
        if backend.releases != sorted(backend.releases):
            yield f"{backend_id}: expected releases have lost their order"


def _groups(
    requests: Mapping[RequestId, Request], tenants: Mapping[TenantId, Tenant], groups: Mapping[str, Group]
) -> Iterator[str]:
    """Members know their group, requests and queues what competes for them; a group waits while a member does."""
    for tenant_id, tenant in tenants.items():
        inside = [group for group in groups.values() if tenant_id in group.tenants]
        if inside != ([] if tenant.unit is tenant else [tenant.unit]):
            yield f"{tenant_id}: is a member of {len(inside)} groups, or of another than it says"
        if any(queue.tenant is not tenant.unit for queue in tenant.by_rank):
            yield f"{tenant_id}: a queue competes as another unit"
    if any(request.tenant is not request.member.unit for request in requests.values()):
        yield "a request competes as another unit than its tenant"
    for name, group in groups.items():
        waiting = [tenant for tenant in group.tenants.values() if tenant.has_line]
        if group.members.front is not min(waiting, key=lambda t: (t.counter, t.since), default=None):
            yield f"group {name}: the member in front has not received the least"
        if {t.tenant_id for t in group.members.waiting()} != {t.tenant_id for t in waiting}:
            yield f"group {name}: members that wait and members with a line differ"
        if group.is_backlogged != bool(waiting):
            yield f"group {name}: backlogged is {group.is_backlogged} with {len(waiting)} members that wait"
        if abs(group.waiting_weight - sum(t.weight for t in waiting)) > 1e-6:
            yield f"group {name}: weights of those that wait do not sum up to {group.waiting_weight}"
        if group.num_running != sum(t.num_running for t in group.tenants.values()):
            yield f"group {name}: counts {group.num_running} running"
        if group.held_tokens != sum(t.held_tokens for t in group.tenants.values()):
            yield f"group {name}: counts {group.held_tokens} tokens held"
        if group.by_rank and {id(q) for q in group.by_rank} != {
            id(q) for t in group.tenants.values() for q in t.by_rank
        }:
            yield f"group {name}: does not know the queues of its members"


def _counters(units: Iterable[Tenant], counters: Counters) -> Iterator[str]:
    """The floor is the smallest counter among what waits and competes for the pool."""
    backlogged = [tenant.counter for tenant in units if tenant.is_backlogged]
    floor = counters.floor()
    if floor != min(backlogged, default=None):
        yield f"floor {floor} is not the smallest of {len(backlogged)} backlogged counters"
    if len(counters.index) != len(backlogged):
        yield f"{len(counters.index)} tenants in the order of counters, {len(backlogged)} are backlogged"


def _preemption(requests: Mapping[RequestId, Request], waste: WasteBudget) -> Iterator[str]:
    """A cut is owed from the word to stop until the request starts again, and the budget holds what is owed."""
    for request_id, request in requests.items():
        if request.state is State.PREEMPTING and not request.cut_tokens:
            yield f"{request_id} was told to stop, the waste budget knows nothing of it"
        if request.cut_tokens and request.state not in (State.PREEMPTING, State.QUEUED):
            yield f"{request_id} is {request.state.name} and still owes a cut of {request.cut_tokens} tokens"
        if bool(request.num_preempted) != bool(request.cuts):
            yield f"{request_id} was cut {request.num_preempted} times for {len(request.cuts or ())} reasons"
    owed = sum(request.cut_tokens for request in requests.values())
    if owed != waste.pending_tokens:
        yield f"waste budget counts {waste.pending_tokens} tokens owed by cuts, requests owe {owed}"
    if waste.level_tokens > waste.capacity_tokens:
        yield f"waste budget holds {waste.level_tokens:g} tokens, more than its capacity"
