"""From a snapshot to what the gateway works with. Everything is validated before anything is replaced."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from router_ext.backends.pool import Member
from router_ext.backends.tgi import parse_address
from router_ext.core.config import (
    ConfigError,
    PoolConfig,
    Shares,
    TenantConfig,
    build_group,
    build_pool,
    build_shares,
    build_tenant,
)
from router_ext.core.ids import BackendId, TierName
from router_ext.errors import ModelNotFound, SettingsError, SnapshotRefused
from router_ext.gateway.auth import Identity, KeyRing
from router_ext.gateway.limits import NO_LIMITS, has_quota
from router_ext.settings import load_backend_key
from router_ext.wire.controlplane import BackendRecord, ConfigSnapshot, LimitsRecord, PoolRecord, TenantRecord
from router_ext.wire.tgi import Info

STOPPED, SUSPENDED = "stopped", "suspended"
"""States of a tenant that may not even finish, and of one that may not begin."""

DEFAULT_MODELS = frozenset({"", "tgi", "dummy"})
"""What clients send when they mean "whatever runs here" (``dummy`` is huggingface_hub's)."""

_UNKNOWN_LIMIT = 4_096
"""Stands in for ``/info``'s limits while a configuration is checked before its backends were asked."""


class Roster:
    """Tenants and groups of one snapshot as the schedulers of all pools need them, made once. Immutable.

    Shares of tenants that are the very records of ``before`` are its objects, so that what follows it sees by identity
    who has changed.

    Attributes:
        shares: validated. stopped, suspended: ids of tenants of which nothing may run, or nothing may begin.

    Raises:
        ConfigError: naming field, value and accepted range.
    """

    def __init__(self, snapshot: ConfigSnapshot, before: Roster | None = None) -> None:
        known = {} if before is None else before._shares
        self._shares: dict[str, tuple[TenantRecord, TenantConfig]] = {}
        for number, record in enumerate(snapshot.tenants, start=1):
            entry = known.get(record.tenant)
            if entry is None or entry[0] is not record:
                share = build_tenant(
                    {
                        "tenant": record.tenant,
                        "weight": record.weight,
                        "max_queued": record.max_queued,
                        "group": record.group,
                    }
                )
                entry = (record, share if entry is None or entry[1] != share else entry[1])
            self._shares[record.tenant] = entry
            if number % 64 == 0:
                time.sleep(0)  # made in a worker thread: gives the interpreter lock away
        groups = map(build_group, map(msgspec.structs.asdict, snapshot.groups))
        self.shares: Shares = build_shares((share for _, share in self._shares.values()), groups)
        self.stopped = frozenset(record.tenant for record in snapshot.tenants if record.state == STOPPED)
        self.suspended = frozenset(record.tenant for record in snapshot.tenants if record.state == SUSPENDED)

    def name_of(self, tenant: str) -> str:
        """What people call a tenant; its id if it is configured no more."""
        entry = self._shares.get(tenant)
        return tenant if entry is None else entry[0].name


class Directory:
    """One applied snapshot: keys, pools by name, revision, limits of tenants and keys that have some. Immutable.
    ``before``: the one it follows. ``has_new_quotas``: somebody has a quota who had none there.

    Made in a worker thread: ten thousands of keys take a while, and the loop goes on serving.

    Raises:
        SnapshotRefused: with the reason; nothing has been applied.
    """

    def __init__(self, snapshot: ConfigSnapshot, peppers: Mapping[int, bytes], before: Directory | None = None) -> None:
        self.roster: Roster
        self.keys: KeyRing
        self.snapshot = snapshot
        self.revision = snapshot.revision
        self.pools = {record.pool: record for record in snapshot.pools}
        self._take_limits(snapshot, {} if before is None else before.limits)
        self.ranks = {TierName(tier.name): tier.rank for tier in snapshot.tiers}
        self._by_name: dict[str, PoolRecord] = {}
        for record in snapshot.pools:
            for name in (record.name, *record.aliases):
                if name in self._by_name and self._by_name[name] is not record:
                    raise SnapshotRefused(f"revision {snapshot.revision}: two pools answer to {name!r}")
                self._by_name[name] = record
        try:
            self.roster = Roster(snapshot, None if before is None else before.roster)
        except ConfigError as error:
            raise SnapshotRefused(f"revision {snapshot.revision}: {error}") from None
        for record in snapshot.pools:
            for backend in record.backends:
                try:
                    parse_address(backend.url)
                    if backend.api_key_name:
                        load_backend_key(backend.api_key_name)
                except (ValueError, SettingsError) as error:
                    raise SnapshotRefused(f"revision {snapshot.revision}: backend {backend.name!r}: {error}") from None
            pool_config(record, snapshot, {}, self.roster.shares)
        self.keys = KeyRing(snapshot, peppers, None if before is None else before.keys)

    def _take_limits(self, snapshot: ConfigSnapshot, before: Mapping[str, LimitsRecord]) -> None:
        self.limits: dict[str, LimitsRecord] = {}
        self.has_new_quotas = False
        tenants = ((each.tenant, each.limits) for each in snapshot.tenants)
        keys = ((each.key, each.limits) for each in snapshot.keys)
        for number, (scope, record) in enumerate(itertools.chain(tenants, keys), start=1):
            if record != NO_LIMITS:
                self.limits[scope] = record
                known = before.get(scope, NO_LIMITS)
                # Records that have not changed are mostly the same objects.
                if record is not known and has_quota(record) and not has_quota(known):
                    self.has_new_quotas = True
            if number % 64 == 0:
                time.sleep(0)  # as above

    def parts(self) -> list[list[Any]]:
        """What there is very much of, for ``let_go`` once another one is in force: freed at once it stops the loop."""
        return [self.keys.entries(), list(self.roster.shares.tenants.values()), list(self.limits.values())]

    def resolve(self, model: str | None, identity: Identity) -> PoolRecord:
        """The pool that serves a request.

        Raises:
            ModelNotFound: no pool carries the name (TGI itself would serve any name).
        """
        wanted = identity.default_pool if model is None or model in DEFAULT_MODELS else model
        record = self._by_name.get(wanted)
        if record is None:
            raise ModelNotFound(f"The model `{wanted[:200]}` does not exist or is not served here.", param="model")
        return record


def pool_config(
    record: PoolRecord, snapshot: ConfigSnapshot, members: Mapping[BackendId, Member[Any]], shares: Shares
) -> PoolConfig:
    """Configuration of a pool's scheduler: the snapshot's numbers, completed by what the backends say of themselves.

    Args:
        members: backends under watch; empty to check a snapshot before its backends were asked.
        shares: those of the snapshot (``Roster``).

    Raises:
        SnapshotRefused: naming field, value and accepted range.
    """
    backends = []
    for backend in record.backends:
        member = members.get(BackendId(backend.backend))
        if members and (member is None or member.info is None):
            # Nothing is known of its limits: it takes no part until it has answered.
            continue
        backends.append(_backend_fields(backend, None if member is None else member.info))
    try:
        return build_pool(
            pool={**record.scheduling, "name": record.name},
            backends=backends,
            tiers=[msgspec.structs.asdict(tier) for tier in snapshot.tiers],
            shares=shares,
        )
    except (ConfigError, KeyError, TypeError) as error:
        raise SnapshotRefused(f"revision {snapshot.revision}: {error}") from None


def grammar_limits(snapshot: ConfigSnapshot) -> dict[TierName, float]:
    """Seconds that a new grammar may stall a backend, of the tiers that state it."""
    return {TierName(t.name): t.grammar_stall_s for t in snapshot.tiers if t.grammar_stall_s is not None}


def _backend_fields(record: BackendRecord, info: Info | None) -> dict[str, object]:
    max_total_tokens = _UNKNOWN_LIMIT if info is None else info.max_total_tokens
    kv_tokens = record.kv_tokens
    if kv_tokens is None:
        # What TGI guarantees: one request of the largest size. It needs the block kept for health checks besides.
        kv_tokens = max_total_tokens + record.block_size
    return {
        "backend": record.backend,
        "kv_tokens": kv_tokens,
        "block_size": record.block_size,
        "prefill_budget_tokens": record.prefill_budget_tokens,
        "is_chunked": record.is_chunked,
        "speculate": record.speculate,
        "is_cordoned": record.is_cordoned or record.is_drained,
        "takes_grammars": record.takes_grammars,
        "max_input_tokens": max_total_tokens - 1 if info is None else info.max_input_tokens,
        "max_total_tokens": max_total_tokens,
        "max_concurrent_requests": 128 if info is None else info.max_concurrent_requests,
        "max_sequences": 2 if info is None else min(max(info.max_best_of, 1), 128),
    }
