"""Use cases of tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from django.db.models import ProtectedError
from typing_extensions import Unpack

from controlplane.audit.actions import delete_change, record, save_change
from controlplane.common.actor import Actor
from controlplane.common.errors import Conflict
from controlplane.common.use_case import mark_config_changed, use_case
from controlplane.common.validation import Checks, lock_version
from controlplane.tiers.models import Tier


class TierChanges(TypedDict, total=False):
    rank: int
    ttft_target_s: float | None
    max_queue_wait_s: float | None
    grammar_stall_s: float | None
    managed_by: str


_releasers: list[Callable[[Tier], None]] = []


def on_tier_deleted(releaser: Callable[[Tier], None]) -> None:
    """Register what lets go of a tier that is about to be deleted, inside that transaction."""
    if releaser not in _releasers:
        _releasers.append(releaser)


def tier_fields(tier: Tier) -> dict[str, Any]:
    return {
        "name": tier.name,
        "rank": tier.rank,
        "ttft_target_s": tier.ttft_target_s,
        "max_queue_wait_s": tier.max_queue_wait_s,
        "grammar_stall_s": tier.grammar_stall_s,
        "managed_by": tier.managed_by,
    }


def _check(tier: Tier) -> None:
    checks = Checks()
    checks.slug("name", tier.name)
    if len(tier.name) > 40:
        checks.add("name", "has more than 40 characters")
    checks.number("rank", tier.rank, 0, 10_000)
    checks.number("ttft_target_s", tier.ttft_target_s, 0, 3_600, is_low_open=True)
    checks.number("max_queue_wait_s", tier.max_queue_wait_s, 0, 86_400, is_low_open=True)
    checks.number("grammar_stall_s", tier.grammar_stall_s, 0, 60)
    checks.manager(tier.managed_by)
    checks.done()


@use_case()
def create_tier(
    *,
    actor: Actor,
    name: str,
    rank: int,
    ttft_target_s: float | None = None,
    max_queue_wait_s: float | None = None,
    grammar_stall_s: float | None = None,
    managed_by: str = "",
) -> Tier:
    """A tier; tenants get it by name. Its name stays for good, since the books name it."""
    tier = Tier(
        name=name,
        rank=rank,
        ttft_target_s=ttft_target_s,
        max_queue_wait_s=max_queue_wait_s,
        grammar_stall_s=grammar_stall_s,
        managed_by=managed_by,
    )
    _check(tier)
    if Tier.objects.filter(name=name).exists():
        raise Conflict(f"a tier {name!r} exists")
    tier.save(force_insert=True)
    record(actor=actor, action="tier.created", object_type="tier", object_id=tier.id, after=tier_fields(tier))
    mark_config_changed(f"tier {name} created")
    return tier


@use_case()
def update_tier(
    *, actor: Actor, tier_id: str, expected_version: int | None = None, **changes: Unpack[TierChanges]
) -> Tier:
    tier = lock_version(Tier.objects.all(), "tier", tier_id, expected_version)
    before = tier_fields(tier)
    for field, value in changes.items():
        setattr(tier, field, value)
    _check(tier)
    save_change(
        tier,
        actor=actor,
        action="tier.updated",
        before=before,
        after=tier_fields(tier),
        publish=f"tier {tier.name} updated",
    )
    return tier


@use_case()
def delete_tier(*, actor: Actor, tier_id: str, expected_version: int | None = None) -> None:
    """Delete a tier that no tenant and no live key refers to."""
    tier = lock_version(Tier.objects.all(), "tier", tier_id, expected_version)
    before = tier_fields(tier)
    publish = f"tier {tier.name} deleted"
    for release in _releasers:
        release(tier)
    try:
        delete_change(tier, actor=actor, action="tier.deleted", before=before, publish=publish)
    except ProtectedError as error:
        raise Conflict(f"tier {tier.name!r} is in use by {len(error.protected_objects)} tenants or keys") from error
