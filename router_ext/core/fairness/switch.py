"""From one policy to the next while requests wait.

Counters and periods of backlog belong to no policy and stay as they are; a policy that takes over is shown who waits
and builds its own indexes.
"""

from __future__ import annotations

from collections.abc import Iterable

from router_ext.core.fairness import policy_class
from router_ext.core.fairness.base import FairnessPolicy, Surroundings
from router_ext.core.queues import Group, Tenant
from router_ext.core.tiers import Tiers


def build_policy(
    around: Surroundings,
    *,
    tenants: Iterable[Tenant],
    tiers: Tiers,
    before: FairnessPolicy | None,
    has_same_tiers: bool = False,
) -> FairnessPolicy:
    """The policy the configuration names, with everybody who waits in its indexes.

    ``before``: the policy it takes over from. One of the same kind hands on what it knows beyond the counters, so that
    a change of some number in the configuration makes nobody start anew. ``has_same_tiers``: nothing has changed in
    them, so of those that do not wait nothing has to be touched.
    """
    policy = policy_class(around.config.policy)(around)
    is_other = type(before) is not type(policy)
    if not is_other:
        policy.inherit(before)
    for tenant in tenants:
        if is_other:
            tenant.account = None
        elif has_same_tiers and not tenant.is_backlogged:
            continue
        _apply_tiers(tenant, tiers)
        if tenant.is_backlogged:
            policy.adopt(tenant)
        for queue in tenant.by_rank:
            policy.head_changed(queue)
    return policy


def _apply_tiers(unit: Tenant, tiers: Tiers) -> None:
    """Targets and ranks as configured at present, of all members of a group; no queue is in anybody's index."""
    for tenant in unit.tenants.values() if isinstance(unit, Group) else (unit,):
        for queue in tenant.queues.values():
            tier = tiers.get(queue.name)
            if queue.ttft_target_s != tier.ttft_target_s:
                target = queue.ttft_target_s = tier.ttft_target_s
                queue.late = None
                for request in queue.requests():
                    request.deadline_s = None if target is None else request.arrival_s + target
            queue.rank = tier.rank
            queue.urgency = 0
            queue.indexed = None
            queue.version += 1
        tenant.sort_tiers()
    unit.see_queues()
