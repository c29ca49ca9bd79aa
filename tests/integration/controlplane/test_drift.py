"""The drift monitor: what it says of a pool, and when it starts a training run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from controlplane.common.actor import Actor
from controlplane.common.clock import to_us, utc_now
from controlplane.fleet.models import Pool
from controlplane.training import actions, drift
from controlplane.training.actions import start_job
from controlplane.training.models import Artifact, Drift, DriftState, Job, Promotion
from controlplane.training.promotion import promote, roll_back
from controlplane.usage.ingest import decode_batch, ingest
from tests.support.control_plane import (
    make_evaluation,
    make_length_model,
    make_pool,
    predicted_event,
    usage_body,
)

pytestmark = pytest.mark.django_db

# Told the same to everybody, and answers that are spread exactly as told: 20 of them are calibrated at every level.
TOLD = [10, 20, 50, 100, 200, 300, 400]
CALIBRATED = [5, 15, 30, 40, 45, 60, 70, 80, 90, 95, 110, 120, 140, 160, 180, 220, 250, 280, 350, 500]
LOSS = sum(drift.pinball(TOLD, y) for y in CALIBRATED) / len(CALIBRATED)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "MIN_ROWS", 100)
    monkeypatch.setattr(actions, "min_samples", lambda: 100)


def promoted(system: Actor, *, loss: float | None = LOSS) -> tuple[Pool, Artifact]:
    pool = make_pool(system)
    model = make_length_model(f"of {pool.id}")
    contenders = {} if loss is None else {"candidate": {"pinball": loss}}
    make_evaluation(model, pool, contenders=contenders)
    promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="better")
    Promotion.objects.filter(pool=pool.id).update(created_at=utc_now() - timedelta(hours=2))
    return pool, model


def answer(pool: Pool, model: Artifact, lengths: list[int], **fields: Any) -> None:
    at = to_us(utc_now()) - 3_600_000_000
    given = {"pool": pool.id, "length_model": model.digest, "quantiles": TOLD}
    events = [
        predicted_event(output_tokens=n, arrived_at_us=at + i, **{**given, **fields}) for i, n in enumerate(lengths)
    ]
    ingest(decode_batch(usage_body(*events)))


def state_of(pool: Pool) -> DriftState:
    drift.watch()
    return DriftState.objects.get(pk=pool.id)


def test_a_pool_without_a_trained_model_has_nothing_to_drift(system: Actor) -> None:
    assert state_of(make_pool(system)).state == Drift.NO_MODEL


def test_few_answers_are_no_verdict_and_are_counted(system: Actor) -> None:
    pool, model = promoted(system)
    answer(pool, model, CALIBRATED * 4)
    seen = state_of(pool)
    assert (seen.state, seen.n, seen.reason) == (Drift.TOO_FEW, 80, "80 of 100 answers")


def test_answers_as_told_are_ok(system: Actor) -> None:
    pool, model = promoted(system)
    answer(pool, model, CALIBRATED * 10)
    seen = state_of(pool)
    assert seen.state == Drift.OK, seen.reason
    assert (seen.n, seen.length_model) == (200, model.digest)
    assert seen.ratio == pytest.approx(1)
    assert seen.miscalibration == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "state"), [(1.05, Drift.OK), (1.15, Drift.WATCHING), (1.25, Drift.DRIFTING), (0.5, Drift.OK)]
)
def test_the_loss_is_compared_with_that_of_the_promotion(system: Actor, ratio: float, state: Drift) -> None:
    pool, model = promoted(system, loss=LOSS / ratio)
    answer(pool, model, CALIBRATED * 10)
    seen = state_of(pool)
    assert seen.state == state
    assert seen.ratio == pytest.approx(ratio)


def test_answers_that_became_shorter_are_out_of_calibration(system: Actor) -> None:
    pool, model = promoted(system, loss=100.0)
    answer(pool, model, [max(1, n // 2) for n in CALIBRATED] * 10)
    seen = state_of(pool)
    assert seen.state == Drift.DRIFTING
    assert seen.miscalibration > drift.DRIFTING_MISCALIBRATION
    assert seen.ratio < 1


def test_only_what_this_model_told_since_its_promotion_counts(system: Actor) -> None:
    pool, model = promoted(system)
    answer(pool, model, CALIBRATED * 10, length_model="e" * 64)
    answer(pool, model, CALIBRATED * 10, source="tenant")
    answer(pool, model, CALIBRATED * 10, finish_reason="length")
    assert state_of(pool).n == 0
    answer(pool, model, CALIBRATED * 5)
    assert state_of(pool).n == 100
    Promotion.objects.update(created_at=utc_now())
    assert state_of(pool).n == 0


def test_a_model_promoted_without_rows_held_out_is_its_own_measure(system: Actor) -> None:
    pool, model = promoted(system, loss=None)
    answer(pool, model, CALIBRATED * 10)
    seen = state_of(pool)
    assert (seen.state, seen.ratio) == (Drift.OK, pytest.approx(1))


def test_how_long_it_has_been_so_is_kept(system: Actor) -> None:
    pool, model = promoted(system)
    early = utc_now() - timedelta(hours=1)
    drift.watch(now=early)
    drift.watch(now=early + timedelta(minutes=5))
    assert DriftState.objects.get().since == early
    answer(pool, model, CALIBRATED * 10)
    assert state_of(pool).since > early
    roll_back(actor=system, pool_id=pool.id)
    assert state_of(pool).state == Drift.NO_MODEL


def test_a_drifting_pool_is_trained_for_once_in_a_while(system: Actor) -> None:
    pool, model = promoted(system, loss=LOSS / 2)
    answer(pool, model, CALIBRATED * 10)
    now = utc_now()
    job = drift.retrain_if_drifting(now=now)
    assert job is not None
    assert (job.kind, job.trigger, job.requested_by) == ("mixture", "drift", "drift monitor")
    assert drift.retrain_if_drifting(now=now) is None
    Job.objects.update(state="succeeded")
    assert drift.retrain_if_drifting(now=now + timedelta(minutes=5)) is None
    assert drift.retrain_if_drifting(now=now + drift.PAUSE + timedelta(minutes=1)) is not None
    assert Job.objects.filter(trigger="drift").count() == 2


def test_nothing_is_started_while_another_runs_or_without_samples(
    system: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, model = promoted(system, loss=LOSS / 2)
    answer(pool, model, CALIBRATED * 10)
    start_job(actor=system, kind="mixture")
    assert drift.retrain_if_drifting() is None
    Job.objects.all().delete()
    monkeypatch.setattr(actions, "min_samples", lambda: 10_000)
    assert drift.retrain_if_drifting() is None
    assert state_of(pool).state == Drift.DRIFTING
