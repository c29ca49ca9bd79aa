"""Service counters that survive a restart: how far everybody is ahead, as JSON-safe builtins.

What is saved is the difference of each counter to the floor of its level (the least of those that wait), because
differences are all that matter. Who is not ahead owes nothing and is left out. Restored, the differences are the
counters, and a level *settles*: clients come back in any order, so whoever comes first must not lift the others to
what it is ahead itself. Until a level has settled one that begins to wait is lifted only to ``floor - lead``, the lead
being what the first one back was ahead.

Guarantee: a restart adds at most one ``U'`` to any gap, and the service that was delivered after the last save. With
counters at zero instead, every restart adds that much again; restored, the next restarts add nothing to what is
restored.

Cost: O(tenants + keys) to save, as much to restore. Nothing of what a saved state says is trusted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from router_ext.core.config import PoolConfig
from router_ext.core.ids import KeyId, TenantId, TierName
from router_ext.core.queues import Group, Tenant, TierQueue
from router_ext.core.siblings import Siblings
from router_ext.core.tenants import Tenants

SETTLE_S = 60.0
"""How long after a restore clients are expected back: the longest wait that a retry hint asks for, halved by jitter."""

VERSION = 1

_MAX_AHEAD = 2.0**40
"""A counter further ahead was not counted by a scheduler: counters themselves are rebased at this distance."""

_MAX_TENANTS = 10_000
_MAX_KEYS = 10_000
"""Saved at most, those furthest ahead first: a megabyte of JSON. The others start at the floor."""

_MAX_REASONS = 20

_Lead = TypeVar("_Lead", bound=tuple[Any, ...])


def save(tenants: Iterable[Tenant], groups: Mapping[str, Group], base: float, cost_model: str) -> dict[str, Any]:
    """How far tenants and groups are above ``base``, members and keys above that of their level, per weight."""
    ahead: list[tuple[float, TenantId, str | None]] = []
    keys: list[tuple[float, TenantId, TierName, KeyId]] = []
    agents: list[tuple[float, TenantId, TierName]] = []
    for tenant in tenants:
        unit = tenant.unit
        lead = tenant.counter - (unit.members.base() if isinstance(unit, Group) else base)
        if lead > 0.0:
            ahead.append((lead, tenant.tenant_id, None if unit is tenant else unit.tenant_id))
        for queue in tenant.by_rank:
            floor = queue.keys.base()
            for key, lane in queue.lanes.items():
                if lane.counter > floor:
                    keys.append((lane.counter - floor, tenant.tenant_id, queue.name, key))
            if queue.agent_lane is not None and queue.agent_lane.counter > floor:
                agents.append((queue.agent_lane.counter - floor, tenant.tenant_id, queue.name))
    saved: dict[str, dict[str, Any]] = {}
    for lead, tenant_id, group in _furthest(ahead, _MAX_TENANTS):
        saved[tenant_id] = {"ahead": lead} if group is None else {"ahead": lead, "group": group}
    for lead, tenant_id, tier, key in _furthest(keys, _MAX_KEYS):
        _entry(saved, tenant_id).setdefault("keys", {}).setdefault(tier, {})[key] = lead
    for lead, tenant_id, tier in _furthest(agents, _MAX_TENANTS):
        _entry(saved, tenant_id).setdefault("agents", {})[tier] = lead
    leads = {name: group.counter - base for name, group in groups.items() if group.counter > base}
    return {"version": VERSION, "cost_model": cost_model, "groups": leads, "tenants": saved}


def _furthest(leads: list[_Lead], number: int) -> list[_Lead]:
    """At most so many, those furthest ahead."""
    return leads if len(leads) <= number else heapq.nlargest(number, leads, key=lambda entry: entry[0])


def _entry(saved: dict[str, dict[str, Any]], tenant_id: TenantId) -> dict[str, Any]:
    return saved.setdefault(tenant_id, {"ahead": 0.0})


class Restored:
    """Reads one saved state into tenants that have counted nothing yet.

    Attributes:
        reasons: a sentence for everything that was ignored, the first few of them.
        levels: keys of queues, which have to settle.
    """

    def __init__(self, config: PoolConfig, tenants: Tenants) -> None:
        self.reasons: list[str] = []
        self.levels: list[Siblings[Any]] = []
        self._config = config
        self._tenants = tenants
        self._num_ignored = 0
        self._num_keys = 0

    def read(self, saved: object) -> None:
        """Take over what is well-formed and known."""
        if not isinstance(saved, Mapping) or saved.get("version") != VERSION:
            self._ignore(f"saved counters are not of version {VERSION}")
            return
        cost_model = saved.get("cost_model", "linear")
        if cost_model != self._config.cost_model:
            self._ignore(f"counters were saved in units of {cost_model!r}, the pool counts {self._config.cost_model!r}")
            return
        groups = saved.get("groups", {})
        if not isinstance(groups, Mapping):
            self._ignore("saved groups are not an object")
            groups = {}
        for name, lead in groups.items():
            if name in self._tenants.groups:
                self._tenants.groups[name].counter = self._number(lead, f"group {name!r}")
            else:
                self._ignore(f"group {name!r} is not configured")
        entries = saved.get("tenants")
        if not isinstance(entries, Mapping):
            self._ignore("saved counters name no tenants")
            return
        for tenant_id, entry in entries.items():
            if tenant_id not in self._config.tenants:
                self._ignore(f"tenant {tenant_id!r} is not configured")
            elif not isinstance(entry, Mapping):
                self._ignore(f"tenant {tenant_id!r}: not an object")
            else:
                self._tenant(self._tenants.get(TenantId(tenant_id)), entry)
        if self._num_ignored > _MAX_REASONS:
            self.reasons.append(f"and {self._num_ignored - _MAX_REASONS} more")

    def _tenant(self, tenant: Tenant, entry: Mapping[str, Any]) -> None:
        where = f"tenant {tenant.tenant_id!r}"
        lead = self._number(entry.get("ahead"), where)
        share = self._config.tenants[tenant.tenant_id]
        if entry.get("group") == share.group:
            tenant.counter = lead
        elif lead:
            self._ignore(f"{where}: was ahead in group {entry.get('group')!r}, is in {share.group!r}")
        for queue, keys in self._tiers(tenant, entry, "keys"):
            self._lanes(queue, keys, f"{where}, tier {queue.name!r}")
        for queue, lead in self._tiers(tenant, entry, "agents"):
            queue.agents().counter = self._number(lead, f"{where}, tier {queue.name!r}, agents")
            self._settle(queue)

    def _tiers(self, tenant: Tenant, entry: Mapping[str, Any], field: str) -> Iterator[tuple[TierQueue, Any]]:
        where = f"tenant {tenant.tenant_id!r}"
        tiers = entry.get(field, {})
        if not isinstance(tiers, Mapping):
            self._ignore(f"{where}: {field} are not an object")
            return
        for name, value in tiers.items():
            tier = self._config.tiers.get(name)
            if tier is None:
                self._ignore(f"{where}: tier {name!r} is not configured")
            else:
                yield tenant.queue(tier), value

    def _lanes(self, queue: TierQueue, keys: object, where: str) -> None:
        if not isinstance(keys, Mapping):
            self._ignore(f"{where}: not an object")
            return
        for key, lead in keys.items():
            if self._num_keys >= _MAX_KEYS:
                self._ignore(f"{where}: more than {_MAX_KEYS} keys")
                return
            self._num_keys += 1
            queue.lane(KeyId(str(key))).counter = self._number(lead, f"{where}, key {key!r}")
        self._settle(queue)

    def _settle(self, queue: TierQueue) -> None:
        self.levels.append(queue.keys)

    def _number(self, value: object, where: str) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_AHEAD:
            return float(value)
        self._ignore(f"{where}: {value!r} is not a number from 0 to {_MAX_AHEAD:g}")
        return 0.0

    def _ignore(self, reason: str) -> None:
        self._num_ignored += 1
        if self._num_ignored <= _MAX_REASONS:
            self.reasons.append(reason[:300])
