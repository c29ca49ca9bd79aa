"""From one policy to the next while requests wait.

Counters and periods of backlog belong to no policy and stay as they are; a policy that takes over is shown who waits
and builds its own indexes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router_ext.core.config import PoolConfig
from router_ext.core.fairness.base import FairnessPolicy
from router_ext.core.fairness.counters import Counters
from router_ext.core.fairness.fifo import Fifo
from router_ext.core.fairness.slo_fair import SloFair
from router_ext.core.queues import Tenant, WaitingRoom
from router_ext.core.tiers import Tiers


def build_policy(
    config: PoolConfig,
    *,
    counters: Counters,
    room: WaitingRoom,
    tenants: Iterable[Tenant],
    tiers: Tiers,
    first_token_s: Callable[[int], float],
) -> FairnessPolicy:
    """The policy the configuration names, with everybody who waits in its indexes."""
    policy: FairnessPolicy
    if config.policy == "fifo":
        policy = Fifo(counters, room)
    else:
        policy = SloFair(counters, config, first_token_s)
    for tenant in tenants:
        _apply_tiers(tenant, tiers)
        if isinstance(policy, SloFair) and tenant.is_backlogged:
            policy.adopt(tenant)
        for queue in tenant.by_rank:
            policy.head_changed(queue)
    return policy


def _apply_tiers(tenant: Tenant, tiers: Tiers) -> None:
    """Targets and ranks as configured at present; no queue is in anybody's index."""
    for queue in tenant.queues.values():
        tier = tiers.get(queue.name)
        if queue.ttft_target_s != tier.ttft_target_s:
            target = queue.ttft_target_s = tier.ttft_target_s
            for request in queue.requests():
                request.deadline_s = None if target is None else request.arrival_s + target
        queue.rank = tier.rank
        queue.urgency = 0
        queue.indexed = None
        queue.version += 1
    tenant.sort_tiers()
