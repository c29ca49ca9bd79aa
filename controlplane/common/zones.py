"""Time zones: where days, hours and months of a place begin, as instants.

Every offset in use since 2000 is a multiple of 15 minutes, so that quarters of an hour in UTC are never cut by a day or
an hour of any zone. Days on which clocks change have 23 or 25 hours; one that was skipped has none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo, available_timezones

from controlplane.common.validation import Checks

QUARTER = timedelta(minutes=15)
HOUR = timedelta(hours=1)


@functools.cache
def zone_names() -> frozenset[str]:
    """All names of the IANA database."""
    return frozenset(available_timezones()) - {"localtime", "posixrules", "Factory"}


def find_zone(name: str) -> ZoneInfo | None:
    """The zone of this name, None for none."""
    return ZoneInfo(name) if name in zone_names() else None


def check_zone(checks: Checks, field: str, name: str) -> None:
    if name not in zone_names():
        checks.add(field, f"{name[:60]!r} is no time zone of the IANA database, such as Europe/Berlin")


def day_start(day: date, zone: ZoneInfo) -> datetime:
    """The instant (UTC) at which a day begins: of two midnights the first, of a skipped one the end of the gap."""
    return datetime.combine(day, time(), zone).astimezone(UTC)


def month_start(month: date, zone: ZoneInfo) -> datetime:
    """The instant at which the month of this day begins."""
    return day_start(month.replace(day=1), zone)


def next_month(month: date) -> date:
    """The first day of the month after."""
    return (month.replace(day=1) + timedelta(days=32)).replace(day=1)


def days(first: date, last: date) -> Iterator[date]:
    """Both included."""
    for n in range((last - first).days + 1):
        yield first + timedelta(days=n)


def hour_starts(day: date, zone: ZoneInfo) -> list[datetime]:
    """The instants at which the hours of a day's clock begin: an hour that comes twice is two."""
    at, end = day_start(day, zone), day_start(day + timedelta(days=1), zone)
    starts: list[datetime] = []
    before = None
    while at < end:
        local = at.astimezone(zone)
        hour = (local.date(), local.hour, local.utcoffset())
        if hour != before:
            starts.append(at)
            before = hour
        at += QUARTER
    return starts


def is_whole_hour(zone: ZoneInfo, first: datetime, last: datetime) -> bool:
    """Whether clocks of the zone show the minutes of UTC, on every day between."""
    at = first
    while at <= last:
        offset = at.astimezone(zone).utcoffset()
        if offset is None or offset % HOUR:
            return False
        at += timedelta(days=1)
    return True
