"""Accuracy of predictions: the figures of SQL against an oracle in plain Python; rollups, late events, merges."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from statistics import fmean, median, median_low
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.common.actor import Actor
from controlplane.common.clock import from_us, to_us, utc_now
from controlplane.common.errors import Invalid
from controlplane.usage.accuracy import WIDTHS, Accuracy, Figures, accuracy, judged_tenants
from controlplane.usage.ingest import decode_batch, ingest
from controlplane.usage.models import AccuracyHour, AccuracyMinute, PoolMedian, TouchedHour, TouchedMinute
from controlplane.usage.rollup import roll_up_finished, roll_up_hour, roll_up_running
from router_ext.wire.controlplane import PredictionRecord, UsageEvent
from tests.support.control_plane import usage_body, usage_event

pytestmark = pytest.mark.django_db

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
HOUR = timedelta(hours=1)
BASE = utc_now().replace(minute=0, second=0, microsecond=0) - timedelta(days=2)

RUNNING = BASE + timedelta(minutes=59)
"""An instant at which neither of the two hours from ``BASE`` is rolled up as a whole."""


def told(actual: int, *, at: datetime, quantiles: Sequence[int] | None, **fields: Any) -> UsageEvent:
    """An answer of ``actual`` tokens that took a second, and what was predicted of it."""
    record = {"quantiles": None if quantiles is None else list(quantiles), "source": "model", "length_model": "d1"}
    record |= {name: fields.pop(name) for name in PredictionRecord.__struct_fields__ if name in fields}
    arrived = to_us(at)
    return usage_event(
        arrived_at_us=arrived,
        ended_at_us=arrived + 1_000_000,
        output_tokens=actual,
        prediction=PredictionRecord(**record),
        **fields,
    )


def book(*events: UsageEvent) -> None:
    ingest(decode_batch(usage_body(*events)))


def traffic(seed: int, n: int = 150) -> list[UsageEvent]:
    """Two pools, three tenants, two hours; exact hits, misses, cuts, unknowns."""
    draw = random.Random(seed)
    events = []
    for _ in range(n):
        scale = draw.choice((1, 3, 200))
        values = sorted(draw.randrange(1, 3 * scale + 1) for _ in LEVELS)
        events.append(
            told(
                draw.randrange(1, 2 * scale + 1),
                at=BASE + timedelta(seconds=draw.randrange(7_200)),
                quantiles=values if draw.random() < 0.9 else None,
                fallback=sorted(draw.randrange(1, 300) for _ in LEVELS) if draw.random() < 0.7 else None,
                source=draw.choice(("model", "memory", "pool")),
                fallback_reason=draw.choice((None, None, "late")),
                length_model=draw.choice(("d1", "d2", None)),
                pool=draw.choice(("p", "q")),
                tenant=draw.choice("xyz"),
                finish_reason=draw.choice(("eos_token", "eos_token", "length")),
            )
        )
    return events


# --- the oracle: the docstring of usage.accuracy once more, row by row ---


def transform(quantiles: Sequence[float], actual: int) -> list[float]:
    """The share of an answer in each of the 8 bins."""
    lowest, highest = sum(q < actual for q in quantiles), sum(q <= actual for q in quantiles)
    whole = sum(WIDTHS[lowest : highest + 1])
    return [width / whole if lowest <= i <= highest else 0.0 for i, width in enumerate(WIDTHS)]


def loss(quantiles: Sequence[float], actual: int) -> float:
    gaps = [(level, math.log1p(actual) - math.log1p(q)) for level, q in zip(LEVELS, quantiles, strict=True)]
    return fmean(level * gap if gap >= 0 else (level - 1) * gap for level, gap in gaps)


def predictions_of(event: UsageEvent, events: Sequence[UsageEvent]) -> dict[str, list[float]]:
    record = event.prediction
    assert record is not None
    whole = [e for e in events if e.pool == event.pool and e.finish_reason == "eos_token"]
    mine = [e for e in whole if e.tenant == event.tenant and e.ended_at_us <= event.arrived_at_us]
    last = [e.output_tokens for e in sorted(mine, key=lambda e: e.ended_at_us)[-5:]]
    hour = to_us(from_us(event.arrived_at_us).replace(minute=0, second=0, microsecond=0))
    before = [e.output_tokens for e in whole if hour - 86_400_000_000 <= e.arrived_at_us < hour]
    mean5 = math.floor(fmean(last) + 0.5) if last else 1_024  # SQL rounds halves up
    return {
        "served": [float(q) for q in record.quantiles or ()],
        "fallback": [float(q) for q in record.fallback or [1_024] * 7],
        "tenant_mean5": [float(mean5)] * 7,
        "pool_median": [float(median_low(before) if before else 1_024)] * 7,
    }


def check(found: Accuracy, events: Sequence[UsageEvent], chosen: Sequence[UsageEvent]) -> None:
    known = [e for e in chosen if e.prediction is not None and e.prediction.quantiles is not None]
    rows = [e for e in known if e.finish_reason == "eos_token"]
    assert found.total["served"].n_cut == len(known) - len(rows)
    for name, figures in found.total.items():
        said = [(predictions_of(e, events)[name], e.output_tokens) for e in rows]
        assert figures.n == len(rows)
        if not rows:
            continue
        assert figures.mae == pytest.approx(fmean(abs(q[3] - y) for q, y in said)), name
        assert figures.pinball == pytest.approx(fmean(loss(q, y) for q, y in said)), name
        assert figures.coverage_80 == pytest.approx(fmean(q[1] <= y <= q[5] for q, y in said)), name
        assert figures.coverage_90 == pytest.approx(fmean(q[0] <= y <= q[6] for q, y in said)), name
        bins = [sum(column) for column in zip(*(transform(q, y) for q, y in said), strict=True)]
        assert figures.pit == pytest.approx(bins), name
        exact = median(abs(q[3] - y) / y for q, y in said)
        near = sorted(abs(q[3] - y) / y for q, y in said)
        # By nearest rank, and within a hundredth of the ratio.
        close = min(near, key=lambda e: abs(e - (figures.median_relative_error or 0.0)))
        assert figures.median_relative_error == pytest.approx(close, abs=0.011 * (1 + close)), (name, exact)
    served = found.total["served"]
    assert served.n_model == sum(e.prediction.source == "model" for e in rows if e.prediction)
    assert served.n_memory == sum(e.prediction.source == "memory" for e in rows if e.prediction)
    assert served.n_fallen_back == sum(e.prediction.fallback_reason is not None for e in rows if e.prediction)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("is_running", [False, True])
def test_the_figures_are_those_of_the_definition(system: Actor, seed: int, is_running: bool) -> None:
    """By hour once it has ended, and by minute before."""
    events = traffic(seed)
    book(*events)
    if is_running:
        assert roll_up_running(now=RUNNING) > 60
        assert not TouchedMinute.objects.exists()
        assert not AccuracyHour.objects.exists()
    else:
        assert roll_up_finished() >= 2
        assert not TouchedHour.objects.exists()
    for pool in ("p", "q"):
        for tenant in ("", "x", "y"):
            found = accuracy(actor=system, pool=pool, tenant=tenant, from_at=BASE, to_at=BASE + 2 * HOUR)
            check(found, events, [e for e in events if e.pool == pool and tenant in ("", e.tenant)])
            assert {d: f.n for d, f in found.models.items() if f.n} == {
                digest: n
                for digest in ("d1", "d2", "")
                if (
                    n := sum(
                        e.pool == pool
                        and tenant in ("", e.tenant)
                        and e.finish_reason == "eos_token"
                        and e.prediction is not None
                        and e.prediction.quantiles is not None
                        and (e.prediction.length_model or "") == digest
                        for e in events
                    )
                )
            }


def test_the_running_hour_is_computed_where_events_came_and_replaced_at_its_end(system: Actor) -> None:
    events = traffic(4)
    span = {"from_at": BASE, "to_at": BASE + 2 * HOUR}
    book(*events[:100])
    assert accuracy(actor=system, pool="p", **span).as_of is None
    assert roll_up_running(now=RUNNING) > 60
    found = accuracy(actor=system, pool="p", **span)
    assert found.as_of == RUNNING
    check(found, events[:100], [e for e in events[:100] if e.pool == "p"])
    # Readers see what was rolled up, whatever is booked meanwhile.
    book(*events[100:])
    assert accuracy(actor=system, pool="p", **span).total["served"].n == found.total["served"].n
    touched = {from_us(e.arrived_at_us).replace(second=0, microsecond=0) for e in events[100:]}
    assert roll_up_running(now=RUNNING + timedelta(minutes=1)) == len(touched)
    assert roll_up_running(now=RUNNING + timedelta(minutes=2)) == 0
    served = accuracy(actor=system, pool="p", **span).total["served"]
    mine = [e for e in events if e.pool == "p" and e.prediction and e.prediction.quantiles]
    assert served.n + served.n_cut == len(mine)
    # The hour itself is exact, running means included, and nothing is counted twice.
    assert roll_up_finished() >= 2
    assert not AccuracyMinute.objects.exists()
    assert not PoolMedian.objects.exists()
    check(accuracy(actor=system, pool="p", **span), events, [e for e in events if e.pool == "p"])


def test_minutes_of_hours_that_ended_are_left_to_their_hour(system: Actor) -> None:
    book(*traffic(4))
    assert roll_up_running() == 0
    assert not TouchedMinute.objects.exists()
    assert not AccuracyMinute.objects.exists()


def test_what_a_page_reads_does_not_grow_with_the_traffic(system: Actor) -> None:
    """Two statements, neither of which may touch the predictions themselves."""
    book(*traffic(4))
    roll_up_running(now=RUNNING)
    with CaptureQueriesContext(connection) as caught:
        accuracy(actor=system, pool="p", from_at=BASE, to_at=BASE + 2 * HOUR)
        assert judged_tenants(actor=system, pool="p", from_at=BASE) == {name: name for name in "xyz"}
        assert judged_tenants(actor=system, pool="p", from_at=BASE + 3 * HOUR) == {}
    statements = [each["sql"] for each in caught.captured_queries]
    assert len(statements) == 4, statements
    assert not any("usage_prediction" in sql or "usage_event" in sql for sql in statements)


def test_a_late_event_changes_its_hour_and_rolling_up_again_changes_nothing(system: Actor) -> None:
    events = traffic(4)
    book(*events[:100])
    roll_up_finished()
    book(*events[100:])
    span = {"from_at": BASE, "to_at": BASE + 2 * HOUR}
    roll_up_finished()
    check(accuracy(actor=system, pool="p", **span), events, [e for e in events if e.pool == "p"])
    for hour in (BASE, BASE + HOUR):
        roll_up_hour(hour)
        roll_up_hour(hour)
    assert not TouchedHour.objects.exists()
    check(accuracy(actor=system, pool="p", **span), events, [e for e in events if e.pool == "p"])
    assert not AccuracyHour.objects.filter(tenant="").exclude(pool__in=("p", "q")).exists()


def test_figures_of_steps_add_up_to_the_total(system: Actor) -> None:
    book(*traffic(5))
    found = accuracy(actor=system, pool="p", from_at=BASE - timedelta(days=6), to_at=BASE + 2 * HOUR)
    assert found.step == 3 * HOUR
    whole = Figures()
    for _, step in found.steps:
        whole += step["served"]
    total = found.total["served"]
    assert (whole.n, whole.covered_90, whole.ratios) == (total.n, total.covered_90, total.ratios)
    assert whole.mae == pytest.approx(total.mae)


def test_a_perfect_predictor_is_calibrated_though_answers_meet_its_quantiles(system: Actor) -> None:
    """Every answer is one token long and was told so: no error, full coverage, a flat transform."""
    book(*(told(1, at=BASE, quantiles=[1] * 7) for _ in range(40)))
    roll_up_finished()
    found = accuracy(actor=system, pool="pool_a", from_at=BASE, to_at=BASE + HOUR).total["served"]
    assert (found.mae, found.pinball, found.coverage_80, found.coverage_90) == (0, 0, 1, 1)
    assert found.median_relative_error == 0
    assert found.miscalibration == pytest.approx(0)
    assert [share / found.n for share in found.pit] == pytest.approx(WIDTHS)


def test_hours_whose_predictions_are_gone_keep_their_figures(system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    book(*traffic(6))
    roll_up_finished()
    before = list(AccuracyHour.objects.order_by("pk").values_list())
    assert before
    monkeypatch.setattr("controlplane.usage.accuracy.oldest_day", lambda *_: utc_now().date())
    book(told(5, at=BASE, quantiles=[1, 2, 3, 4, 5, 6, 7], pool="p"))
    roll_up_finished()
    assert list(AccuracyHour.objects.order_by("pk").values_list()) == before


@pytest.mark.parametrize(
    ("span", "words"),
    [((BASE, BASE), "must be after from"), ((BASE - timedelta(days=93), BASE), "at most 92 days after from, not 93")],
)
def test_a_span_it_cannot_show_is_refused(system: Actor, span: tuple[datetime, datetime], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        accuracy(actor=system, pool="p", from_at=span[0], to_at=span[1])


def test_a_read_is_two_queries_and_nothing_known_is_nothing(system: Actor, django_assert_num_queries: Any) -> None:
    book(*traffic(7))
    with django_assert_num_queries(2) as queries:
        found = accuracy(actor=system, pool="nobody", from_at=BASE, to_at=datetime.now(UTC))
    assert isinstance(queries, CaptureQueriesContext)
    empty = found.total["served"]
    assert (empty.n, empty.mae, empty.median_relative_error, empty.calibration, found.steps) == (0, None, None, [], [])
