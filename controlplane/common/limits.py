"""What a tenant, or one of its keys, may take: seven optional numbers, which exist once and mean the same on both.

The names are those of ``LimitsRecord``, which routers get. None: no limit; 0: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import models

from controlplane.common.validation import Checks
from router_ext.wire.controlplane import LimitsRecord

MAX_LIMIT = 10**15
LIMITS: tuple[str, ...] = LimitsRecord.__struct_fields__
QUOTAS = tuple(name for name in LIMITS if name.endswith(("_day", "_month")))
SOFT_AND_HARD = (("soft_tokens_per_day", "tokens_per_day"), ("soft_tokens_per_month", "tokens_per_month"))
UNLIMITED = LimitsRecord()


@dataclass(frozen=True, slots=True)
class LimitText:
    """How people are told of a limit. ``short`` follows the number in lists."""

    label: str
    help: str
    short: str


TEXTS = {
    "concurrent": LimitText("Requests at once", "Waiting and running; more are refused with 429.", "at once"),
    "requests_per_minute": LimitText(
        "Requests per minute", "Over all pools and routers; more are refused with 429.", "requests/min"
    ),
    "tokens_per_minute": LimitText(
        "Tokens per minute",
        "Prompt and predicted output, over all pools and routers; more are refused with 429.",
        "tokens/min",
    ),
    "soft_tokens_per_day": LimitText(
        "Soft quota of a day, tokens",
        "From here on requests go to the lowest allowed tier. At most the hard quota.",
        "tokens/day (soft)",
    ),
    "tokens_per_day": LimitText(
        "Hard quota of a day, tokens",
        "Prompt and output tokens; once used up, requests are refused until 00:00 UTC.",
        "tokens/day",
    ),
    "soft_tokens_per_month": LimitText(
        "Soft quota of a month, tokens",
        "From here on requests go to the lowest allowed tier. At most the hard quota.",
        "tokens/month (soft)",
    ),
    "tokens_per_month": LimitText(
        "Hard quota of a month, tokens",
        "Prompt and output tokens; once used up, requests are refused until the first of the next month, 00:00 UTC.",
        "tokens/month",
    ),
}


def _q_range(name: str) -> models.Q:
    return models.Q(**{f"{name}__isnull": True}) | models.Q(**{f"{name}__gte": 0, f"{name}__lte": MAX_LIMIT})


def _q_in_order(soft: str, hard: str) -> models.Q:
    unset = models.Q(**{f"{soft}__isnull": True}) | models.Q(**{f"{hard}__isnull": True})
    return unset | models.Q(**{f"{soft}__lte": models.F(hard)})


def _all(conditions: Iterable[models.Q]) -> models.Q:
    whole = models.Q()
    for condition in conditions:
        whole &= condition
    return whole


class Limited(models.Model):
    """Columns of whatever has limits."""

    concurrent = models.BigIntegerField(null=True, blank=True)
    requests_per_minute = models.BigIntegerField(null=True, blank=True)
    tokens_per_minute = models.BigIntegerField(null=True, blank=True)
    soft_tokens_per_day = models.BigIntegerField(null=True, blank=True)
    tokens_per_day = models.BigIntegerField(null=True, blank=True)
    soft_tokens_per_month = models.BigIntegerField(null=True, blank=True)
    tokens_per_month = models.BigIntegerField(null=True, blank=True)

    class Meta:
        abstract = True
        constraints = (
            models.CheckConstraint(condition=_all(map(_q_range, LIMITS)), name="%(class)s_limits_range"),
            models.CheckConstraint(
                condition=_all(_q_in_order(*pair) for pair in SOFT_AND_HARD), name="%(class)s_soft_below_hard"
            ),
        )

    @property
    def limits_text(self) -> str:
        """The limits that are set, in one line; "" without any."""
        stated = ((getattr(self, name), TEXTS[name].short) for name in LIMITS)
        return ", ".join(f"{value:,} {short}" for value, short in stated if value is not None)


def limit_fields(row: Limited) -> dict[str, int]:
    """The limits that are set, by name; for the audit log."""
    return {name: value for name in LIMITS if (value := getattr(row, name)) is not None}


def limits_record(values: Sequence[int | None]) -> LimitsRecord:
    """The record of a snapshot from plain columns in the order of ``LIMITS``."""
    if values.count(None) == len(values):  # nearly all of them; this is the quickest way to see it
        return UNLIMITED
    stated: dict[str, Any] = {name: v for name, v in zip(LIMITS, values, strict=True) if v is not None}
    return LimitsRecord(**stated)


def set_limits(checks: Checks, row: Limited, changes: Mapping[str, int | None]) -> None:
    """Set some limits of a row, None for no limit; what is wrong goes into ``checks`` as ``limits.<name>``."""
    for name, value in changes.items():
        if name not in LIMITS:
            checks.add(f"limits.{name}", f"is none of {', '.join(LIMITS)}")
            continue
        checks.number(f"limits.{name}", value, 0, MAX_LIMIT)
        setattr(row, name, value)
    for soft, hard in SOFT_AND_HARD:
        low, high = getattr(row, soft), getattr(row, hard)
        if low is not None and high is not None and low > high:
            checks.add(f"limits.{soft}", f"must be from 0 to the hard quota of {high:,}, not {low:,}")
