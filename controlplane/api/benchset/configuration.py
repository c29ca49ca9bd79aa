"""A large configuration in an empty database: tiers, pools, groups, tenants, keys, people, price lists, routers.

What there is little of is made by its use cases; tenants, keys and people are written as rows, because ten thousand
use cases would publish ten thousand revisions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from hashlib import sha256

from django.db import transaction

from controlplane.accounts.actions import issue_token
from controlplane.accounts.models import Invitation, OperatorToken, Role, User
from controlplane.accounts.queries import first_operator
from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict
from controlplane.fleet.actions import create_backend, create_pool
from controlplane.fleet.models import Pool
from controlplane.fleet.routers import create_router
from controlplane.keys.models import ApiKey
from controlplane.rollout.actions import publish
from controlplane.tenants.models import Group, Tenant, TenantState, TenantTier
from controlplane.tiers.actions import create_tier
from controlplane.tiers.models import Tier
from controlplane.usage.assignments import ALWAYS
from controlplane.usage.models import PriceAssignment, PriceList, WeightChange
from controlplane.usage.prices import create_price_list

TIERS: tuple[tuple[str, int, float | None], ...] = (
    ("interactive", 0, 2.0),
    ("standard", 10, 10.0),
    ("batch", 20, None),
)
POOLS = ("meta-llama/Llama-3.1-8B-Instruct", "mistralai/Mistral-Small-24B", "Qwen/Qwen2.5-72B-Instruct")
"""Nearly half of the traffic goes to the first; each has two servers."""
BACKENDS_PER_POOL = 2
ROUTERS = 2
_ZONES = ("UTC", "Europe/Berlin", "Asia/Kolkata", "America/Los_Angeles", "America/New_York")
_FIRST = ("Acme", "Borealis", "Cobalt", "Delta", "Everest", "Fjord", "Granite", "Harbour", "Indigo", "Juniper")
_SECOND = ("Robotics", "Health", "Media", "Bank", "Logistics", "Studio", "Research", "Retail", "Energy", "Games")
_BATCH = 2_000


@dataclass(frozen=True, slots=True)
class Configured:
    """What events and measurements need of the configuration.

    Attributes:
        tenants: ids, the busiest first. keys: of each tenant its ids. pools: ids by name, in the order of ``POOLS``.
        tiers: the tiers each tenant may use, its default first. backends: ids by pool. router_tokens: secrets.
        operator_token: an API token of the owner for ``admin.read`` and ``admin.write``.
    """

    tenants: Sequence[str]
    keys: Sequence[Sequence[str]]
    tiers: Sequence[Sequence[str]]
    pools: dict[str, str]
    backends: Mapping[str, Sequence[str]]
    router_tokens: Sequence[str]
    operator_token: str


def fill_configuration(*, actor: Actor, tenants: int, keys: int, chance: random.Random) -> Configured:
    """Make ``tenants`` tenants with ``keys`` keys between them, and publish one revision of them all.

    Raises:
        Conflict: there are tenants already, or no owner yet.
    """
    owner = first_operator()
    if owner is None or Tenant.objects.exists():
        raise Conflict("the data set needs a database with an owner (bootstrap_operator) and no tenants")
    tiers = [create_tier(actor=actor, name=name, rank=rank, ttft_target_s=target) for name, rank, target in TIERS]
    pools = [create_pool(actor=actor, name=name) for name in POOLS]
    backends = {pool.name: _backends(actor, number, pool) for number, pool in enumerate(pools)}
    with transaction.atomic():
        rows = _tenants(tenants, tiers, chance)
        held = _keys(keys, rows, pools, chance)
        _people(rows, owner, chance)
        publish(actor, f"{tenants:,} tenants with {keys:,} keys")
    _prices(actor, rows, chance)
    routers = [create_router(actor=actor, name=f"router-{number}")[1] for number in range(1, ROUTERS + 1)]
    token = issue_token(actor=actor, user=owner, name="measurements", scopes=[Scope.READ, Scope.WRITE])[1]
    return Configured(
        tenants=[row.id for row, _ in rows],
        keys=held,
        tiers=[[tier.name for tier in allowed] for _, allowed in rows],
        pools={pool.name: pool.id for pool in pools},
        backends=backends,
        router_tokens=routers,
        operator_token=token,
    )


def _backends(actor: Actor, number: int, pool: Pool) -> list[str]:
    # Nobody listens on the discard port: routers find their servers away, which changes nothing of the configuration.
    return [
        create_backend(
            actor=actor, pool=pool.id, name=f"gpu-{each}", kv_tokens=400_000,
            url=f"http://127.0.{number + 1}.{each}:9",
        ).id
        for each in range(1, BACKENDS_PER_POOL + 1)
    ]  # fmt: skip


def _tenants(count: int, tiers: Sequence[Tier], chance: random.Random) -> list[tuple[Tenant, list[Tier]]]:
    groups = Group.objects.bulk_create(
        Group(name=f"group-{number:03d}", weight=float(1 + number % 8)) for number in range(max(1, count // 50))
    )
    rows: list[tuple[Tenant, list[Tier]]] = []
    for number in range(count):
        allowed = [*tiers][: 1 + number % len(tiers)]
        chance.shuffle(allowed)
        tenant = Tenant(
            slug=f"tenant-{number:05d}",
            name=f"{chance.choice(_FIRST)} {chance.choice(_SECOND)} {number:05d}",
            weight=float(chance.choice((0.5, 1, 1, 1, 2, 4, 8))),
            state=TenantState.SUSPENDED if number % 100 == 99 else TenantState.ACTIVE,
            default_tier=allowed[0],
            timezone=_ZONES[number % len(_ZONES)],
            group=groups[number % len(groups)] if number % 2 else None,
            requests_per_minute=6_000 if number % 10 == 0 else None,
            tokens_per_day=50_000_000 if number % 10 == 0 else None,
            managed_by="fairlane-apply" if number % 4 == 0 else "",
        )
        rows.append((tenant, allowed))
    Tenant.objects.bulk_create([tenant for tenant, _ in rows], batch_size=_BATCH)
    # As if they had been made before their first request.
    WeightChange.objects.update(at=utc_now() - timedelta(days=120))
    TenantTier.objects.bulk_create(
        [TenantTier(tenant=tenant, tier=tier) for tenant, allowed in rows for tier in allowed], batch_size=_BATCH
    )
    return rows


def _keys(
    count: int, tenants: Sequence[tuple[Tenant, list[Tier]]], pools: Sequence[Pool], chance: random.Random
) -> list[list[str]]:
    """Keys of nobody: their digests are those of no text. Each tenant has as many as the others."""
    held: list[list[str]] = [[] for _ in tenants]
    now = utc_now()

    def made() -> Iterator[ApiKey]:
        for number in range(count):
            place = number % len(tenants)
            key = ApiKey(
                tenant=tenants[place][0],
                name=f"{chance.choice(('production', 'staging', 'batch', 'notebook', 'ci'))}-{number // len(tenants)}",
                public_id=f"{number:012d}",
                digest=sha256(f"key {number}".encode()).hexdigest(),
                default_pool=pools[place % len(pools)],
                may_choose_tier=number % 3 == 0,
                revoked_at=now if number % 50 == 49 else None,
                tokens_per_day=5_000_000 if number % 20 == 0 else None,
            )
            held[place].append(key.id)
            yield key

    ApiKey.objects.bulk_create(made(), batch_size=_BATCH)
    return held


def _people(tenants: Sequence[tuple[Tenant, list[Tier]]], owner: User, chance: random.Random) -> None:
    """Members of the platform and of every tenth tenant, each with a token, and invitations nobody has taken up."""
    now = utc_now()
    people = [
        User(email=f"operator{number}@fairlane.example", name=f"Operator {number}", role=role, password="!")
        for number, role in enumerate((Role.OPERATOR, Role.VIEWER) * 10)
    ]
    for number, (tenant, _) in enumerate(tenants[::10]):
        role = Role.TENANT_ADMIN if number % 2 else Role.TENANT_MEMBER
        people.append(
            User(
                email=f"member{number}@{tenant.slug}.example",
                name=f"Member {number}",
                role=role,
                tenant=tenant,
                password="!",
            )
        )
    User.objects.bulk_create(people, batch_size=_BATCH)
    holders = [owner, *people]
    OperatorToken.objects.bulk_create(
        [
            OperatorToken(
                user=user,
                name=chance.choice(("grafana", "terraform", "billing", "script")),
                public_id=f"t{number:011d}",
                digest=sha256(f"token {number}".encode()).hexdigest(),
                scopes=[Scope.TENANT_READ if user.tenant_id else Scope.READ],
                revoked_at=now if number % 5 == 4 else None,
            )
            for number, user in enumerate(holders)
        ],
        batch_size=_BATCH,
    )
    Invitation.objects.bulk_create(
        Invitation(
            email=f"guest{number}@{tenant.slug}.example",
            role=Role.TENANT_MEMBER,
            tenant=tenant,
            invited_by=owner.email,
            digest=sha256(f"invitation {number}".encode()).hexdigest(),
            expires_at=now + timedelta(days=7),
        )
        for number, (tenant, _) in enumerate(tenants[:200])
    )


def _prices(actor: Actor, tenants: Sequence[tuple[Tenant, list[Tier]]], chance: random.Random) -> None:
    """Three lists; nine of ten tenants pay by one. The price of one model changed in the middle of the month."""
    today = utc_now().date()
    lists: list[PriceList] = []
    for name, currency, zone in (
        ("list-eu", "EUR", "Europe/Berlin"),
        ("list-us", "USD", "UTC"),
        ("list-in", "INR", "Asia/Kolkata"),
    ):
        prices = [
            _price("", today - timedelta(days=200), 200_000, 600_000),
            *(_price(model, today - timedelta(days=200), 100_000 * n, 400_000 * n) for n, model in enumerate(POOLS, 1)),
            _price(POOLS[0], today - timedelta(days=15), 90_000, 350_000),
        ]
        lists.append(create_price_list(actor=actor, name=name, currency=currency, timezone=zone, prices=prices))
    always = datetime.combine(ALWAYS, time.min, UTC)
    PriceAssignment.objects.bulk_create(
        [
            PriceAssignment(tenant=tenant, price_list=chance.choice(lists), valid_from=ALWAYS, from_at=always)
            for tenant, _ in tenants
            if chance.random() < 0.9
        ],
        batch_size=_BATCH,
    )


def _price(model: str, valid_from: date, prompt: int, output: int) -> dict[str, object]:
    return {"model": model, "valid_from": valid_from, "prompt_micro": prompt, "output_micro": output}
