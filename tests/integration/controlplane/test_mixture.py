"""Mixture jobs with the real training: learnt, judged, promoted or not, cancelled, taken over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings

from controlplane.common import keeper
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.leases import JobState
from controlplane.fleet.models import Pool
from controlplane.rollout.queries import current_body
from controlplane.training import jobs, length_model
from controlplane.training.actions import cancel_job, start_job, wake_lapsed_jobs
from controlplane.training.lease import take_lease
from controlplane.training.models import Artifact, Evaluation, Job, Promotion
from controlplane.usage.ingest import decode_batch, ingest
from router_ext.errors import TrainingFailed
from router_ext.predict.features import RequestFacts, extract
from router_ext.predict.predictor import Predictor, Request
from router_ext.predict.versions import FEATURE_VERSION
from router_ext.wire.controlplane import ConfigSnapshot, UsageEvent
from tests.support.answers import answered
from tests.support.control_plane import (
    database_environment,
    make_length_model,
    make_pool,
    usage_body,
    wait_for,
)

ROWS = 620
FEW = {"FAIRLANE_TRAINING_MIN_SAMPLES": "500"}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    few = settings.ENVIRONMENT.model_copy(update={"training_min_samples": 500})
    monkeypatch.setattr(settings, "ENVIRONMENT", few)


def book(events: list[UsageEvent]) -> None:
    for i in range(0, len(events), 500):
        ingest(decode_batch(usage_body(*events[i : i + 500])))


def served(pool: Pool) -> str | None:
    snapshot = msgspec.json.decode(current_body()[2], type=ConfigSnapshot)
    record = next(each.length_model for each in snapshot.pools if each.pool == pool.id)
    return None if record is None else record.digest


def median_of(artifact: Artifact, prompt: str) -> float:
    features = extract(prompt, RequestFacts(max_new_tokens=1_024, temperature=0.7))
    assert artifact.body is not None
    return Predictor.load(bytes(artifact.body)).predict_batch([Request(features=features, model="org/model")])[0].median


def test_it_learns_judges_and_promotes_where_it_is_better(committed_db: None, system: Actor) -> None:
    pool, quiet = make_pool(system), make_pool(system)
    book(answered(ROWS, pool=pool.id, until=utc_now()))
    book(answered(30, pool=quiet.id, until=utc_now(), seed=2))
    job = start_job(actor=system, kind="mixture")
    assert jobs.run(job.id) is True
    job.refresh_from_db()
    assert (job.state, job.progress, job.error) == (JobState.SUCCEEDED, 1.0, "")
    assert job.dataset is not None
    assert job.artifact is not None
    counts = job.dataset.counts
    assert (counts["found"], counts["train"] + counts["heldout"], counts["tenants"]) == (650, 650, 3)
    assert counts["heldout"] == 200
    assert job.dataset.filters == {"pools": [], "feature_version": FEATURE_VERSION}
    verdicts = {each.pool: each for each in Evaluation.objects.all()}
    assert verdicts[pool.id].is_passed, verdicts[pool.id].reason
    assert set(verdicts[pool.id].contenders) == {"candidate", "fallback", "tenant_mean5", "pool_median"}
    assert verdicts[pool.id].contenders["candidate"]["rank"] > 0.8
    assert not verdicts[quiet.id].is_passed
    assert "at least 100 decide" in verdicts[quiet.id].reason
    assert served(pool) == job.artifact.digest
    assert served(quiet) is None
    promotion = Promotion.objects.get()
    assert (promotion.promoted_by, promotion.pinball) == (
        "training",
        verdicts[pool.id].contenders["candidate"]["pinball"],
    )
    assert "promoted: better than all others" in job.log
    assert "not promoted: not judged: only" in job.log
    assert f"samples of feature version {FEATURE_VERSION}" in job.log
    # What is served has learnt what was there to learn.
    long, short = (median_of(job.artifact, f"Write {n} words about bread.") for n in (600, 20))
    assert long > 5 * short

    # The same rows again: no better than what serves already.
    again = start_job(actor=system, kind="mixture")
    assert jobs.run(again.id) is True
    verdict = Evaluation.objects.get(job=again, pool=pool.id)
    assert "active" in verdict.contenders
    assert not verdict.is_passed
    assert "no better: its pinball loss" in verdict.reason
    assert Promotion.objects.count() == 1


@pytest.mark.slow
def test_the_active_model_is_not_judged_on_rows_it_has_learnt_from(committed_db: None, system: Actor) -> None:
    """A job of the past holds out rows that the active model knows: they would flatter it."""
    pool = make_pool(system)
    now = utc_now()
    book(answered(ROWS, pool=pool.id, until=now - timedelta(days=2)))
    book(answered(ROWS, pool=pool.id, until=now, seed=2))
    first = start_job(actor=system, kind="mixture")
    assert jobs.run(first.id) is True
    first.refresh_from_db()
    assert first.artifact is not None
    assert served(pool) == first.artifact.digest
    past = start_job(actor=system, kind="mixture", to_at=now - timedelta(days=2))
    assert jobs.run(past.id) is True
    verdict = Evaluation.objects.get(job=past)
    assert (verdict.is_passed, verdict.is_judged, verdict.n_rows) == (False, False, 0)
    assert verdict.reason.startswith("not judged: only 0 answers of this pool are newer than what the candidate or the")
    past.refresh_from_db()
    assert "not promoted: not judged" in past.log
    # The mutant that trusts any row held out judges it, and says nothing of what it knew.
    Job.objects.filter(pk=first.id).update(dataset=past.dataset)
    again = start_job(actor=system, kind="mixture", to_at=now - timedelta(days=2))
    assert jobs.run(again.id) is True
    assert Evaluation.objects.get(job=again).is_judged


@pytest.mark.slow
def test_a_model_nobody_knows_the_rows_of_is_not_replaced_by_itself(committed_db: None, system: Actor) -> None:
    pool = make_pool(system)
    book(answered(ROWS, pool=pool.id, until=utc_now()))
    first = start_job(actor=system, kind="mixture")
    assert jobs.run(first.id) is True
    Job.objects.filter(pk=first.id).update(dataset=None)
    assert jobs.run(start_job(actor=system, kind="mixture").id) is True
    verdict = Evaluation.objects.latest("created_at")
    assert verdict.reason == "not judged: nobody knows which answers the active model learnt from"
    assert Promotion.objects.filter(pool=pool.id).count() == 1


def test_one_that_learnt_nothing_is_not_promoted(committed_db: None, system: Actor) -> None:
    """Answers are chance, but every tenant's own: the mean of its last five tells more than any prompt."""
    pool = make_pool(system)
    events = answered(ROWS, pool=pool.id, until=utc_now(), noise=0.0)
    # The newest rows contradict what the older ones teach: the longer the text asked for, the shorter the answer.
    turned = [
        msgspec.structs.replace(
            event, output_tokens=max(1, 900 - event.output_tokens) if i >= 420 else event.output_tokens
        )
        for i, event in enumerate(events)
    ]
    book(turned)
    job = start_job(actor=system, kind="mixture")
    assert jobs.run(job.id) is True
    verdict = Evaluation.objects.get()
    assert not verdict.is_passed
    assert verdict.reason.startswith("worse: ")
    assert "rank" in verdict.reason
    assert not Promotion.objects.exists()
    assert served(pool) is None
    job.refresh_from_db()
    assert (job.state, job.artifact is not None) == (JobState.SUCCEEDED, True)


def test_too_few_samples_fail_it_with_both_numbers(committed_db: None, system: Actor) -> None:
    pool = make_pool(system)
    book(answered(42, pool=pool.id, until=utc_now()))
    book(answered(9, pool=pool.id, until=utc_now(), seed=2, feature_version=99))
    job = start_job(actor=system, kind="mixture")
    assert jobs.run(job.id) is False
    job.refresh_from_db()
    assert job.state == JobState.FAILED
    assert f"only 42 samples of feature version {FEATURE_VERSION} (9 of other versions)" in job.error
    assert "at least 500 are needed" in job.error
    assert "reading samples" in job.log


def test_it_reads_the_pools_and_the_span_it_was_asked_for(committed_db: None, system: Actor) -> None:
    wanted, other = make_pool(system), make_pool(system)
    now = utc_now()
    book(answered(520, pool=wanted.id, until=now))
    book(answered(50, pool=other.id, until=now, seed=2))
    book(answered(50, pool=wanted.id, until=now - timedelta(days=4), seed=3))
    job = start_job(actor=system, kind="mixture", pools=[wanted.name], from_at=now - timedelta(days=3), to_at=now)
    assert jobs.run(job.id) is True
    job.refresh_from_db()
    assert job.dataset is not None
    assert job.dataset.counts["pools"] == {wanted.id: 520}
    assert job.dataset.filters["pools"] == [wanted.id]


def test_damaged_features_are_left_out_and_counted(committed_db: None, system: Actor) -> None:
    pool = make_pool(system)
    book(answered(ROWS, pool=pool.id, until=utc_now()))
    # Older than all others, so none of them is held out.
    book(answered(7, pool=pool.id, until=utc_now() - timedelta(days=3), seed=2, features=b"\xf1 no features at all"))
    job = start_job(actor=system, kind="mixture")
    assert jobs.run(job.id) is True
    job.refresh_from_db()
    assert job.artifact is not None
    assert job.artifact.metrics["damaged"] == 7
    assert "7 samples are damaged" in job.log


def test_a_cancelled_run_stops_soon_and_leaves_nothing(
    committed_db: None, system: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "BEAT_S", 0.05)
    pool = make_pool(system)
    book(answered(ROWS, pool=pool.id, until=utc_now()))
    job = start_job(actor=system, kind="mixture")
    train = length_model.train
    asked: list[bool] = []

    def cancelled_meanwhile(examples: Any, *, should_stop: Any, **given: Any) -> Any:
        cancel_job(actor=system, job_id=job.id)
        wait_for(should_stop, limit_s=10, what="the cancellation being noticed")

        def stop() -> bool:
            asked.append(True)
            return bool(should_stop())

        return train(examples, should_stop=stop, **given)

    monkeypatch.setattr(length_model, "train", cancelled_meanwhile)
    assert jobs.run(job.id) is False
    job.refresh_from_db()
    assert (job.state, len(asked)) == (JobState.CANCELLED, 1)
    assert not Artifact.objects.exists()
    assert not Promotion.objects.exists()


def test_progress_is_seen_from_elsewhere_while_it_runs(
    committed_db: None, system: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "BEAT_S", 0.02)
    pool = make_pool(system)
    book(answered(ROWS, pool=pool.id, until=utc_now()))
    job = start_job(actor=system, kind="mixture")
    seen: list[float] = []
    replay = length_model.replay

    def look(body: bytes, examples: Any) -> Any:
        wait_for(lambda: Job.objects.get(pk=job.id).progress >= 0.9, limit_s=10, what="progress being seen")
        seen.append(Job.objects.get(pk=job.id).progress)
        return replay(body, examples)

    monkeypatch.setattr(length_model, "replay", look)
    assert jobs.run(job.id) is True
    assert seen
    assert 0.9 <= seen[0] < 1
    job.refresh_from_db()
    lines = [line for line in job.log.splitlines() if line]
    assert len(lines) > 5


def test_a_foreign_artifact_in_force_is_no_contender(committed_db: None, system: Actor) -> None:
    pool = make_pool(system)
    foreign = make_length_model("of another program")
    Pool.objects.filter(pk=pool.id).update(
        length_model_artifact=foreign.id, length_model_digest=foreign.digest, length_model_kind="mixture"
    )
    book(answered(ROWS, pool=pool.id, until=utc_now()))
    assert jobs.run(start_job(actor=system, kind="mixture").id) is True
    contenders = Evaluation.objects.get().contenders
    assert contenders
    assert "active" not in contenders


# --- real worker processes ---


def start_trainer(log: Any, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "celery", "--app", "controlplane.celery", "worker", "--queues", "training"]
    options = ["--concurrency", "1", "--max-tasks-per-child", "1", "--loglevel", "INFO", "--without-mingle"]
    return subprocess.Popen(
        command + options,
        env={**database_environment(), **FEW, **variables},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """The worker with its children, as a machine that goes away; nothing if that was done."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


@pytest.fixture
def log(tmp_path: Any) -> Iterator[Any]:
    with (tmp_path / "trainer.log").open("wb") as file:
        yield file


def state_of(job: Job) -> Job:
    job.refresh_from_db()
    return job


@pytest.mark.slow
def test_a_trainer_killed_in_its_training_is_replaced_and_no_two_are_ever_active(
    committed_db: None, system: Actor, log: Any
) -> None:
    pool = make_pool(system)
    book(answered(ROWS, pool=pool.id, until=utc_now()))
    first = start_trainer(log)
    second = None
    try:
        job = start_job(actor=system, kind="mixture")
        wait_for(lambda: state_of(job).progress > 0.1, limit_s=120, what="training")
        kill(first)
        assert (state_of(job).state, job.attempts) == (JobState.RUNNING, 1)
        second = start_trainer(log)
        # Its lease has not lapsed: nobody else gets it, whoever calls.
        assert take_lease(job.id) is None
        assert wake_lapsed_jobs() == []
        Job.objects.filter(pk=job.id).update(lease_until=utc_now() - timedelta(seconds=1))
        assert wake_lapsed_jobs() == [job.id]
        wait_for(lambda: state_of(job).state == JobState.SUCCEEDED, limit_s=180, what="the job's success")
    finally:
        kill(first)
        if second is not None:
            kill(second)
    assert job.attempts == 2
    assert Artifact.objects.count() == 1
    assert served(pool) == Artifact.objects.get().digest


CONFINED = """
import os, django
django.setup()
from controlplane.training.jobs import confine_process
confine_process()
confine_process()
print(os.nice(0))
block = bytearray(300 << 20)
try:
    more = bytearray(300 << 20)
except MemoryError:
    print("refused")
"""


def test_the_process_that_trains_is_confined(committed_db: None) -> None:
    environment = {**database_environment(), "FAIRLANE_TRAINING_MEMORY_MB": "512"}
    done = subprocess.run([sys.executable, "-c", CONFINED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(max(10, os.nice(0))), "refused"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "needed more memory than the 4,096 MB it may have"),
        (SoftTimeLimitExceeded(), "not done within 1,800 s"),
        (TrainingFailed("5 prompts; 50 are needed"), "TrainingFailed: 5 prompts; 50 are needed"),
    ],
)
def test_what_ends_a_training_is_said(
    committed_db: None, system: Actor, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    book(answered(ROWS, pool=make_pool(system).id, until=utc_now()))
    job = start_job(actor=system, kind="mixture")

    def ends(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(length_model, "train", ends)
    with contextlib.suppress(MemoryError, TrainingFailed):
        jobs.run(job.id)
    assert state_of(job).state == JobState.FAILED
    assert words in job.error
    assert not Artifact.objects.exists()
