"""Builds a snapshot from the rows and validates it as a router will."""

from __future__ import annotations

import hashlib
from datetime import datetime

import msgspec

from controlplane.common.clock import to_us
from controlplane.common.errors import ConfigRefused
from controlplane.fleet.brakes import cancelled_ids
from controlplane.fleet.queries import pool_records
from controlplane.keys.queries import key_records
from controlplane.tenants.queries import group_records, tenant_records
from controlplane.tiers.queries import tier_records
from router_ext.core.config import ConfigError, build_pool
from router_ext.wire.controlplane import BackendRecord, ConfigSnapshot, snapshot_digest

# Where the operator states no KV size the router takes the backend's own; this stands in for it in the check.
_UNSTATED_KV_TOKENS = 1_000_000


def build_snapshot(*, revision: int, published_at: datetime) -> ConfigSnapshot:
    """The configuration as the rows of this transaction say, with its digest."""
    snapshot = ConfigSnapshot(
        revision=revision,
        published_at_us=to_us(published_at),
        pools=pool_records(),
        tiers=tier_records(),
        tenants=tenant_records(),
        keys=key_records(),
        groups=group_records(),
        cancelled=cancelled_ids(),
    )
    return msgspec.structs.replace(snapshot, digest=snapshot_digest(snapshot))


def content_digest(snapshot: ConfigSnapshot) -> str:
    """Digest of what the snapshot says, whatever its number and date."""
    blank = msgspec.structs.replace(snapshot, revision=0, published_at_us=0, digest="")
    return hashlib.sha256(msgspec.json.encode(blank, order="deterministic")).hexdigest()


def validate_snapshot(snapshot: ConfigSnapshot) -> None:
    """Everything a router would refuse the snapshot for.

    Raises:
        ConfigRefused: naming object, field, value and accepted range.
    """
    tier_names = {t.name for t in snapshot.tiers}
    pool_names = {p.name for p in snapshot.pools}
    tenants = {t.tenant: t for t in snapshot.tenants}
    for tenant in snapshot.tenants:
        unknown = [t for t in tenant.tiers if t not in tier_names]
        if unknown or tenant.default_tier not in tenant.tiers:
            raise ConfigRefused(f"tenant {tenant.name!r}: its tiers {tenant.tiers} or default {tenant.default_tier!r}")
    for key in snapshot.keys:
        owner = tenants[key.tenant]
        outside = [t for t in (*key.tiers, key.default_tier) if t is not None and t not in owner.tiers]
        if outside:
            raise ConfigRefused(f"key {key.public_id} uses the tier {outside[0]!r}, which its tenant may not use")
        if key.default_pool not in pool_names:
            raise ConfigRefused(f"key {key.public_id}: no pool {key.default_pool!r}")
    for pool in snapshot.pools:
        try:
            build_pool(
                pool={**pool.scheduling, "name": pool.name},
                backends=[_as_core(b) for b in pool.backends],
                tiers=[msgspec.to_builtins(t) for t in snapshot.tiers],
                tenants=[msgspec.to_builtins(t) for t in snapshot.tenants],
                groups=[msgspec.to_builtins(g) for g in snapshot.groups],
            )
        except ConfigError as error:
            raise ConfigRefused(str(error)) from error


def _as_core(backend: BackendRecord) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(backend)
    if backend.kv_tokens is None:
        fields["kv_tokens"] = _UNSTATED_KV_TOKENS
    return fields
