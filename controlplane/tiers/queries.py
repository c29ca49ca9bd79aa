"""Reads of tiers."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.models import QuerySet

from controlplane.common.access import visible
from controlplane.common.actor import Actor
from controlplane.tiers.models import Tier
from router_ext.wire.controlplane import TierRecord


def tiers(*, actor: Actor) -> QuerySet[Tier]:
    return visible(Tier.objects.order_by("rank", "name"), actor=actor)


def find_tiers(names: Sequence[str]) -> tuple[list[Tier], list[str]]:
    """Tiers of these names in order of rank, and the names that are unknown. For use cases."""
    found = list(Tier.objects.filter(name__in=[n for n in names if "\0" not in n]).order_by("rank", "name"))
    known = {t.name for t in found}
    return found, [n for n in names if n not in known]


def tier_records() -> list[TierRecord]:
    """The tiers of a snapshot."""
    return [
        TierRecord(
            name=t.name,
            rank=t.rank,
            ttft_target_s=t.ttft_target_s,
            max_queue_wait_s=t.max_queue_wait_s,
            grammar_stall_s=t.grammar_stall_s,
        )
        for t in Tier.objects.order_by("rank", "name")
    ]
