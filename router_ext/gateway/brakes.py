"""What an operator stops at once: one request, a tenant, a pool's grammars, a backend.

All of it is configuration, so that it is in force on every router with the next snapshot, survives a restart, and is
audited where it is set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from router_ext.errors import StoppedByOperator
from router_ext.gateway.call import Call
from router_ext.wire.controlplane import ConfigSnapshot, PoolRecord


def stopped(
    calls: Iterable[Call], record: PoolRecord, snapshot: ConfigSnapshot, tenants: Collection[str]
) -> list[tuple[Call, StoppedByOperator]]:
    """Calls of a pool that the snapshot ends, each with what its client is told. ``tenants``: those it stops."""
    cancelled = frozenset(snapshot.cancelled)
    found = []
    for call in calls:
        if call.identity.tenant in tenants:
            found.append((call, StoppedByOperator("The operator has stopped all requests of this tenant.")))
        elif not record.takes_grammars and call.request.is_forced:
            found.append((call, grammars_stopped()))
        elif cancelled and (call.request_id in cancelled or call.slot.start.event in cancelled):
            found.append((call, StoppedByOperator("The operator has cancelled this request.")))
    return found


def grammars_stopped() -> StoppedByOperator:
    """For a request with a grammar in a pool that takes none."""
    return StoppedByOperator(
        "The operator has stopped grammars, response formats and tools for this model.", code="grammars_stopped"
    )
