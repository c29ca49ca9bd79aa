"""Every tenant that has a share in the pool, requests here, or service that must not be forgotten yet; and groups.

A tenant whose group changes takes its requests along and starts at the floor of where it comes to, with what it owes
forgiven: an operator's act, which costs the others at most one ``U'``.
"""

from __future__ import annotations

from router_ext.core.bounds import peak_service
from router_ext.core.config import PoolConfig, TenantConfig
from router_ext.core.fairness.counters import Counters
from router_ext.core.fairness.slo_fair import urgency_ratio
from router_ext.core.ids import TenantId
from router_ext.core.queues import Group, Tenant

_REBASE_AT = 2.0**40
"""Counters are shifted down at the next change of configuration once the floor exceeds this. Doubles resolve a
thousandth of a token there, so it may take years longer without harm."""


class Tenants:
    """Owns the tenants: makes them, gives them weight, group, passes and limits, forgets them.

    A tenant is made when it first has something here, so what is done over all of them costs what those with requests
    cost, whatever the number configured. One made late is as one made early: it begins at the floor in either case.

    Attributes:
        by_id: tenants that have had something here. groups: by name. Order of insertion; nothing may depend on it.
        has_moved, reweighed: of the last ``apply``: whether somebody competes elsewhere now, who has another weight.
    """

    __slots__ = ("_backfill", "_config", "_counters", "_urgency", "by_id", "groups", "has_moved", "reweighed")

    def __init__(self, config: PoolConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._urgency = self._backfill = 0.0
        self.by_id: dict[TenantId, Tenant] = {}
        self.groups: dict[str, Group] = {}
        self.has_moved = False
        self.reweighed: list[Tenant] = []

    def units(self) -> list[Tenant]:
        """What competes for the pool: tenants alone, and groups."""
        return [*(tenant for tenant in self.by_id.values() if tenant.unit is tenant), *self.groups.values()]

    def apply(self, config: PoolConfig) -> list[Tenant]:
        """Take over a configuration; service received stays as it was counted.

        Cost: one comparison per tenant seen, and the work for those that are another object than before.

        Returns:
            tenants that compete as another unit now; their requests have to follow.
        """
        before, self._config = self._config.tenants, config
        now = config.tenants
        counters = self._counters
        self.reweighed = []
        changed = [t for t in self.by_id.values() if before.get(t.tenant_id) is not now.get(t.tenant_id)]
        for tenant in changed:
            share = now.get(tenant.tenant_id)
            tenant.is_configured = share is not None
            if share is not None:
                tenant.max_queued = share.max_queued
                if tenant.weight != share.weight:
                    self._reweigh(tenant, share.weight)
        for name, stated in config.groups.items():
            group = self.groups.get(name)
            if group is None:
                group = self.groups[name] = Group(name, stated.weight)
                group.counter = counters.floor_or_last()
                self._allow(group)
            elif group.weight != stated.weight:
                self._reweigh(group, stated.weight)
                self._allow(group)
        moved = [tenant for tenant in changed if self._move(tenant)]
        self.has_moved = bool(moved)
        for name in [name for name in self.groups if name not in config.groups]:
            del self.groups[name]
        peak = peak_service(config)
        urgency, backfill = urgency_ratio(config) * peak, config.backfill_ratio * peak
        if (urgency, backfill) != (self._urgency, self._backfill):
            self._urgency, self._backfill = urgency, backfill
            for tenant in [*self.by_id.values(), *self.groups.values()]:
                self._allow(tenant)
        else:
            for tenant in changed:
                self._allow(tenant)
        for tenant in [tenant for tenant in self.by_id.values() if not tenant.is_configured]:
            self.drop_idle(tenant)
        return moved

    def _allow(self, tenant: Tenant) -> None:
        """Service by which its urgent work and backfill may go ahead."""
        tenant.urgency_pass = self._urgency / tenant.weight
        tenant.backfill_pass = self._backfill / tenant.weight

    def _reweigh(self, tenant: Tenant, weight: float) -> None:
        self.reweighed.append(tenant)
        if tenant.unit is tenant:
            self._counters.reweigh(tenant, weight)
        else:
            tenant.unit.reweigh(tenant, weight)

    def _move(self, tenant: Tenant) -> bool:
        """Let a tenant compete where the configuration says. Whether that is another place than before."""
        share = self._config.tenants.get(tenant.tenant_id)
        name = None if share is None else share.group
        old = tenant.unit
        new = tenant if name is None else self.groups[name]
        if new is old:
            return False
        counters = self._counters
        waits = tenant.is_backlogged
        if old is tenant:
            if waits:
                counters.idle(tenant)
            counters.forget(tenant)
        else:
            old.dismiss(tenant)
            if waits and not old.has_line:
                counters.idle(old)
        tenant.since = 0
        tenant.unit = new
        for queue in tenant.by_rank:
            queue.tenant = new
        if new is tenant:
            tenant.counter = counters.floor_or_last()
        else:
            new.welcome(tenant)
            if waits:
                new.enter(tenant)
        if waits and not new.is_backlogged:
            counters.backlogged(new)
        return True

    def rebase_counters(self) -> bool:
        """Shift all counters down if they have grown so far that small differences would lose digits; whether so."""
        has_to = self._counters.floor_or_last() > _REBASE_AT
        if has_to:
            self._counters.rebase(self.units())
        return has_to

    def get(self, tenant_id: TenantId) -> Tenant:
        """The tenant by id. One that is not configured (any more) is served with weight 1 until it is gone."""
        tenant = self.by_id.get(tenant_id)
        if tenant is None:
            share = self._config.tenants.get(tenant_id)
            stated = TenantConfig(tenant=tenant_id) if share is None else share
            tenant = self.by_id[tenant_id] = Tenant(stated, is_configured=share is not None)
            self._allow(tenant)
            self._move(tenant)
        return tenant

    def drop_idle(self, tenant: Tenant) -> None:
        """Forget a tenant that is not configured, has nothing here and owes no service."""
        if tenant.is_configured or tenant.num_queued or tenant.num_running:
            return
        if tenant.counter <= self._counters.floor_or_last():
            self.by_id.pop(tenant.tenant_id, None)
