"""Predictions and training samples: with their event, exactly once, bounded, and never in the books' way."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.test import Client

from controlplane.common.clock import to_us, utc_now
from controlplane.fleet.models import Router
from controlplane.usage import samples
from controlplane.usage.ingest import decode_batch, ingest
from controlplane.usage.models import (
    DroppedSample,
    PredictorSample,
    QuarantinedEvent,
    UsageEvent,
    UsagePrediction,
)
from controlplane.usage.partitions import PREDICTIONS, SAMPLES, ensure_ahead, partition_name
from router_ext.wire.controlplane import PredictionRecord, UsageAck
from router_ext.wire.controlplane import UsageEvent as Event
from tests.support.control_plane import book, predicted_event, undated, usage_body, usage_event

DAY = timedelta(days=1)
DAY_ROW = {"from": utc_now() - DAY, "to": utc_now() + DAY, "tenant": 1, "pool": 1}


def predicted(*, at: Any = None, **fields: Any) -> Event:
    return predicted_event(**({} if at is None else {"arrived_at_us": to_us(at)}), **fields)


def tables(parent: str) -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", [parent])
        return {name for (name,) in cursor.fetchall()}


@pytest.mark.django_db
class TestIngestion:
    def test_what_came_with_the_event_is_kept_as_sent(self) -> None:
        event = predicted(output_tokens=77, max_new_tokens=500, prompt_tokens=9)
        book(event)
        row = UsagePrediction.objects.get()
        record = event.prediction
        assert record is not None
        for name in ("quantiles", "source", "fallback", "fallback_reason", "runaway", "length_model"):
            assert getattr(row, name) == getattr(record, name), name
        assert (to_us(row.arrived_at), row.event) == (event.arrived_at_us, event.event)
        assert (row.pool, row.tenant, row.key, row.output_tokens, row.is_complete) == (
            event.pool,
            event.tenant,
            event.key,
            77,
            True,
        )
        sample = PredictorSample.objects.get()
        assert bytes(sample.features) == record.features
        assert (sample.feature_version, sample.model, sample.prompt_tokens, sample.max_new_tokens) == (
            record.feature_version,
            event.model,
            9,
            500,
        )
        assert (sample.output_tokens, sample.is_complete) == (77, True)

    def test_an_event_sent_again_leaves_one_sample(self) -> None:
        events = [predicted() for _ in range(4)]
        book(*events[:2])
        book(*events, *events)
        assert undated(book(*events)) == UsageAck(accepted=0, known=4)
        assert (UsagePrediction.objects.count(), PredictorSample.objects.count()) == (4, 4)

    def test_an_answer_that_was_cut_is_known_to_be_longer(self) -> None:
        book(predicted(finish_reason="length"), predicted(outcome="cancelled", finish_reason=None))
        assert set(UsagePrediction.objects.values_list("is_complete", flat=True)) == {False}
        assert set(PredictorSample.objects.values_list("is_complete", flat=True)) == {False}

    def test_one_cut_before_its_first_token_says_nothing(self) -> None:
        book(predicted(output_tokens=0, outcome="failed", finish_reason=None))
        assert UsageEvent.objects.count() == 1
        assert not UsagePrediction.objects.exists()

    def test_without_features_the_prediction_alone_is_kept(self) -> None:
        book(predicted(prediction=PredictionRecord()), usage_event())
        row = UsagePrediction.objects.get()
        assert (row.quantiles, row.source, row.length_model) == (None, "default", "")
        assert not PredictorSample.objects.exists()

    @pytest.mark.parametrize(
        ("fields", "reason", "is_prediction_kept"),
        [
            ({"features": b"x" * (samples.MAX_FEATURE_BYTES + 1)}, "more than 8,192 bytes", True),
            ({"features": b""}, "empty", True),
            ({"feature_version": None}, "without a version", True),
            ({"feature_version": 2**31}, "without a version", True),
            ({"quantiles": [1, 2, 3]}, "quantiles", False),
            ({"quantiles": [9, 8, 7, 6, 5, 4, 3]}, "quantiles", False),
            ({"fallback": [0, 1, 2, 3, 4, 5, 6]}, "quantiles", False),
            ({"quantiles": [1, 2, 3, 4, 5, 6, 2**40]}, "quantiles", False),
            ({"source": "tea leaves"}, "source", False),
            ({"runaway": 1.5}, "probability", False),
            ({"length_model": "x" * 65}, "model", False),
            ({"fallback_reason": "a\0b"}, "model or reason", False),
        ],
    )
    def test_what_cannot_be_kept_is_counted_and_its_event_booked(
        self, fields: dict[str, Any], reason: str, is_prediction_kept: bool
    ) -> None:
        ack = book(predicted(), predicted(**fields))
        assert undated(ack) == UsageAck(accepted=2, known=0)
        assert UsagePrediction.objects.count() == 1 + is_prediction_kept
        assert PredictorSample.objects.count() == 1
        (dropped,) = DroppedSample.objects.all()
        assert reason in dropped.reason
        assert (dropped.n, dropped.pool, dropped.router) == (1, "pool_a", "rtr_1")

    @pytest.mark.parametrize("damage", ["!!! no base64", 7, {"quantiles": "many"}])
    def test_a_prediction_nobody_can_read_does_not_cost_the_event(self, damage: Any) -> None:
        plain = msgspec.to_builtins(predicted())
        plain["prediction"] = damage if isinstance(damage, dict) else {**plain["prediction"], "features": damage}
        body = msgspec.json.encode({"router": "rtr_1", "events": [plain]})
        assert undated(ingest(decode_batch(body))) == UsageAck(accepted=1, known=0)
        assert UsageEvent.objects.count() == 1
        assert not QuarantinedEvent.objects.exists()
        assert DroppedSample.objects.get().reason == "unreadable prediction"
        assert undated(ingest(decode_batch(body))) == UsageAck(accepted=0, known=1)
        assert DroppedSample.objects.count() == 1

    def test_an_event_that_is_none_is_quarantined_with_its_prediction(self) -> None:
        plain = {**msgspec.to_builtins(predicted()), "tenant": 7}
        ack = ingest(decode_batch(msgspec.json.encode({"router": "rtr_1", "events": [plain]})))
        assert ack.quarantined == 1

    def test_what_is_older_than_is_kept_is_booked_without(self) -> None:
        old = utc_now() - 29 * DAY
        assert book(predicted(at=old)).accepted == 1
        assert not UsagePrediction.objects.exists()
        assert DroppedSample.objects.get().reason == "older than 28 days"
        assert partition_name(old.date(), PREDICTIONS) not in tables(PREDICTIONS)

    def test_a_router_sends_them_over_the_wire(self, client: Client, router: tuple[Router, dict[str, str]]) -> None:
        _, headers = router
        answer = client.post(
            "/router/v1/usage", usage_body(predicted()), content_type="application/json", headers=headers
        )
        assert answer.status_code == 200
        assert PredictorSample.objects.count() == 1


@pytest.mark.django_db
class TestLimits:
    def test_days_past_their_time_are_dropped_and_the_books_stay(self) -> None:
        now = utc_now()
        book(predicted(at=now - 20 * DAY), predicted(at=now - DAY))
        ensure_ahead()
        samples.forget_old(now=now + 10 * DAY)
        assert UsageEvent.objects.count() == 2
        for model, parent in ((UsagePrediction, PREDICTIONS), (PredictorSample, SAMPLES)):
            assert model.objects.count() == 1
            names = tables(parent)
            assert partition_name((now - 20 * DAY).date(), parent) not in names
            assert partition_name((now - DAY).date(), parent) in names

    def test_of_a_day_at_most_so_many_stay_and_no_tenant_takes_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(samples, "MAX_PER_TENANT_DAY", 30)
        monkeypatch.setattr(samples, "MAX_PER_POOL_DAY", 50)
        at = utc_now().replace(hour=0, minute=0, second=1) - DAY
        busy = [predicted(at=at + timedelta(seconds=i), tenant="busy") for i in range(80)]
        quiet = [predicted(at=at + timedelta(seconds=i), tenant="quiet") for i in range(10)]
        other = [predicted(at=at + timedelta(seconds=i), pool="pool_b", tenant="busy") for i in range(20)]
        book(*busy, *quiet, *other)
        assert samples.thin_samples() == 50
        kept = Counter(PredictorSample.objects.values_list("pool", "tenant"))
        assert kept == {("pool_a", "busy"): 30, ("pool_a", "quiet"): 10, ("pool_b", "busy"): 20}
        # The predictions stay: accuracy is computed from all of them.
        assert UsagePrediction.objects.count() == 110
        names = set(PredictorSample.objects.values_list("event", flat=True))
        assert samples.thin_samples() == 0
        # Sent again they are known, and do not come back.
        book(*busy, *quiet, *other)
        assert set(PredictorSample.objects.values_list("event", flat=True)) == names

    def test_a_pool_keeps_its_number_over_many_tenants(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(samples, "MAX_PER_POOL_DAY", 25)
        book(*(predicted(tenant=f"ten_{i % 10}") for i in range(60)))
        samples.thin_samples()
        assert PredictorSample.objects.count() == 25

    def test_choosing_them_reads_no_features(self) -> None:
        book(*(predicted() for _ in range(20)))
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
            cursor.execute("EXPLAIN " + samples._THIN_SQL.partition("DELETE")[0] + "SELECT event FROM by_pool", DAY_ROW)
            plan = "\n".join(line for (line,) in cursor.fetchall())
        assert "Index Only Scan" in plan
