"""Training jobs: the row is the truth; one worker at a time, whatever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import IntegrityError, connection, transaction

from controlplane.accounts.actions import issue_token
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor, system_actor
from controlplane.common.clock import to_us, utc_now
from controlplane.common.errors import Conflict
from controlplane.common.leases import MAX_ATTEMPTS, JobState, LeaseLost, heartbeat
from controlplane.fleet.models import Pool
from controlplane.rollout.queries import current_body, current_number
from controlplane.training import baseline_job, jobs
from controlplane.training.actions import cancel_job, start_job, wake_lapsed_jobs
from controlplane.training.lease import take_lease
from controlplane.training.models import Artifact, Job
from controlplane.usage.ingest import decode_batch, ingest
from router_ext.predict.baseline import Baseline
from router_ext.wire.controlplane import ConfigSnapshot
from tests.support.control_plane import (
    ApiClient,
    Site,
    api_client,
    database_environment,
    make_pool,
    make_user,
    usage_body,
    usage_event,
    wait_for,
)


def book_answers(pool: Pool, *lengths: int, key: str = "key_a", tenant: str = "ten_a") -> None:
    at = to_us(utc_now()) - 3_600_000_000
    events = [
        usage_event(pool=pool.id, key=key, tenant=tenant, output_tokens=n, arrived_at_us=at + i)
        for i, n in enumerate(lengths)
    ]
    ingest(decode_batch(usage_body(*events)))


def lapse(job: Job) -> None:
    Job.objects.filter(pk=job.id).update(lease_until=utc_now() - timedelta(seconds=1))


@pytest.fixture
def rest(committed_db: None) -> ApiClient:
    return api_client(make_user())


@pytest.mark.usefixtures("committed_db")
class TestJob:
    def test_it_learns_the_quantiles_of_the_books_and_publishes_them(self, system: Actor) -> None:
        pool = make_pool(system)
        book_answers(pool, *range(1, 101))
        job = start_job(actor=system)
        number = current_number()
        assert jobs.run(job.id) is True
        job.refresh_from_db()
        assert (job.state, job.progress, job.lease) == (JobState.SUCCEEDED, 1.0, "")
        assert job.dataset is not None
        assert job.artifact is not None
        assert job.dataset.n_rows == 100
        assert "100 rows" in job.log
        snapshot = msgspec.json.decode(current_body()[2], type=ConfigSnapshot)
        assert snapshot.revision == number + 1
        (row,) = snapshot.pools
        assert row.predictor is not None
        assert row.predictor.digest == job.artifact.digest
        quantiles = Baseline.from_bytes(bytes(job.artifact.body)).predict("key_a", "ten_a", pool.id)
        assert (quantiles.source, quantiles.median, quantiles.q95) == ("key", 50, 95)

    def test_one_page_of_rows_after_another_is_read(self, system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(baseline_job, "_FETCH", 7)
        pool = make_pool(system)
        book_answers(pool, *range(1, 51))
        job = start_job(actor=system)
        assert jobs.run(job.id)
        job.refresh_from_db()
        assert job.dataset is not None
        assert job.dataset.n_rows == 50
        assert "built from 50 rows" in job.log

    def test_the_same_rows_give_the_same_artifact_and_no_new_revision(self, system: Actor) -> None:
        pool = make_pool(system)
        book_answers(pool, *range(1, 41))
        assert jobs.run(start_job(actor=system).id)
        number = current_number()
        assert jobs.run(start_job(actor=system).id)
        assert (Artifact.objects.count(), current_number()) == (1, number)
        book_answers(pool, 5)
        assert jobs.run(start_job(actor=system).id)
        assert (Artifact.objects.count(), current_number()) == (2, number + 1)

    def test_two_are_never_active(self, system: Actor, rest: ApiClient) -> None:
        job = start_job(actor=system)
        with pytest.raises(Conflict):
            start_job(actor=system)
        assert rest.send("POST", "/training-jobs", {}).status_code == 409
        with pytest.raises(IntegrityError), transaction.atomic():
            Job.objects.create(requested_by="behind the back of use cases")
        assert take_lease(job.id)
        with pytest.raises(Conflict):
            start_job(actor=system)
        cancel_job(actor=system, job_id=job.id)
        start_job(actor=system)

    def test_a_lease_is_taken_once(self, system: Actor) -> None:
        job = start_job(actor=system)
        first = take_lease(job.id)
        assert first is not None
        assert take_lease(job.id) is None
        assert jobs.run(job.id) is False
        lapse(job)
        second = take_lease(job.id)
        assert second not in (None, first)
        with pytest.raises(LeaseLost):
            heartbeat(Job.objects.all(), job.id, first, progress=0.5)
        heartbeat(Job.objects.all(), job.id, second or "", progress=0.5, line="half")
        job.refresh_from_db()
        assert (job.attempts, job.progress) == (2, 0.5)
        assert "half" in job.log

    def test_a_cancelled_job_leaves_nothing_behind(self, system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = make_pool(system)
        book_answers(pool, 1, 2, 3)
        job = start_job(actor=system)
        build = baseline_job.build_baseline

        def cancelled_meanwhile(*args: Any, **kwargs: Any) -> bytes:
            body = build(*args, **kwargs)
            cancel_job(actor=system, job_id=job.id)
            return body

        monkeypatch.setattr(baseline_job, "build_baseline", cancelled_meanwhile)
        assert jobs.run(job.id) is False
        job.refresh_from_db()
        assert job.state == JobState.CANCELLED
        assert not Artifact.objects.exists()
        assert not Pool.objects.exclude(predictor_digest="").exists()

    def test_a_worker_that_lost_its_lease_writes_nothing(self, system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
        book_answers(make_pool(system), 1, 2, 3)
        job = start_job(actor=system)
        build = baseline_job.build_baseline

        def overtaken_meanwhile(*args: Any, **kwargs: Any) -> bytes:
            body = build(*args, **kwargs)
            # In one transaction, whose lock keeps this worker's own heartbeat from extending the lease between the two.
            with transaction.atomic():
                lapse(job)
                assert take_lease(job.id)
            return body

        monkeypatch.setattr(baseline_job, "build_baseline", overtaken_meanwhile)
        assert jobs.run(job.id) is False
        job.refresh_from_db()
        assert (job.state, job.attempts) == (JobState.RUNNING, 2)
        assert not Artifact.objects.exists()

    def test_a_failure_is_kept_with_its_reason(self, system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
        job = start_job(actor=system)

        def fails(*args: Any, **kwargs: Any) -> bytes:
            raise ValueError("no good")

        monkeypatch.setattr(baseline_job, "build_baseline", fails)
        with pytest.raises(ValueError, match="no good"):
            jobs.run(job.id)
        job.refresh_from_db()
        assert (job.state, job.error) == (JobState.FAILED, "ValueError: no good")
        assert AuditEntry.objects.latest("id").action == "job.failed"

    def test_lapsed_jobs_are_woken_and_given_up_in_the_end(self, system: Actor) -> None:
        job = start_job(actor=system)
        for attempt in range(MAX_ATTEMPTS):
            assert wake_lapsed_jobs() == [job.id]
            assert take_lease(job.id)
            assert wake_lapsed_jobs() == []
            lapse(job)
            assert Job.objects.get().attempts == attempt + 1
        assert wake_lapsed_jobs() == []
        job.refresh_from_db()
        assert job.state == JobState.FAILED
        assert "fell silent" in job.error

    def test_it_is_shown(self, system: Actor, rest: ApiClient) -> None:
        book_answers(make_pool(system), *range(1, 31))
        job_id = rest.send("POST", "/training-jobs", {}).json()["id"]
        assert jobs.run(job_id)
        shown = rest.send("GET", f"/training-jobs/{job_id}").json()
        assert (shown["state"], shown["dataset"]["n_rows"], shown["progress"]) == ("succeeded", 30, 1.0)
        assert shown["artifact"]["metrics"]["keys"] == 1


def start_worker(*, log: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "celery", "--app", "controlplane.celery", "worker", "--queues", "default,training"]
    options = ["--concurrency", "1", "--loglevel", "INFO", "--without-mingle", "--without-gossip"]
    return subprocess.Popen(
        command + options, env=database_environment(), stdout=log, stderr=log, start_new_session=True
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """The worker with its children, as a machine that goes away."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


@pytest.fixture
def worker_log(tmp_path: Any) -> Iterator[Any]:
    with (tmp_path / "worker.log").open("wb") as log:
        yield log


def test_a_job_outlives_the_worker_that_ran_it(committed_db: None, system: Actor, worker_log: Any) -> None:
    """The first worker is killed while its job waits for a lock; another takes over once the lease has lapsed."""
    book_answers(make_pool(system), *range(1, 41))
    worker = start_worker(log=worker_log)
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            # The job cannot read the books before this transaction ends, and will not have ended when it is killed.
            cursor.execute("LOCK TABLE usage_event IN ACCESS EXCLUSIVE MODE")
            job_id = elsewhere(lambda: start_job(actor=system).id)
            wait_for(
                lambda: elsewhere(lambda: Job.objects.get(pk=job_id).state) == JobState.RUNNING,
                limit_s=60,
                what="the job running",
            )
            kill(worker)
        job = Job.objects.get(pk=job_id)
        assert (job.state, job.attempts) == (JobState.RUNNING, 1)
        assert wake_lapsed_jobs() == []
        lapse(job)
        worker = start_worker(log=worker_log)
        assert wake_lapsed_jobs() == [job_id]
        wait_for(lambda: Job.objects.get(pk=job_id).state == JobState.SUCCEEDED, limit_s=60, what="the job's success")
    finally:
        kill(worker)
    assert Job.objects.get(pk=job_id).attempts == 2
    assert Artifact.objects.count() == 1
    assert not Pool.objects.filter(predictor_digest="").exists()


def elsewhere(task: Any) -> Any:
    """Run on a connection of its own, while this thread's is inside a transaction."""

    def run() -> Any:
        try:
            return task()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(30)


def test_without_a_broker_a_job_is_queued_all_the_same(running_site: Site) -> None:
    _, token = issue_token(actor=system_actor("test"), user=make_user(), name="t", scopes=["admin.write"])
    url = running_site(REDIS_URL="redis://127.0.0.1:1/0")
    request = urllib.request.Request(
        f"{url}/api/v1/training-jobs",
        data=b"{}",
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 201
    assert Job.objects.get().state == JobState.QUEUED
