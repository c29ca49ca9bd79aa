"""One of everything that the console shows, for tests that go through all of its addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import msgspec
from django.conf import settings
from django.test import Client

from controlplane.accounts.actions import issue_token, revoke_token
from controlplane.accounts.invitations import invite
from controlplane.accounts.models import Role, User
from controlplane.common.actor import Actor
from controlplane.common.clock import to_us, utc_now
from controlplane.fleet.brakes import cancel_request
from controlplane.fleet.hazards import resolve_hazard
from controlplane.fleet.models import Backend, Pool
from controlplane.fleet.routers import create_router
from controlplane.keys.actions import revoke_key
from controlplane.keys.models import ApiKey
from controlplane.tenants.models import Tenant
from controlplane.training.actions import start_job
from controlplane.training.models import Promotion
from controlplane.training.promotion import promote
from controlplane.usage.assignments import create_assignment
from controlplane.usage.models import QuarantinedEvent, Statement, StatementLine
from controlplane.usage.prices import create_price_list
from controlplane.usage.reconciliation import reconcile
from router_ext.wire.controlplane import (
    SLOT_S,
    BackendState,
    BoundTerms,
    GroupState,
    LiveRequest,
    MomentRecord,
    PoolState,
    ReasonRecord,
    SlotState,
    TenantState,
    TierState,
    UsageEvent,
)
from router_ext.wire.log_histogram import bucket
from tests.support.control_plane import (
    book,
    make_backend,
    make_evaluation,
    make_group,
    make_hazard,
    make_key,
    make_length_model,
    make_pool,
    make_tenant,
    make_tier,
    make_user,
    predicted_event,
    roll_up,
    tell,
    usage_event,
)

COLUMNS = ("owner", "operator", "viewer", "tenant_admin", "tenant_member", "stranger", "nobody")
"""Who asks: the five roles, admin and member of the tenant whose objects addresses name; the admin of another tenant;
nobody, who is not signed in."""

PAST_DAYS = (0, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class World:
    """``people`` by column, without nobody; ``ids``: what stands for each parameter of an address."""

    people: dict[str, User]
    ids: dict[str, str]
    pool: Pool
    backend: Backend
    tenant: Tenant
    key: ApiKey
    event: UsageEvent

    def sessions(self) -> dict[str, str]:
        """A session of each column."""
        found = {"nobody": ""}
        for name, user in self.people.items():
            signed_in = Client()
            signed_in.force_login(user)
            found[name] = signed_in.cookies[settings.SESSION_COOKIE_NAME].value
        return found


def make_world(actor: Actor, *, named: Callable[[str], str] = str) -> World:
    """One object of each kind and what is said of it; ``named``: what a free text says, by what it is the name of."""
    other = make_tenant(actor, name=named("Other team"))
    group = make_group(actor)
    slow = make_tier(actor, "spare")
    tenant = make_tenant(
        actor, name=named("Search team"), group=group.name, tiers=["standard", slow.name], weight=2.5,
        limits={"concurrent": 64, "tokens_per_day": 5_000, "soft_tokens_per_day": 100},
    )  # fmt: skip
    pool = make_pool(actor, name=named("model-7b"), aliases=[named("alias")])
    backend = make_backend(actor, pool)
    key, _ = make_key(actor, tenant, pool, name=named("web chat"), limits={"tokens_per_day": 1_000})
    people = {
        role.value: make_user(
            role=role, tenant=tenant.id if role.value.startswith("tenant_") else None, name=named(role.label)
        )
        for role in Role
    }
    people["stranger"] = make_user(role=Role.TENANT_ADMIN, tenant=other.id)
    colleague = make_user(role=Role.TENANT_MEMBER, tenant=tenant.id, name=named("Colleague"))
    token, _ = issue_token(actor=actor, user=people["tenant_admin"], name=named("export"), scopes=["tenant.read"])
    invitation, text = invite(actor=actor, email="new@example.test", role=Role.TENANT_MEMBER, tenant=tenant.id)
    price_list = create_price_list(
        actor=actor, name="spare", currency="EUR",
        prices=[{"model": "", "valid_from": date(2026, 1, 1), "prompt_micro": 150_000, "output_micro": 600_000}],
    )  # fmt: skip
    assignment = create_assignment(actor=actor, tenant=tenant.id, price_list=price_list.id)
    router, _ = create_router(actor=actor, name=named("edge"))
    model = make_length_model("better")
    make_evaluation(model, pool)
    promote(actor=actor, pool_id=pool.id, artifact_id=model.id, reason=named("better than none"))
    event = usage_event(tenant=tenant.id, key=key.id, pool=pool.id, model=pool.name)
    book(event)
    ids = {
        "tenant_id": tenant.id, "key_id": key.id, "group_id": group.id, "pool_id": pool.id, "tier_id": slow.id,
        "backend_id": backend.id, "token_id": token.id, "price_list_id": price_list.id, "member_id": colleague.id,
        "hazard_id": make_hazard(backend=backend.id, tenant=tenant.id, key=key.public_id).id,
        "job_id": start_job(actor=actor).id, "invitation_id": invitation.id, "text": text, "router_id": router.id,
        "request_id": event.request, "statement_id": _statement(tenant, pool).id, "provider_id": "sso",
        "assignment_id": assignment.id, "digest": "0" * 64, "artifact_id": model.id,
        "promotion_id": str(Promotion.objects.get().pk),
    }  # fmt: skip
    return World(people, ids, pool, backend, tenant, key, event)


def _statement(tenant: Tenant, pool: Pool) -> Statement:
    row = Statement.objects.create(
        tenant=tenant.id, tenant_name=tenant.name, month="2026-01-01", timezone="UTC", from_at="2026-01-01T00:00Z",
        to_at="2026-02-01T00:00Z", amount_micro=750_000, currency="EUR", closed_at="2026-02-01T01:00Z",
    )  # fmt: skip
    StatementLine.objects.create(
        statement=row, number=1, kind="usage", month="2026-01-01", model=pool.name, valid_from="2026-01-01",
        requests=12, prompt_tokens=1_000_000, output_tokens=1_000_000, amount_micro=750_000,
    )  # fmt: skip
    return row


def enliven(world: World, actor: Actor, *, named: Callable[[str], str] = str) -> None:
    """What makes pages full: traffic of some days, a router at work, and objects in every state."""
    revoked, _ = make_key(actor, world.tenant, world.pool, name=named("old key"))
    revoke_key(actor=actor, key_id=revoked.id)
    make_key(actor, world.tenant, world.pool, name=named("brief key"), expires_at=utc_now() + timedelta(minutes=1))
    gone, _ = issue_token(actor=actor, user=world.people["operator"], name=named("old token"), scopes=["admin.read"])
    revoke_token(actor=actor, token_id=gone.id)
    seen = make_hazard(backend=world.backend.id, tenant=world.tenant.id, key=world.key.public_id, kind="freeze")
    resolve_hazard(actor=actor, hazard_id=seen.id, note=named("told the team"))
    cancel_request(actor=actor, request_id="req_stuck", reason=named("ran for an hour"))
    QuarantinedEvent.objects.create(
        digest="1" * 64, router="rtr_1", event="evt_odd", tenant=world.tenant.id, reason=named("unreadable"), body=b"x",
        received_at=utc_now(),
    )  # fmt: skip
    book(*_traffic(world))
    report_state(world)
    roll_up()
    reconcile()


def _traffic(world: World) -> list[UsageEvent]:
    now, other = to_us(utc_now()) - 120_000_000, str(world.people["stranger"].tenant_id)
    events = [
        predicted_event(
            tenant=(world.tenant.id, other)[index % 2], key=world.key.id, pool=world.pool.id, model=world.pool.name,
            arrived_at_us=now - day * 86_400_000_000 - index * 1_000_000, request=f"req_{day}_{index}",
            prompt_tokens=90 + index, output_tokens=40 + 7 * index, outcome=("completed", "cancelled")[index % 5 == 4],
        )
        for day in PAST_DAYS
        for index in range(12)
    ]  # fmt: skip
    return [*events, _explained(world, now)]


def _explained(world: World, arrived: int) -> UsageEvent:
    """A request that waited, was stopped for others and ended elsewhere."""
    where = world.backend.id
    reasons = [ReasonRecord(cause="wait", text="waited 2.000 s in 2 turns", seconds=2.0, counts={"turns": 2})]
    timeline = [
        MomentRecord(at_s=0.0, step="queued", text="began to wait"),
        MomentRecord(at_s=1.5, step="dispatched", text="in turn", backend=where, tokens=100),
        MomentRecord(at_s=1.75, step="first_token", text="first token", backend=where, tokens=1),
        MomentRecord(at_s=2.5, step="preempted", text="stopped for others", backend=where, tokens=30),
        MomentRecord(at_s=3.0, step="dispatched", text="in turn", backend=where, tokens=70),
        MomentRecord(at_s=4.0, step="finished", text="complete", tokens=100),
    ]
    plain = usage_event(
        tenant=world.tenant.id, key=world.key.id, pool=world.pool.id, model=world.pool.name, arrived_at_us=arrived,
        request="req_slow", preemptions=1, segments=2, predicted_tokens=80,
    )  # fmt: skip
    return msgspec.structs.replace(
        plain, explanation=[each.text for each in reasons], reasons=reasons, timeline=timeline
    )


def report_state(world: World, *, router: str = "rtr_host") -> None:
    """A heartbeat of a busy router; it is forgotten after 15 seconds."""
    other = str(world.people["stranger"].tenant_id)
    waiting: dict[str, Any] = {"tenant": world.tenant.id, "key": world.key.id, "tier": "standard"}
    now = to_us(utc_now())
    group = world.tenant.group.name if world.tenant.group else None
    state = PoolState(
        pool=world.pool.id, policy="slo-fair", queued_by_tier={"standard": 3, "spare": 1}, running=2,
        backends=[
            BackendState(
                backend=world.backend.id, state="up", running=2, reserved_tokens=3_000, kv_tokens=4_096,
                detail="as it should",
            )
        ],
        tenants=[
            TenantState(
                tenant=world.tenant.id, group=group, queued=3, running=1, counter=10.0, output_tokens_total=4_000,
                prompt_tokens_total=9_000,
            ),
            TenantState(tenant=other, queued=1, running=1, output_tokens_total=1_500, prompt_tokens_total=2_500),
        ],
        groups=[GroupState(group=group or "none", queued=3, running=1, counter=10.0)],
        bound_service=40_000.0, largest_gap_service=9_000.0, service_per_gpu_s=2_000.0,
        bound_terms=BoundTerms(peak_service=8_192.0, pool_tokens=4_096, longest_prompt=2_048),
        predictions_total={"model": 40, "pool": 2}, prediction_fallbacks_total={"late": 1},
        preempted_total={"slo": 2}, recomputed_tokens_total=130,
        oldest=[
            LiveRequest(request="req_waits", event="evt_waits", arrived_at_us=now - 9_000_000, **waiting),
            LiveRequest(
                request="req_runs", event="evt_runs", arrived_at_us=now - 5_000_000, backend=world.backend.id,
                output_tokens=120, **waiting,
            ),
        ],
        slots=_slots(now // 1_000_000 // SLOT_S),
    )  # fmt: skip
    tell(pools=[state], router=router)


def _slots(newest: int) -> list[SlotState]:
    """Ten minutes, two of which nobody ever tells of: the first told of a slot is kept."""
    slots = []
    for slot in range(newest - 60, newest):
        if slot // 12 % 5 == 0:
            continue
        tiers = [
            TierState(tier=tier, ttft_target_s=target_s, buckets=[bucket(us)], counts=[3 + slot % 5])
            for tier, target_s, us in (
                ("standard", 1.5, 400_000 + slot % 7 * 90_000),
                ("spare", None, 2_300_000 - slot % 11 * 130_000),
            )
        ]
        slots.append(SlotState(slot=slot, output_tokens=4_000 + slot % 9 * 200, tiers=tiers))
    return slots
