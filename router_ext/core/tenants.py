"""Every tenant that has a share in the pool, requests here, or service that must not be forgotten yet."""

from __future__ import annotations

from router_ext.core.bounds import peak_service
from router_ext.core.config import PoolConfig, TenantConfig
from router_ext.core.fairness.counters import Counters
from router_ext.core.fairness.slo_fair import urgency_ratio
from router_ext.core.ids import TenantId
from router_ext.core.queues import Tenant

_REBASE_AT = 2.0**40
"""Counters are shifted down at the next change of configuration once the floor exceeds this. Doubles resolve a
thousandth of a token there, so it may take years longer without harm."""


class Tenants:
    """Owns the tenants: makes them, gives them weight, passes and limits, forgets them.

    Attributes:
        by_id: all of them. Order of insertion; nothing may depend on it.
    """

    __slots__ = ("_config", "_counters", "by_id")

    def __init__(self, config: PoolConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self.by_id: dict[TenantId, Tenant] = {}

    def apply(self, config: PoolConfig) -> None:
        """Take over a configuration; service received stays as it was counted."""
        self._config = config
        for tenant in self.by_id.values():
            tenant.is_configured = tenant.tenant_id in config.tenants
        for tenant_id, share in config.tenants.items():
            tenant = self.by_id.get(tenant_id) or self._add(share, is_configured=True)
            tenant.max_queued = share.max_queued
            if tenant.weight != share.weight:
                self._counters.reweigh(tenant, share.weight)
        urgency, backfill = self._passes()
        for tenant in list(self.by_id.values()):
            tenant.urgency_pass = urgency / tenant.weight
            tenant.backfill_pass = backfill / tenant.weight
            self.drop_idle(tenant)

    def rebase_counters(self) -> None:
        """Shift all counters down if they have grown so far that small differences would lose digits."""
        if self._counters.floor_or_last() > _REBASE_AT:
            self._counters.rebase(list(self.by_id.values()))

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
