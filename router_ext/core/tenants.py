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

    Attributes:
        by_id: all tenants. groups: by name. Order of insertion; nothing may depend on it.
    """

    __slots__ = ("_config", "_counters", "by_id", "groups")

    def __init__(self, config: PoolConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self.by_id: dict[TenantId, Tenant] = {}
        self.groups: dict[str, Group] = {}

    def units(self) -> list[Tenant]:
        """What competes for the pool: tenants alone, and groups."""
        return [*(tenant for tenant in self.by_id.values() if tenant.unit is tenant), *self.groups.values()]

    def apply(self, config: PoolConfig) -> list[Tenant]:
        """Take over a configuration; service received stays as it was counted.

        Returns:
            tenants that compete as another unit now; their requests have to follow.
        """
        self._config = config
        counters = self._counters
        for tenant in self.by_id.values():
            tenant.is_configured = tenant.tenant_id in config.tenants
        for tenant_id, share in config.tenants.items():
            tenant = self.by_id.get(tenant_id) or self._add(share, is_configured=True)
            tenant.max_queued = share.max_queued
            if tenant.weight != share.weight:
                self._reweigh(tenant, share.weight)
        for name, stated in config.groups.items():
            group = self.groups.get(name)
            if group is None:
                group = self.groups[name] = Group(name, stated.weight)
                group.counter = counters.floor_or_last()
            elif group.weight != stated.weight:
                self._reweigh(group, stated.weight)
        moved = [tenant for tenant in self.by_id.values() if self._move(tenant)]
        for name in [name for name in self.groups if name not in config.groups]:
            del self.groups[name]
        urgency, backfill = self._passes()
        for tenant in [*self.by_id.values(), *self.groups.values()]:
            tenant.urgency_pass = urgency / tenant.weight
            tenant.backfill_pass = backfill / tenant.weight
        for tenant in list(self.by_id.values()):
            self.drop_idle(tenant)
        return moved

    def _reweigh(self, tenant: Tenant, weight: float) -> None:
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

    def rebase_counters(self) -> None:
        """Shift all counters down if they have grown so far that small differences would lose digits."""
        if self._counters.floor_or_last() > _REBASE_AT:
            self._counters.rebase(self.units())

    def get(self, tenant_id: TenantId) -> Tenant:
        """The tenant by id. One that is not configured (any more) is served with weight 1 until it is gone."""
        tenant = self.by_id.get(tenant_id)
        if tenant is None:
            tenant = self._add(TenantConfig(tenant=tenant_id), is_configured=False)
            urgency, backfill = self._passes()
            tenant.urgency_pass = urgency / tenant.weight
            tenant.backfill_pass = backfill / tenant.weight
        return tenant

    def drop_idle(self, tenant: Tenant) -> None:
        """Forget a tenant that is not configured, has nothing here and owes no service."""
        if tenant.is_configured or tenant.num_queued or tenant.num_running:
            return
        if tenant.counter <= self._counters.floor_or_last():
            self.by_id.pop(tenant.tenant_id, None)

    def _add(self, share: TenantConfig, *, is_configured: bool) -> Tenant:
        tenant = self.by_id[share.tenant] = Tenant(share, is_configured=is_configured)
        return tenant

    def _passes(self) -> tuple[float, float]:
        """Service by which urgent work and backfill may go ahead, before division by the tenant's weight."""
        peak = peak_service(self._config)
        return urgency_ratio(self._config) * peak, self._config.backfill_ratio * peak
