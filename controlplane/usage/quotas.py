"""How much of its quotas a tenant or key has used, for people and their programs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta

from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.limits import Limited
from controlplane.usage.totals import used


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """Tokens of one UTC day or month (``span``) against its quotas; None: no quota."""

    span: str
    used_tokens: int
    soft_tokens: int | None
    hard_tokens: int | None
    resets_at: datetime

    @property
    def quota(self) -> int | None:
        """The hard quota, else the soft one."""
        return self.soft_tokens if self.hard_tokens is None else self.hard_tokens

    @property
    def ratio(self) -> float | None:
        """Used share of the quota; 1 of a quota of nothing. None without one."""
        if self.quota is None:
            return None
        return self.used_tokens / self.quota if self.quota else 1.0

    @property
    def state(self) -> str:
        """``free``, ``soft`` (requests go to the lowest allowed tier) or ``used_up`` (they are refused)."""
        if self.hard_tokens is not None and self.used_tokens >= self.hard_tokens:
            return "used_up"
        return "soft" if self.soft_tokens is not None and self.used_tokens >= self.soft_tokens else "free"


def quota_use(*, actor: Actor, row: Limited) -> list[QuotaUse]:
    """The present day and month of a tenant or key. Requests that still run are not among what was used."""
    actor.require(Scope.TENANT_READ)
    today = utc_now().date()
    day_tokens, month_tokens = used(str(row.pk), today)
    midnight = datetime.combine(today, time(), UTC)
    return [
        QuotaUse(
            span="day",
            used_tokens=day_tokens,
            soft_tokens=row.soft_tokens_per_day,
            hard_tokens=row.tokens_per_day,
            resets_at=midnight + timedelta(days=1),
        ),
        QuotaUse(
            span="month",
            used_tokens=month_tokens,
            soft_tokens=row.soft_tokens_per_month,
            hard_tokens=row.tokens_per_month,
            resets_at=(midnight.replace(day=1) + timedelta(days=32)).replace(day=1),
        ),
    ]
