"""Every task of the schedule leaves a row; one worker at a time, whatever dies; people see, start and stop them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from celery.schedules import crontab
from django.db import connection, transaction
from django.test import Client
from django.urls import reverse

from controlplane.accounts.models import Role
from controlplane.audit.models import AuditEntry
from controlplane.common import background
from controlplane.common.actor import Actor
from controlplane.common.background import kinds, run, wake_lapsed
from controlplane.common.clock import utc_now
from controlplane.common.keeper import Report
from controlplane.common.leases import MAX_ATTEMPTS, JobState, LeaseLost, NotPossible, heartbeat
from controlplane.common.models import BackgroundJob
from controlplane.jobs.actions import cancel_job, start_job
from controlplane.jobs.queries import job, jobs, plan
from controlplane.jobs.schedule import _timing
from controlplane.training.actions import start_job as start_training
from controlplane.usage.models import Reconciliation
from tests.support.control_plane import (
    ApiClient,
    book,
    database_environment,
    make_user,
    roll_up,
    usage_event,
    wait_for,
)

KIND = "usage-reconcile-books"
"""One that reports its progress, day by day."""


def lapse(row: BackgroundJob) -> None:
    BackgroundJob.objects.filter(pk=row.id).update(lease_until=utc_now() - timedelta(seconds=1))


def kind_with(body: Callable[[Report], str | None], **changes: Any) -> background.Kind:
    """The kind ``KIND`` with another body."""
    given = kinds()[KIND]
    fields = {name: getattr(given, name) for name in ("name", "what", "task", "reports", "queue")}
    return background.Kind(**{**fields, "body": body, **changes})


def test_every_task_of_the_schedule_leaves_a_row_that_says_what_came_of_it(committed_db: None) -> None:
    from controlplane.celery import app

    known = kinds()
    assert {entry["task"] for entry in app.conf.beat_schedule.values()} == {kind.task for kind in known.values()}
    assert {name: entry["task"] for name, entry in app.conf.beat_schedule.items()} == {
        name: kind.task for name, kind in known.items()
    }
    assert all(kind.what.endswith(".") for kind in known.values())
    for kind in known.values():
        app.tasks[kind.task].apply(throw=True)
    rows = {row.kind: row for row in BackgroundJob.objects.all()}
    assert rows.keys() == known.keys()
    for row in rows.values():
        assert (row.state, row.attempts, row.progress, row.lease) == (JobState.SUCCEEDED, 1, 1.0, "")
        assert row.outcome
        assert row.started_at is not None
        assert row.finished_at is not None


def test_a_running_one_stops_at_its_next_report(committed_db: None, system: Actor) -> None:
    days: list[float] = []

    def body(report: Report) -> str:
        report(0.25, "two days")
        row = BackgroundJob.objects.get()
        cancel_job(actor=system, job_id=row.id)
        with pytest.raises(LeaseLost):
            heartbeat(BackgroundJob.objects.all(), row.id, row.lease, progress=0.5)
        keeper_noticed = wait_for(lambda: has_raised(report), limit_s=10, what="the keeper noticing")
        days.append(1.0 if keeper_noticed else 0.0)
        raise LeaseLost(row.id)

    assert run(kind_with(body)) is False
    row = BackgroundJob.objects.get()
    assert (row.state, row.outcome, days) == (JobState.CANCELLED, "", [1.0])


@pytest.mark.django_db
class TestRun:
    def test_while_one_runs_another_message_does_nothing(self) -> None:
        seen = []

        def body(report: Report) -> str:
            seen.append(BackgroundJob.objects.get().state)
            assert run(kind_with(lambda report: "twice")) is False
            return "once"

        assert run(kind_with(body)) is True
        assert (seen, BackgroundJob.objects.get().outcome) == ([JobState.RUNNING], "once")

    def test_a_lapsed_one_is_taken_over_and_its_first_worker_can_write_nothing(self) -> None:
        def body(report: Report) -> str:
            lapse(BackgroundJob.objects.get())
            assert run(kind_with(lambda report: "by the second")) is True
            return "by the first"

        assert run(kind_with(body)) is False
        row = BackgroundJob.objects.get()
        assert (row.state, row.outcome, row.attempts) == (JobState.SUCCEEDED, "by the second", 2)

    def test_a_mistake_is_kept_and_raised_and_what_cannot_be_done_is_only_kept(self) -> None:
        def mistaken(report: Report) -> str:
            raise ValueError("no good")

        def impossible(report: Report) -> str:
            raise NotPossible("there is nothing to compare")

        with pytest.raises(ValueError, match="no good"):
            run(kind_with(mistaken))
        assert run(kind_with(impossible)) is False
        found = list(BackgroundJob.objects.order_by("id").values_list("state", "error"))
        assert found == [("failed", "ValueError: no good"), ("failed", "there is nothing to compare")]

    def test_one_whose_workers_fall_silent_again_and_again_is_given_up_and_the_next_is_a_new_one(self) -> None:
        row = BackgroundJob.objects.create(kind=KIND, queue="default", requested_by="test")
        for attempt in range(1, MAX_ATTEMPTS + 1):
            assert wake_lapsed() == [row.id]
            lost = background._taken(kinds()[KIND])
            assert lost is not None
            assert (lost.id, lost.attempts) == (row.id, attempt)
            assert wake_lapsed() == []
            lapse(lost)
        assert run(kind_with(lambda report: "at last")) is True
        states = list(BackgroundJob.objects.order_by("id").values_list("state", "error", "outcome"))
        assert states == [("failed", "its worker fell silent 3 times", ""), ("succeeded", "", "at last")]

    def test_the_waker_gives_up_as_well_and_closes_what_nobody_knows(self) -> None:
        tired = BackgroundJob.objects.create(kind=KIND, queue="default", requested_by="test")
        for _ in range(MAX_ATTEMPTS):
            taken = background._taken(kinds()[KIND])
            assert taken is not None
            lapse(taken)
        gone = BackgroundJob.objects.create(kind="of-an-older-version", queue="default", requested_by="test")
        assert wake_lapsed() == []
        for row, error in ((tired, "its worker fell silent 3 times"), (gone, "no job of this kind any more")):
            row.refresh_from_db()
            assert (row.state, row.error) == (JobState.FAILED, error)

    def test_rows_are_kept_by_number_and_failures_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(background, "KEPT", 3)
        monkeypatch.setattr(background, "KEPT_FAILED", 2)

        def impossible(report: Report) -> str:
            raise NotPossible("no")

        for _ in range(4):
            run(kind_with(impossible))
        for n in range(5):
            run(kind_with(lambda report, n=n: f"{n}"))  # type: ignore[misc]  # a default argument
        other = run(kinds()["common-forget-idempotency"])
        assert other
        rows = BackgroundJob.objects.filter(kind=KIND)
        assert rows.filter(state=JobState.FAILED).count() == 2
        assert list(rows.filter(state="succeeded").order_by("id").values_list("outcome", flat=True)) == ["2", "3", "4"]


def take_messages(queue: str = "default") -> int:
    """Run what the broker holds, as a worker would; returns how many messages there were."""
    from controlplane.celery import app

    n_taken = 0
    with app.connection_for_read() as broker, broker.SimpleQueue(queue) as messages:
        while True:
            try:
                message = messages.get_nowait()
            except messages.Empty:
                return n_taken
            message.ack()
            args, kwargs, _ = message.payload
            app.tasks[message.headers["task"]].apply(args, kwargs, throw=True)
            n_taken += 1


def test_a_job_that_is_called_for_twice_runs_once_and_the_schedule_makes_another(
    committed_db: None, system: Actor
) -> None:
    from controlplane.celery import app

    row = start_job(actor=system, kind="usage-close-statements")
    assert wake_lapsed() == [row.id]
    assert take_messages() == 2
    (done,) = BackgroundJob.objects.all()
    assert (done.id, done.state, done.trigger, done.attempts) == (row.id, "succeeded", "request", 1)
    app.tasks[kinds()["usage-close-statements"].task].apply(throw=True)
    assert [each.trigger for each in BackgroundJob.objects.order_by("id")] == ["request", "schedule"]


@pytest.mark.django_db
class TestStopping:
    def test_a_queued_one_that_was_cancelled_never_runs(self, system: Actor) -> None:
        row = start_job(actor=system, kind=KIND)
        cancel_job(actor=system, job_id=row.id)
        assert wake_lapsed() == []
        assert BackgroundJob.objects.get().state == JobState.CANCELLED

    def test_one_that_cannot_be_stopped_says_so(self, system: Actor, api: ApiClient) -> None:
        def body(report: Report) -> str:
            row = BackgroundJob.objects.get()
            assert not job(actor=system, job_id=row.id).can_be_cancelled
            answer = api.send("POST", f"/jobs/{row.id}/cancel")
            return f"{answer.status_code}"

        assert run(kind_with(body, reports=False, name="common-forget-idempotency"))
        assert BackgroundJob.objects.get().outcome == "409"


def has_raised(report: Report) -> bool:
    try:
        report(0.5)
    except LeaseLost:
        return True
    return False


@pytest.mark.django_db
class TestRest:
    def test_both_tables_are_one_list_in_pages(self, api: ApiClient, system: Actor) -> None:
        expected = []
        for n in range(4):
            run(kind_with(lambda report, n=n: f"{n}"))  # type: ignore[misc]  # a default argument
            expected.append(BackgroundJob.objects.latest("id").id)
            if n == 1:
                expected.append(start_training(actor=system).id)
        found, cursor = [], ""
        while True:
            page = api.send("GET", f"/jobs?limit=2{cursor}").json()
            found += [each["id"] for each in page["results"]]
            assert len(page["results"]) <= 2
            if page["next"] is None:
                break
            cursor = f"&cursor={page['next']}"
        assert found == expected[::-1]
        queued = api.send("GET", "/jobs?state=queued").json()["results"]
        assert [(each["id"], each["kind"], each["queue"]) for each in queued] == [(expected[2], "baseline", "training")]
        assert len(api.send("GET", f"/jobs?kind={KIND}").json()["results"]) == 4

    @pytest.mark.parametrize("query", ["state=late", "kind=none", "cursor=%21", "limit=0"])
    def test_a_filter_it_does_not_know_is_refused(self, api: ApiClient, query: str) -> None:
        assert api.send("GET", f"/jobs?{query}").status_code == 422

    def test_a_job_whose_worker_fell_silent_is_lapsed(self, api: ApiClient) -> None:
        row = background._taken(kinds()[KIND])
        assert row is not None
        assert [each["state"] for each in api.send("GET", "/jobs?state=running").json()["results"]] == ["running"]
        lapse(row)
        assert api.send("GET", "/jobs?state=running").json()["results"] == []
        (shown,) = api.send("GET", "/jobs?state=lapsed").json()["results"]
        assert (shown["id"], shown["state"]) == (row.id, "lapsed")
        assert api.send("GET", f"/jobs/{row.id}").json()["state"] == "lapsed"

    def test_one_is_queued_once_run_and_its_failure_tried_again(self, api: ApiClient) -> None:
        answer = api.send("POST", "/jobs", {"kind": KIND}, idempotency_key="a")
        assert answer.status_code == 201
        assert api.send("POST", "/jobs", {"kind": KIND}, idempotency_key="a").json() == answer.json()
        assert api.send("POST", "/jobs", {"kind": KIND}).status_code == 409
        assert api.send("POST", "/jobs", {"kind": "none"}).status_code == 422

        def impossible(report: Report) -> str:
            raise NotPossible("no")

        assert run(kind_with(impossible)) is False
        (row,) = BackgroundJob.objects.all()
        assert (row.id, row.state, row.trigger) == (answer.json()["id"], "failed", "request")
        again = api.send("POST", f"/jobs/{row.id}/retry")
        assert (again.status_code, again.json()["state"]) == (201, "queued")
        assert api.send("POST", f"/jobs/{again.json()['id']}/retry").status_code == 409
        assert run(kinds()[KIND])
        assert api.send("GET", f"/jobs/{again.json()['id']}").json()["outcome"].endswith("rollups and events agree")
        assert AuditEntry.objects.filter(action="job.queued").count() == 2

    def test_a_training_run_is_cancelled_and_tried_again_here_as_well(self, api: ApiClient, system: Actor) -> None:
        row = start_training(actor=system)
        assert api.send("POST", f"/jobs/{row.id}/cancel").json()["state"] == "cancelled"
        again = api.send("POST", f"/jobs/{row.id}/retry").json()
        assert (again["kind"], again["state"]) == ("baseline", "queued")
        assert api.send("GET", f"/training-jobs/{again['id']}").json()["state"] == "queued"

    def test_the_schedule_says_when_each_comes_next_and_how_it_went_last(self, api: ApiClient, system: Actor) -> None:
        before = utc_now()
        assert run(kinds()["rollout-trim-revisions"])
        rows = {each["kind"]: each for each in api.send("GET", "/jobs/schedule").json()["results"]}
        assert rows.keys() == kinds().keys()
        nightly = rows[KIND]
        assert (nightly["schedule"], nightly["last"]) == ("every day at 01:41 UTC", None)
        assert nightly["next_at"][11:16] == "01:41"
        hourly = rows["rollout-trim-revisions"]
        assert (hourly["schedule"], hourly["last"]["state"]) == ("every hour", "succeeded")
        (planned,) = (each for each in plan(actor=system) if each.kind == "rollout-trim-revisions")
        assert planned.next_at is not None
        assert timedelta(minutes=59) < planned.next_at - before <= timedelta(minutes=61)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (15.0, "every 15 seconds"), (60.0, "every minute"), (3_600.0, "every hour"), (300.0, "every 5 minutes"),
        (crontab(hour=3, minute=7), "every day at 03:07 UTC"), (crontab(minute=11), "every hour at minute 11"),
    ],
)  # fmt: skip
def test_a_schedule_is_told_in_words(schedule: Any, text: str) -> None:
    assert _timing(schedule).text == text


@pytest.mark.django_db
class TestPage:
    @pytest.fixture
    def client(self) -> Client:
        client = Client()
        client.force_login(make_user())
        return client

    def test_it_shows_what_failed_what_comes_and_what_a_job_said(self, client: Client) -> None:
        def told(report: Report) -> str:
            report(0.5, "half <b>of</b> it")
            raise NotPossible("the disk is full")

        run(kind_with(told))
        page = client.get(reverse("console:jobs")).content.decode()
        assert "the disk is full" in page
        assert f"kinds whose newest run failed: {KIND}" in page
        assert "every day at 01:41 UTC" in page
        row = BackgroundJob.objects.get()
        shown = client.get(reverse("console:job", args=[row.id])).content.decode()
        assert "half &lt;b&gt;of&lt;/b&gt; it" in shown
        assert "Try again" in shown
        assert "hx-get" not in shown  # it has ended
        assert client.get(reverse("console:jobs"), {"state": "succeeded"}).context["jobs"] == []
        assert client.get(reverse("console:jobs"), {"state": "odd"}).status_code == 422

    def test_pages_lead_to_every_job(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("controlplane.console.views.jobs.PAGE", 3)
        for n in range(7):
            run(kind_with(lambda report, n=n: f"{n}"))  # type: ignore[misc]  # a default argument
        seen, before = [], None
        for _ in range(3):
            context = client.get(reverse("console:jobs"), {"before": before} if before else {}).context
            seen += [each.outcome for each in context["jobs"]]
            before = context["next"]
        assert (seen, before) == (["6", "5", "4", "3", "2", "1", "0"], None)

    def test_a_difference_of_the_books_is_shown(self, client: Client) -> None:
        yesterday = utc_now() - timedelta(days=1, hours=1)
        book(usage_event(arrived_at_us=int(yesterday.timestamp() * 1e6), output_tokens=77))
        roll_up()
        assert run(kinds()[KIND])
        assert "rollups and events agree" in client.get(reverse("console:jobs")).content.decode()
        with connection.cursor() as cursor:
            cursor.execute("UPDATE usage_quarter SET output_tokens = output_tokens + 5")
        assert run(kinds()[KIND])
        assert Reconciliation.objects.latest("id").n_different == 1
        page = client.get(reverse("console:jobs")).content.decode()
        assert page.count("1 difference between rollups and events") == 3  # the panel, the run, the schedule
        assert ">82<" in page
        assert ">77<" in page

    def test_who_may_only_read_has_no_buttons(self, client: Client) -> None:
        row = start_job(actor=make_user().actor, kind=KIND)
        viewer = Client()
        viewer.force_login(make_user(role=Role.VIEWER))
        for address in (reverse("console:jobs"), reverse("console:job", args=[row.id])):
            assert 'method="post" action="/jobs/' in client.get(address).content.decode()
            assert 'method="post" action="/jobs/' not in viewer.get(address).content.decode()

    def test_a_button_queues_cancels_and_tries_again(self, client: Client) -> None:
        client.post(reverse("console:job_start"), {"kind": KIND})
        row = BackgroundJob.objects.get()
        client.post(reverse("console:job_cancel", args=[row.id]))
        answer = client.post(reverse("console:job_retry", args=[row.id]))
        newest = BackgroundJob.objects.latest("id")
        assert answer.headers["location"] == reverse("console:job", args=[newest.id])
        assert (newest.state, newest.id != row.id) == (JobState.QUEUED, True)


def start_worker(log: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "celery", "--app", "controlplane.celery", "worker", "--queues", "default"]
    options = ["--concurrency", "1", "--loglevel", "INFO", "--without-mingle", "--without-gossip"]
    return subprocess.Popen(
        command + options, env=database_environment(), stdout=log, stderr=log, start_new_session=True
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def elsewhere(task: Callable[[], Any]) -> Any:
    """Run on a connection of its own, while this thread's is inside a transaction."""

    def task_alone() -> Any:
        try:
            return task()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task_alone).result(30)


@pytest.mark.slow  # two real workers, some 15 s of starting
def test_a_job_of_the_schedule_outlives_the_worker_that_ran_it(
    committed_db: None, system: Actor, tmp_path: Any
) -> None:
    """The first worker is killed while its job waits for a lock; another takes over once the lease has lapsed."""
    book(usage_event(arrived_at_us=int((utc_now() - timedelta(days=1, hours=1)).timestamp() * 1e6)))
    roll_up()
    with (tmp_path / "worker.log").open("wb") as log:
        worker = start_worker(log)
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("LOCK TABLE usage_event IN ACCESS EXCLUSIVE MODE")
                row = elsewhere(lambda: start_job(actor=system, kind=KIND))
                wait_for(
                    lambda: elsewhere(lambda: BackgroundJob.objects.get(pk=row.id).state) == JobState.RUNNING,
                    limit_s=60,
                    what="the job running",
                )
                kill(worker)
            assert job(actor=system, job_id=row.id).state == "running"
            assert wake_lapsed() == []
            lapse(row)
            (shown,) = jobs(actor=system, state="lapsed")
            assert (shown.row.id, shown.row.attempts) == (row.id, 1)
            worker = start_worker(log)
            assert wake_lapsed() == [row.id]
            wait_for(
                lambda: BackgroundJob.objects.get(pk=row.id).state == JobState.SUCCEEDED,
                limit_s=60,
                what="the job's success",
            )
        finally:
            kill(worker)
    assert BackgroundJob.objects.get(pk=row.id).attempts == 2
    assert Reconciliation.objects.get().n_events == 1
