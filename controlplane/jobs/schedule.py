"""When tasks run next, read from the schedule itself (``controlplane.celery``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery import current_app
from celery.schedules import crontab

from controlplane.common.clock import utc_now


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often a task runs. ``text``: for people; ``period``: None where it runs at fixed times."""

    text: str
    period: timedelta | None
    at: crontab | None

    def next_after(self, last: datetime | None, *, now: datetime) -> datetime:
        """When it is called for next; ``last``: when it was by the schedule, if ever.

        A period counts from the call before; beat that has just started calls for all of them within one.
        """
        if self.at is not None:
            # It counts from its own look at the clock; what it means is a whole minute.
            left: timedelta = self.at.remaining_estimate(now)
            return (now + left + timedelta(seconds=30)).replace(second=0, microsecond=0)
        period = self.period or timedelta()
        return max(now, (last or now) + period)


def timings() -> Mapping[str, Timing]:
    """By the name of the task."""
    return {entry["task"]: _timing(entry["schedule"]) for entry in current_app.conf.beat_schedule.values()}


def _timing(schedule: Any) -> Timing:
    if isinstance(schedule, crontab):
        hour, minute = str(schedule._orig_hour), str(schedule._orig_minute)
        text = f"every hour at minute {minute}" if hour == "*" else f"every day at {hour:0>2}:{minute:0>2} UTC"
        return Timing(text=text, period=None, at=schedule)
    period = timedelta(seconds=float(schedule))
    return Timing(text=f"every {_span(int(schedule))}", period=period, at=None)


def _span(seconds: int) -> str:
    for size, word in ((3_600, "hour"), (60, "minute"), (1, "second")):
        if seconds % size == 0:
            number = seconds // size
            return word if number == 1 else f"{number} {word}s"
    return f"{seconds} seconds"


def next_run(task: str, last: datetime | None, *, now: datetime | None = None) -> datetime | None:
    """When the schedule calls for a task next; None if it never does."""
    timing = timings().get(task)
    return None if timing is None else timing.next_after(last, now=now or utc_now())
