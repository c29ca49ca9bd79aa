"""Reads of pools, backends and routers; the live picture from Valkey."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec
import structlog
from django.db.models import Prefetch, QuerySet

from controlplane.common.access import visible
from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.valkey import UNAVAILABLE, valkey
from controlplane.fleet.models import Backend, ModelName, Pool, Router, RouterStatus
from router_ext.core import config as pool_config
from router_ext.core.config import PolicyPage
from router_ext.wire.controlplane import ArtifactRecord, BackendRecord, Heartbeat, PoolRecord

logger = structlog.get_logger(__name__)

HEARTBEAT_KEY = "fairlane:heartbeat:"
LIVE_WITHIN = timedelta(seconds=30)
"""Six times as long as the summary row may lag behind the heartbeats."""
COUNTED_WITHIN = timedelta(seconds=10)
"""Heartbeats come every two seconds, and the row lags by five: silence for less is not the end of a router."""


def policy_pages() -> dict[str, PolicyPage]:
    """Policies a pool may choose, by name, and what each says of itself."""
    return pool_config.policy_pages()


def pools(*, actor: Actor) -> QuerySet[Pool]:
    """Pools with their names and backends."""
    rows = Pool.objects.prefetch_related("model_names", Prefetch("backends", Backend.objects.order_by("name")))
    return visible(rows, actor=actor).order_by("name")


def pool_names(*, actor: Actor) -> dict[str, str]:
    """Name by id: what a key may name as its pool, for people of tenants as well."""
    actor.require(Scope.TENANT_READ)
    return dict(Pool.objects.order_by("name").values_list("id", "name"))


def backend_names(*, actor: Actor) -> dict[str, str]:
    """Name by id."""
    actor.require(Scope.READ)
    return dict(Backend.objects.values_list("id", "name"))


def find_pool(reference: str) -> Pool | None:
    """A pool by id, name or alias. For use cases."""
    if "\0" in reference:
        return None
    word = ModelName.objects.select_related("pool").filter(word=reference).first()
    return word.pool if word is not None else Pool.objects.filter(pk=reference).first()


def aliases(pool: Pool) -> list[str]:
    return sorted(n.word for n in pool.model_names.all() if n.is_alias)


def backends(*, actor: Actor) -> QuerySet[Backend]:
    return visible(Backend.objects.select_related("pool"), actor=actor).order_by("pool__name", "name")


def routers(*, actor: Actor) -> QuerySet[Router]:
    """Routers with the last seen state of their instances."""
    return visible(_routers(), actor=actor)


def _routers() -> QuerySet[Router]:
    instances = Prefetch("instances", RouterStatus.objects.order_by("instance"))
    return Router.objects.prefetch_related(instances).order_by("name")


def live_instances(router: Router) -> list[RouterStatus]:
    """Instances of a router that was not revoked, heard of within ``LIVE_WITHIN``."""
    oldest = utc_now() - LIVE_WITHIN
    return [] if router.revoked_at else [i for i in router.instances.all() if i.seen_at >= oldest]


def n_live_routers() -> int:
    """Instances that were heard of within ten seconds and take requests, at least 1; needs no Valkey."""
    heard = RouterStatus.objects.filter(seen_at__gte=utc_now() - COUNTED_WITHIN, router__revoked_at__isnull=True)
    return max(1, heard.filter(is_draining=False).count())


def router_address(*, actor: Actor) -> str | None:
    """Where a live router listens, as it says itself; None if none was heard of lately."""
    actor.require(Scope.TENANT_READ)
    instances = [i for router in _routers() for i in live_instances(router)]
    return next((i.address for i in instances if i.address), None)


def live_heartbeats(instances: Sequence[str] | None = None) -> dict[str, Heartbeat]:
    """Heartbeat by instance, of the instances (None: of all) that sent one within the last 15 seconds; empty without
    Valkey.
    """
    if instances is None:
        instances = list(RouterStatus.objects.order_by("instance").values_list("instance", flat=True))
    if not instances:
        return {}
    try:
        bodies = valkey().mget([HEARTBEAT_KEY + i for i in instances])
    except UNAVAILABLE:
        logger.warning("heartbeat.valkey_unavailable")
        return {}
    return {
        instance: msgspec.json.decode(body, type=Heartbeat)
        for instance, body in zip(instances, bodies, strict=True)
        if body is not None
    }


def pool_records() -> list[PoolRecord]:
    """The pools of a snapshot with their backends."""
    rows = Pool.objects.prefetch_related("model_names", Prefetch("backends", Backend.objects.order_by("id")))
    return [pool_record(p) for p in rows.order_by("id")]


def pool_record(pool: Pool) -> PoolRecord:
    """A pool as routers get it."""
    return PoolRecord(
        pool=pool.id,
        name=pool.name,
        aliases=aliases(pool),
        scheduling={**pool.scheduling, "policy": pool.policy},
        backends=[_backend_record(b) for b in pool.backends.all()],
        tokenizer_path=pool.tokenizer_path or None,
        is_guarded=pool.is_guarded,
        vocabulary=pool.vocabulary,
        takes_grammars=pool.takes_grammars,
        predictor=_artifact_record(pool.predictor_artifact, pool.predictor_digest, pool.predictor_kind),
        length_model=_artifact_record(pool.length_model_artifact, pool.length_model_digest, pool.length_model_kind),
    )


def _artifact_record(artifact: str, digest: str, kind: str) -> ArtifactRecord | None:
    return ArtifactRecord(artifact=artifact, digest=digest, kind=kind) if artifact else None


def _backend_record(b: Backend) -> BackendRecord:
    return BackendRecord(
        backend=b.id,
        name=b.name,
        url=b.url,
        kv_tokens=b.kv_tokens,
        block_size=b.block_size,
        prefill_budget_tokens=b.prefill_budget_tokens,
        is_chunked=b.is_chunked,
        speculate=b.speculate,
        is_cordoned=b.is_cordoned,
        is_drained=b.is_drained,
        takes_grammars=b.takes_grammars,
        api_key_name=b.api_key_name or None,
    )
