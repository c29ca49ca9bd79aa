"""What a pool is doing now, as JSON: the figures of the console's live page."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.common.actor import Actor
from controlplane.common.validation import get_or_not_found
from controlplane.fleet import queries
from controlplane.fleet.live import BackendNow, PoolNow, TenantNow, TierNow, pools_now


class LiveTierSerializer(serializers.Serializer[Any]):
    """TTFT of the first tokens of ``recent_s`` seconds, in milliseconds; null without any."""

    tier = serializers.CharField()
    waiting = serializers.IntegerField()
    first_tokens = serializers.IntegerField()
    ttft_p50_ms = serializers.FloatField(allow_null=True)
    ttft_p95_ms = serializers.FloatField(allow_null=True)
    ttft_p99_ms = serializers.FloatField(allow_null=True)
    ttft_target_s = serializers.FloatField(allow_null=True)
    in_time_ratio = serializers.FloatField(allow_null=True, help_text="Part of them within the target")


class LiveBackendSerializer(serializers.Serializer[Any]):
    backend = serializers.CharField()
    states: Any = serializers.DictField(
        child=serializers.ListField(child=serializers.CharField()), help_text="Routers by the state they see it in"
    )
    running = serializers.IntegerField()
    reserved_tokens = serializers.IntegerField()
    kv_tokens = serializers.IntegerField(allow_null=True, help_text="Null while no router knows it")


class LiveTenantSerializer(serializers.Serializer[Any]):
    """Service of ``recent_s`` seconds: prompt tokens and twice the output tokens; null if no router tells.

    Tokens: since the routers started.
    """

    tenant = serializers.CharField(allow_null=True, help_text="Null: the sum of those that routers do not name")
    group = serializers.CharField(allow_null=True)
    number = serializers.IntegerField(help_text="1, or how many are summed, once for each router")
    waiting = serializers.IntegerField()
    running = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    service = serializers.FloatField(allow_null=True)
    entitled_service = serializers.FloatField(allow_null=True)


class PoolLiveSerializer(serializers.Serializer[Any]):
    """Sums over all routers that report the pool; bound and gap are the largest of any."""

    pool = serializers.CharField()
    routers: Any = serializers.ListField(child=serializers.CharField())
    policies: Any = serializers.ListField(child=serializers.CharField())
    running = serializers.IntegerField()
    waiting = serializers.IntegerField()
    parked = serializers.IntegerField(help_text="Of those that wait, for a server large enough")
    recent_s = serializers.IntegerField(allow_null=True, help_text="Length of the last minutes; null: no router tells")
    output_tokens_per_s = serializers.FloatField(allow_null=True)
    refused: Any = serializers.DictField(
        child=serializers.IntegerField(), help_text="Refused or expired in these seconds, by code"
    )
    preempted: Any = serializers.DictField(
        child=serializers.IntegerField(), help_text="Told to stop for others in these seconds, by trigger"
    )
    bound_service = serializers.FloatField(allow_null=True)
    largest_gap_service = serializers.FloatField(allow_null=True)
    tiers = LiveTierSerializer(many=True)
    backends = LiveBackendSerializer(many=True)
    tenants = LiveTenantSerializer(many=True)


def pool_live(*, actor: Actor, pool_id: str) -> dict[str, Any]:
    """The pool as the heartbeats of the last 15 seconds tell of it; fields as ``PoolLiveSerializer``.

    Raises:
        NotFound: no such pool.
    """
    pool = get_or_not_found(queries.pools(actor=actor), "pool", pool_id)
    now = pools_now(queries.live_heartbeats()).get(pool.id, PoolNow(pool.id))
    others = [now.others] if now.others.number else []
    return {
        **{name: getattr(now, name) for name in _SAME},
        "preempted": {trigger: n for trigger, n in now.preempted.items() if n},
        "tiers": [_tier(tier) for tier in now.tiers.values()],
        "backends": [_backend(b) for _, b in sorted(now.backends.items())],
        "tenants": [_tenant(t) for t in (*now.busiest(), *others)],
    }


_SAME = ("pool", "routers", "policies", "running", "waiting", "parked", "recent_s", "output_tokens_per_s", "refused",
         "bound_service", "largest_gap_service")  # fmt: skip


def _tier(tier: TierNow) -> dict[str, Any]:
    p50, p95, p99 = tier.percentiles_ms
    return {
        "tier": tier.name,
        "waiting": tier.waiting,
        "first_tokens": tier.requests,
        "ttft_p50_ms": p50,
        "ttft_p95_ms": p95,
        "ttft_p99_ms": p99,
        "ttft_target_s": tier.target_s,
        "in_time_ratio": tier.in_time_ratio,
    }


def _backend(b: BackendNow) -> dict[str, Any]:
    return {
        "backend": b.backend,
        "states": dict(b.states),
        "running": b.running,
        "reserved_tokens": b.reserved_tokens,
        "kv_tokens": b.kv_tokens or None,
    }


def _tenant(t: TenantNow) -> dict[str, Any]:
    return {
        "tenant": t.tenant or None,
        "group": t.group,
        "number": t.number,
        "waiting": t.waiting,
        "running": t.running,
        "prompt_tokens": t.prompt_tokens,
        "output_tokens": t.output_tokens,
        "service": t.service,
        "entitled_service": t.entitled,
    }
