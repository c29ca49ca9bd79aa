"""One row of everything, and what an audit entry of each kind of action must tell."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.accounts.actions import issue_token
from controlplane.accounts.invitations import invite
from controlplane.accounts.models import User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.fleet.routers import create_router
from controlplane.training.promotion import promote
from controlplane.usage.assignments import create_assignment
from controlplane.usage.prices import create_price_list
from tests.support.control_plane import (
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
)


@dataclass(frozen=True)
class World:
    """One row of everything, so that every route has something to work on."""

    ids: dict[str, str]


def make_world(system: Actor, operator: User) -> World:
    tenant = make_tenant(system)
    pool = make_pool(system)
    backend = make_backend(system, pool)
    key, _ = make_key(system, tenant, pool)
    free_tier = make_tier(system, "free")
    free_group = make_group(system)
    free_pool = make_pool(system)
    router, _ = create_router(actor=system, name="spare")
    token, _ = issue_token(actor=system, user=operator, name="spare", scopes=["admin.read"])
    serving, better = make_length_model("serving"), make_length_model("better")
    for model in (serving, better):
        make_evaluation(model, pool)
    promote(actor=system, pool_id=pool.id, artifact_id=serving.id, reason="better than none")
    price_list = create_price_list(actor=system, name="spare", currency="EUR")
    create_price_list(actor=system, name="assigned", currency="EUR")
    assignment = create_assignment(actor=system, tenant=make_tenant(system).id, price_list="assigned")
    member = make_user(role="viewer", totp_secret=b"held")
    invitation, text = invite(actor=system, email="invited@example.test", role="viewer")
    hazard = make_hazard(backend=backend.id, tenant=tenant.id, key=key.public_id)
    return World(
        ids={
            "price-lists": price_list.id, "price-assignments": assignment.id, "members": member.id,
            "invitations": invitation.id, "invitation_text": text,
            "tenants": tenant.id, "keys": key.id, "backends": backend.id, "tiers": free_tier.id, "pools": free_pool.id,
            "groups": free_group.id, "pool_name": pool.name, "hazards": hazard.id,
            "routers": router.id, "tokens": token.id, "pool_in_use": pool.id, "artifacts": better.id,
        }
    )  # fmt: skip


NOTHING_BEFORE = ("created", "issued", "queued", "started", "signed_in", "accepted")
"""Ends of actions that make something, or that state nothing but what was done."""


def states_of(entry: AuditEntry) -> tuple[bool, bool]:
    """Whether the entry tells the state before, and the state after."""
    return entry.before is not None, entry.after is not None


def expected_states(action: str) -> tuple[bool, bool]:
    """What ``states_of`` must be for an action."""
    if action == "tenant.deleted":  # its name stays
        return True, True
    if action in (
        "user.signed_out",
        "user.password_changed",
        "user.password_reset",
        "user.second_factor_reset",
        "user.second_factor_enrolled",
    ):
        return False, False
    if action == "request.cancelled":
        return False, True
    done = action.partition(".")[2]
    return done not in NOTHING_BEFORE, done not in ("deleted", "removed")
