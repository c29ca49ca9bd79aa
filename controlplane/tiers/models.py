"""SLO tiers: what buys latency. Weight, which buys share, belongs to the tenant."""

from __future__ import annotations

from django.db import models

from controlplane.common.ids import new_id
from controlplane.common.models import Managed, Record


def _tier_id() -> str:
    return new_id("tier")


class Tier(Managed, Record):
    """A tier; its name is its public reference and never changes, because the books name it.

    ``grammar_stall_s``: seconds a new grammar may stall a backend; None: the routers' 2, 0: no grammars.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_tier_id, editable=False)
    name = models.SlugField(max_length=40, unique=True)
    rank = models.PositiveIntegerField()
    ttft_target_s = models.FloatField(null=True, blank=True)
    max_queue_wait_s = models.FloatField(null=True, blank=True)
    grammar_stall_s = models.FloatField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=models.Q(rank__lte=10_000), name="tier_rank_range"),
            models.CheckConstraint(
                condition=models.Q(ttft_target_s__isnull=True)
                | models.Q(ttft_target_s__gt=0, ttft_target_s__lte=3_600),
                name="tier_ttft_target_range",
            ),
            models.CheckConstraint(
                condition=models.Q(max_queue_wait_s__isnull=True)
                | models.Q(max_queue_wait_s__gt=0, max_queue_wait_s__lte=86_400),
                name="tier_max_queue_wait_range",
            ),
            models.CheckConstraint(
                condition=models.Q(grammar_stall_s__isnull=True)
                | models.Q(grammar_stall_s__gte=0, grammar_stall_s__lte=60),
                name="tier_grammar_stall_range",
            ),
        ]

    def __str__(self) -> str:
        return self.name
