"""Frozen, validated configuration of one pool, and the builder that control plane and router share.

``build_pool`` takes plain mappings (the builtins of the wire records), so that the same validation runs where a
revision is built and where it is applied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router_ext.core.ids import BackendId, TenantId, TierName


def policy_names() -> tuple[str, ...]:
    """Policies a pool may choose: those registered in ``core.fairness``."""
    # A policy is made from a PoolConfig, so its module needs this one first.
    from router_ext.core.fairness import POLICIES

    return tuple(POLICIES)


class ConfigError(ValueError):
    """A value outside its range; the message names field, value and accepted range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """An SLO tier. Weight buys share; a tier buys a latency target. Smaller ``rank`` goes first inside a tenant."""

    name: TierName
    rank: int
    ttft_target_s: float | None = None
    max_queue_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A tenant's share in the pool. ``max_queued`` bounds its waiting requests."""

    tenant: TenantId
    weight: float = 1.0
    max_queued: int = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """What the operator states of one TGI server (none of it but the two limits is in ``/info``).

    Units: tokens, except ``block_size`` (tokens per block) and ``max_concurrent_requests``.
    """

    backend: BackendId
    kv_tokens: int
    block_size: int = 1
    prefill_budget_tokens: int = 4_096
    is_chunked: bool = True
    speculate: int = 0
    max_input_tokens: int = 1_024
    max_total_tokens: int = 2_048
    max_concurrent_requests: int = 128
    is_cordoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Everything the scheduler of one pool needs to know.

    Attributes:
        burst_ratio: urgency pass as a share of U' (``design``: default 1/4).
        backfill_ratio: pass for using another backend or backfilling behind the pick, share of U'.
        gamma: weight of predicted in-flight work in the decision key; 0 switches it off.
        headroom_ratio: least share of the KV that non-urgent work leaves free while a tier with a target is active.
        max_queued: bound of the whole pool's queue.
        backend_wait_s: how long queued requests wait for a backend when none is up.
        max_slice_tokens: upper limit of every slice. TGI reserves at most 1,024 new tokens, so more buys nothing;
            a smaller limit makes every sliceable request yield after that many tokens.
        min_slice_tokens: no slice is shrunk below this to squeeze a request in: a slice costs its prompt again.
        aging_s, aging_ratio: inside one tenant, requests of a lower tier that waited longer than ``aging_s`` get
            this share of the tenant's admissions, oldest first, so that no tier of its own can starve another.
    """

    name: str
    policy: str = "slo-fair"
    tiers: Mapping[TierName, TierConfig] = field(default_factory=dict)
    tenants: Mapping[TenantId, TenantConfig] = field(default_factory=dict)
    backends: Mapping[BackendId, BackendConfig] = field(default_factory=dict)
    w_prompt: float = 1.0
    w_output: float = 2.0
    burst_ratio: float = 0.25
    backfill_ratio: float = 0.05
    gamma: float = 0.0
    headroom_ratio: float = 0.01
    max_queued: int = 20_000
    backend_wait_s: float = 30.0
    max_slice_tokens: int = 1_024
    min_slice_tokens: int = 64
    aging_s: float = 30.0
    aging_ratio: float = 0.1


def _number(
    mapping: Mapping[str, Any], key: str, default: float, low: float, high: float, where: str, *, low_open: bool = False
) -> float:
    value = mapping.get(key, default)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {key} must be a number, not {value!r}")
    if value < low or value > high or (low_open and value == low):
        bracket = "above" if low_open else "from"
        raise ConfigError(f"{where}: {key} {value!r} is out of range ({bracket} {low:g} to {high:g})")
    return float(value)


def _integer(mapping: Mapping[str, Any], key: str, default: int, low: int, high: int, where: str) -> int:
    value = _number(mapping, key, default, low, high, where)
    if value != int(value):
        raise ConfigError(f"{where}: {key} must be a whole number, not {value!r}")
    return int(value)


def _optional(mapping: Mapping[str, Any], key: str, low: float, high: float, where: str) -> float | None:
    if mapping.get(key) is None:
        return None
    return _number(mapping, key, 0, low, high, where, low_open=True)


def build_tier(mapping: Mapping[str, Any]) -> TierConfig:
    """Validate one tier."""
    where = f"tier {mapping.get('name')!r}"
    return TierConfig(
        name=TierName(str(mapping["name"])),
        rank=_integer(mapping, "rank", 100, 0, 10_000, where),
        ttft_target_s=_optional(mapping, "ttft_target_s", 0, 3_600, where),
        max_queue_wait_s=_optional(mapping, "max_queue_wait_s", 0, 86_400, where),
    )


def build_tenant(mapping: Mapping[str, Any]) -> TenantConfig:
    """Validate one tenant's share. A weight of 0 is refused: "background" is a tier, not a weight."""
    where = f"tenant {mapping.get('tenant')!r}"
    return TenantConfig(
        tenant=TenantId(str(mapping["tenant"])),
        weight=_number(mapping, "weight", 1.0, 0.001, 10_000, where),
        max_queued=_integer(mapping, "max_queued", 2_000, 1, 1_000_000, where),
    )


def build_backend(mapping: Mapping[str, Any]) -> BackendConfig:
    """Validate one backend; the KV must hold at least one block beside the reserved one."""
    where = f"backend {mapping.get('backend')!r}"
    config = BackendConfig(
        backend=BackendId(str(mapping["backend"])),
        kv_tokens=_integer(mapping, "kv_tokens", 0, 2, 1_000_000_000, where),
        block_size=_integer(mapping, "block_size", 1, 1, 1_024, where),
        prefill_budget_tokens=_integer(mapping, "prefill_budget_tokens", 4_096, 1, 10_000_000, where),
        is_chunked=bool(mapping.get("is_chunked", True)),
        speculate=_integer(mapping, "speculate", 0, 0, 64, where),
        max_input_tokens=_integer(mapping, "max_input_tokens", 1_024, 1, 10_000_000, where),
        max_total_tokens=_integer(mapping, "max_total_tokens", 2_048, 2, 10_000_000, where),
        max_concurrent_requests=_integer(mapping, "max_concurrent_requests", 128, 1, 1_000_000, where),
        is_cordoned=bool(mapping.get("is_cordoned", False)),
    )
    if config.kv_tokens < 2 * config.block_size:
        raise ConfigError(
            f"{where}: kv_tokens {config.kv_tokens} is less than two blocks of {config.block_size} tokens"
        )
    return config


def build_pool(
    *,
    pool: Mapping[str, Any],
    backends: Iterable[Mapping[str, Any]],
    tiers: Iterable[Mapping[str, Any]],
    tenants: Iterable[Mapping[str, Any]],
) -> PoolConfig:
    """Validate everything that concerns one pool.

    Args:
        pool: fields of ``PoolConfig`` by name; unknown ones are ignored (they belong to the gateway).
        backends: fields of ``BackendConfig`` by name. tiers, tenants: likewise.

    Raises:
        ConfigError: naming the field, its value and the accepted range.
    """
    name = str(pool.get("name", ""))
    where = f"pool {name!r}"
    policy = str(pool.get("policy") or "slo-fair")
    if policy not in policy_names():
        raise ConfigError(f"{where}: unknown policy {policy!r} (one of {', '.join(policy_names())})")
    return PoolConfig(
        name=name,
        policy=policy,
        tiers={t.name: t for t in map(build_tier, tiers)},
        tenants={t.tenant: t for t in map(build_tenant, tenants)},
        backends={b.backend: b for b in map(build_backend, backends)},
        w_prompt=_number(pool, "w_prompt", 1.0, 0, 1_000, where),
        w_output=_number(pool, "w_output", 2.0, 0.001, 1_000, where),
        burst_ratio=_number(pool, "burst_ratio", 0.25, 0, 10, where),
        backfill_ratio=_number(pool, "backfill_ratio", 0.05, 0, 10, where),
        gamma=_number(pool, "gamma", 0.0, 0, 1, where),
        headroom_ratio=_number(pool, "headroom_ratio", 0.01, 0, 0.9, where),
        max_queued=_integer(pool, "max_queued", 20_000, 1, 10_000_000, where),
        backend_wait_s=_number(pool, "backend_wait_s", 30.0, 0, 3_600, where),
        max_slice_tokens=_integer(pool, "max_slice_tokens", 1_024, 1, 1_024, where),
        min_slice_tokens=_integer(pool, "min_slice_tokens", 64, 1, 1_024, where),
        aging_s=_number(pool, "aging_s", 30.0, 0, 86_400, where),
        aging_ratio=_number(pool, "aging_ratio", 0.1, 0, 0.5, where),
    )
