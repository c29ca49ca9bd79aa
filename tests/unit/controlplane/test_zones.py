"""Where days, hours and months of a place begin."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from controlplane.common.zones import QUARTER, day_start, find_zone, hour_starts, is_whole_hour, next_month, zone_names


@pytest.mark.parametrize(
    ("name", "day", "n_hours"),
    [
        ("UTC", date(2026, 3, 29), 24),
        ("Asia/Kolkata", date(2026, 3, 29), 24),
        ("Europe/Berlin", date(2026, 3, 29), 23),
        ("Europe/Berlin", date(2026, 10, 25), 25),
        ("America/Los_Angeles", date(2026, 11, 1), 25),
        ("America/Sao_Paulo", date(2018, 11, 4), 23),  # midnight itself is skipped
        ("America/Havana", date(2026, 11, 1), 25),  # midnight comes twice
        ("Australia/Lord_Howe", date(2026, 10, 4), 24),  # 23.5 hours: one of them is half
        ("Pacific/Apia", date(2011, 12, 30), 0),  # the day that was left out
    ],
)
def test_the_hours_of_a_day(name: str, day: date, n_hours: int) -> None:
    zone = ZoneInfo(name)
    starts = hour_starts(day, zone)
    assert len(starts) == n_hours
    if n_hours:
        assert starts[0] == day_start(day, zone)
        assert all(at.astimezone(zone).date() == day for at in starts)
        assert day_start(day, zone) - timedelta(microseconds=1) < starts[0] <= starts[-1]


def test_days_follow_each_other_without_a_gap_in_every_zone() -> None:
    """A quarter of an hour belongs to one day, and to the one its clock says."""
    first = date(2026, 1, 1)
    for name in sorted(zone_names()):
        zone = ZoneInfo(name)
        for n in (66, 87, 297, 304):  # around changes of clocks
            day = first + timedelta(days=n)
            start, end = day_start(day, zone), day_start(day + timedelta(days=1), zone)
            assert start.minute % 15 == 0, name
            assert start.astimezone(zone).date() == day, name
            assert (end - QUARTER).astimezone(zone).date() == day, name


def test_whole_hours() -> None:
    now = datetime(2026, 11, 30, tzinfo=UTC)
    year = now - timedelta(days=365)
    assert is_whole_hour(ZoneInfo("America/Los_Angeles"), year, now)
    assert not is_whole_hour(ZoneInfo("Asia/Kolkata"), year, now)
    assert not is_whole_hour(ZoneInfo("Asia/Kathmandu"), year, now)
    # Half a year of +11:00 and half of +10:30.
    assert not is_whole_hour(ZoneInfo("Australia/Lord_Howe"), year, now)


def test_only_names_of_the_database_are_zones() -> None:
    for name in ("", "Mars/Base", "../../etc/passwd", "/etc/localtime", "localtime", "europe/berlin"):
        assert find_zone(name) is None
    assert find_zone("Europe/Berlin") == ZoneInfo("Europe/Berlin")


def test_months() -> None:
    assert next_month(date(2026, 12, 31)) == date(2027, 1, 1)
    assert next_month(date(2026, 1, 31)) == date(2026, 2, 1)
