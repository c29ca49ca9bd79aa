"""Builds a snapshot from the rows and validates it as a router will."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import NamedTuple

import msgspec

from controlplane.common.clock import to_us
from controlplane.common.errors import ConfigRefused
from controlplane.fleet.brakes import cancelled_ids, own_cancelled
from controlplane.fleet.queries import pool_records
from controlplane.keys.queries import key_records
from controlplane.tenants.queries import group_records, tenant_records
from controlplane.tiers.queries import tier_records
from router_ext.core.config import ConfigError, build_group, build_pool, build_shares, build_tenant
from router_ext.wire.controlplane import BackendRecord, ConfigSnapshot
from router_ext.wire.decoding import NotDecoded
from router_ext.wire.deltas import difference

# Where the operator states no KV size the router takes the backend's own; this stands in for it in the check.
_UNSTATED_KV_TOKENS = 1_000_000


class Built(NamedTuple):
    """A snapshot, its JSON, and the digest of what it says, whatever its number and date."""

    snapshot: ConfigSnapshot
    body: bytes
    content_digest: str


def build_snapshot(*, revision: int, published_at: datetime) -> Built:
    """The configuration as the rows of this transaction say, with its digests.

    Everything but number, date and digest is encoded once, and is the middle of all three texts.
    """
    snapshot = ConfigSnapshot(
        revision=revision,
        published_at_us=to_us(published_at),
        pools=pool_records(),
        tiers=tier_records(),
        tenants=tenant_records(),
        keys=key_records(),
        groups=group_records(),
        cancelled=cancelled_ids(),
        own_cancelled=own_cancelled(),
    )
    text = memoryview(msgspec.json.encode(snapshot, order="deterministic"))
    head = b'{"revision":%d,"published_at_us":%d,' % (revision, snapshot.published_at_us)
    tail = b'"digest":""}'
    if bytes(text[: len(head)]) != head or bytes(text[-len(tail) :]) != tail:
        raise RuntimeError("the fields of a snapshot are not in the order in which its digests are made")
    digest = hashlib.sha256(text).hexdigest()
    content = hashlib.sha256(b'{"revision":0,"published_at_us":0,')
    content.update(text[len(head) :])
    body = b"".join((text[: -len(tail)], b'"digest":"', digest.encode(), b'"}'))
    return Built(msgspec.structs.replace(snapshot, digest=digest), body, content.hexdigest())


def delta_between(before: bytes, after: bytes) -> bytes | None:
    """JSON of the delta between two snapshots; None if it would be no shorter than half of the whole."""
    try:
        delta = difference(before, after)
    except NotDecoded:
        return None  # of a version that nobody remembers: routers take the whole
    encoded = msgspec.json.encode(delta, order="deterministic")
    return encoded if len(encoded) <= len(after) // 2 else None


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
    try:
        shares = build_shares(
            (build_tenant(msgspec.structs.asdict(t)) for t in snapshot.tenants),
            (build_group(msgspec.structs.asdict(g)) for g in snapshot.groups),
        )
    except ConfigError as error:
        raise ConfigRefused(str(error)) from error
    for pool in snapshot.pools:
        try:
            build_pool(
                pool={**pool.scheduling, "name": pool.name},
                backends=[_as_core(b) for b in pool.backends],
                tiers=[msgspec.to_builtins(t) for t in snapshot.tiers],
                shares=shares,
            )
        except ConfigError as error:
            raise ConfigRefused(str(error)) from error


def _as_core(backend: BackendRecord) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(backend)
    if backend.kv_tokens is None:
        fields["kv_tokens"] = _UNSTATED_KV_TOKENS
    return fields
