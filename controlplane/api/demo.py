"""The demo's tenants, pool and credentials, laid down again and again without harm.

Rows are found by their names; what an operator has changed since stays. Credentials that the caller still holds and
that are still good are kept, others are issued anew: secrets cannot be read back.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controlplane.accounts.actions import issue_token
from controlplane.accounts.models import OperatorToken, Role, User
from controlplane.accounts.queries import first_operator
from controlplane.common import secrets
from controlplane.common.actor import Actor, Scope, system_actor
from controlplane.common.errors import Conflict
from controlplane.common.use_case import use_case
from controlplane.fleet.actions import create_backend, create_pool, delete_backend, update_backend
from controlplane.fleet.models import Backend, Pool, Router
from controlplane.fleet.routers import create_router, renew_router_token
from controlplane.keys.actions import issue_key, update_key
from controlplane.keys.models import ApiKey
from controlplane.rollout.queries import current_number
from controlplane.tenants.actions import create_tenant
from controlplane.tenants.models import Tenant
from controlplane.tiers.actions import create_tier
from controlplane.tiers.models import Tier

TIERS: tuple[tuple[str, int, float | None], ...] = (
    ("interactive", 0, 2.0),
    ("standard", 10, None),
    ("batch", 20, None),
)
"""Name, rank, TTFT target in seconds."""
TENANTS = (("chatbot", "interactive"), ("batch", "batch"))
"""Slug and only tier. Equal weights: what differs between the two is the promise of latency."""
BACKEND_NAME = "local"
ROUTER_NAME = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPool:
    """The model server as its operator states it."""

    name: str
    url: str
    further_urls: Sequence[str] = ()
    aliases: Sequence[str] = ()
    kv_tokens: int | None = None
    block_size: int = 1
    prefill_budget_tokens: int = 4_096
    is_chunked: bool = True
    tokenizer_path: str = ""
    scheduling: Mapping[str, Any] = field(default_factory=dict)


def seed_demo(*, pool: DemoPool, held: Mapping[str, Any]) -> dict[str, Any]:
    """Make sure that everything is there; returns ids and all secrets.

    Args:
        held: what an earlier call returned, as far as the caller still has it.

    Returns:
        ``{"pool", "pool_id", "router_id", "router_token", "operator_email", "operator_token", "tenants": {slug: key},
        "tenant_ids": {slug: id}, "revision"}``

    Raises:
        Conflict: no operator account exists yet.
    """
    result = _seed(actor=system_actor("seed_demo"), pool=pool, held=held)
    return {**result, "revision": current_number()}


@use_case()
def _seed(*, actor: Actor, pool: DemoPool, held: Mapping[str, Any]) -> dict[str, Any]:
    operator = first_operator()
    if operator is None:
        raise Conflict("there is no operator account yet (manage.py bootstrap_operator)")
    for name, rank, target in TIERS:
        if not Tier.objects.filter(name=name).exists():
            create_tier(actor=actor, name=name, rank=rank, ttft_target_s=target)
    row = _pool(actor, pool)
    tenants, tenant_ids = {}, {}
    for slug, tier in TENANTS:
        tenant = Tenant.objects.filter(slug=slug).first() or create_tenant(
            actor=actor, name=slug.capitalize(), slug=slug, tiers=[tier], default_tier=tier
        )
        tenant_ids[slug] = tenant.id
        tenants[slug] = _key(actor, tenant, row, str((held.get("tenants") or {}).get(slug) or ""))
    router_id, router_token = _router(actor, str(held.get("router_token") or ""))
    return {
        "pool": row.name,
        "pool_id": row.id,
        "router_id": router_id,
        "router_token": router_token,
        "operator_email": operator.email,
        "operator_token": _operator_token(actor, str(held.get("operator_token") or "")),
        "tenants": tenants,
        "tenant_ids": tenant_ids,
    }


def _pool(actor: Actor, wanted: DemoPool) -> Pool:
    """The pool with its backends, whose addresses and limits follow the model servers that were started."""
    pool = Pool.objects.filter(name=wanted.name).first() or create_pool(
        actor=actor,
        name=wanted.name,
        aliases=wanted.aliases,
        scheduling=wanted.scheduling,
        tokenizer_path=wanted.tokenizer_path,
    )
    limits: dict[str, Any] = {
        "kv_tokens": wanted.kv_tokens,
        "block_size": wanted.block_size,
        "prefill_budget_tokens": wanted.prefill_budget_tokens,
        "is_chunked": wanted.is_chunked,
    }
    missing = [wanted.url, *wanted.further_urls]
    stale = []
    for backend in Backend.objects.filter(pool=pool).order_by("name"):
        if backend.url in missing:
            missing.remove(backend.url)
            update_backend(actor=actor, backend_id=backend.id, **limits)
        elif backend.name.partition("-")[0] == BACKEND_NAME:
            stale.append(backend)
    for backend in stale:  # ours, and no longer among the addresses
        if missing:
            update_backend(actor=actor, backend_id=backend.id, url=missing.pop(0), **limits)
        else:
            delete_backend(actor=actor, backend_id=backend.id)
    for url in missing:
        create_backend(actor=actor, pool=pool.id, name=_free_name(pool), url=url, **limits)
    return pool


def _free_name(pool: Pool) -> str:
    taken = set(Backend.objects.filter(pool=pool).values_list("name", flat=True))
    return next(
        name for n in itertools.count(1) if (name := BACKEND_NAME if n == 1 else f"{BACKEND_NAME}-{n}") not in taken
    )


def _key(actor: Actor, tenant: Tenant, pool: Pool, held: str) -> str:
    """The tenant's demo key, which asks this pool when a request names no model."""
    rows = ApiKey.objects.filter(tenant=tenant, revoked_at__isnull=True)
    live = rows.filter(digest__in=secrets.digests(held).values()).first()
    if not held or live is None:
        return issue_key(actor=actor, tenant_id=tenant.id, name="demo", default_pool=pool.id)[1]
    if live.default_pool_id != pool.id:
        update_key(actor=actor, key_id=live.id, default_pool=pool.id)
    return held


def _router(actor: Actor, held: str) -> tuple[str, str]:
    router = Router.objects.filter(name=ROUTER_NAME).first()
    if router is None:
        router, token = create_router(actor=actor, name=ROUTER_NAME)
        return router.id, token
    if held and router.revoked_at is None and secrets.is_digest_of(held, router.token_digest, router.pepper_version):
        return router.id, held
    return router.id, renew_router_token(actor=actor, router_id=router.id)[1]


def _operator_token(actor: Actor, held: str) -> str:
    writers = User.objects.filter(is_active=True, role__in=(Role.OWNER, Role.OPERATOR))
    live = OperatorToken.objects.filter(revoked_at__isnull=True, user__in=writers)
    if held and live.filter(digest__in=secrets.digests(held).values()).exists():
        return held
    owner = first_operator()
    assert owner is not None
    return issue_token(actor=actor, user=owner, name="command line", scopes=[Scope.READ, Scope.WRITE])[1]
