"""What an operator, or of its own requests a tenant, stops at once: a request, a tenant, a pool's grammars, a backend.

All of it is configuration, so that it is in force on every router with the next snapshot, survives a restart, and is
audited where it is set.
"""

from __future__ import annotations

from collections.abc import Iterable

from router_ext.errors import FairlaneError, StoppedByOperator
from router_ext.gateway.auth import tenant_disabled
from router_ext.gateway.call import Call
from router_ext.gateway.configure import Roster
from router_ext.wire.controlplane import ConfigSnapshot, PoolRecord


def stopped(
    calls: Iterable[Call], record: PoolRecord, snapshot: ConfigSnapshot, roster: Roster
) -> list[tuple[Call, FairlaneError]]:
    """Calls of a pool that the snapshot ends, each with what its client is told.

    Of a suspended tenant those end that no backend has seen: what waits to go on has begun, and may finish.
    """
    cancelled = frozenset(snapshot.cancelled)
    own_cancelled = frozenset((each.tenant, each.request) for each in snapshot.own_cancelled)
    found: list[tuple[Call, FairlaneError]] = []
    for call in calls:
        if call.identity.tenant in roster.suspended and call.dispatched_s is None:
            found.append((call, tenant_disabled()))
        elif call.identity.tenant in roster.stopped:
            found.append((call, StoppedByOperator("The operator has stopped all requests of this tenant.")))
        elif not record.takes_grammars and call.request.is_forced:
            found.append((call, grammars_stopped()))
        elif cancelled and (call.request_id in cancelled or call.slot.start.event in cancelled):
            found.append((call, StoppedByOperator("The operator has cancelled this request.")))
        elif own_cancelled and any(
            (call.identity.tenant, name) in own_cancelled for name in (call.request_id, call.slot.start.event)
        ):
            found.append((call, StoppedByOperator("Your tenant has cancelled this request.")))
    return found


def grammars_stopped() -> StoppedByOperator:
    """For a request with a grammar in a pool that takes none."""
    return StoppedByOperator(
        "The operator has stopped grammars, response formats and tools for this model.", code="grammars_stopped"
    )
