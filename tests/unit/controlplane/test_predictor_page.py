"""The page "Predictor": what it shows, what its buttons do, what it says where there is nothing."""

from __future__ import annotations

import html
import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.accounts.models import Role
from controlplane.common.actor import system_actor
from controlplane.common.clock import to_us, utc_now
from controlplane.common.leases import JobState
from controlplane.console import plots
from controlplane.console.charts import Bars, Plotted, stacked_bars
from controlplane.fleet.actions import create_pool
from controlplane.fleet.models import Pool
from controlplane.fleet.routers import create_router, take_heartbeat
from controlplane.training.actions import start_job
from controlplane.training.drift import watch
from controlplane.training.models import Artifact, Dataset, Job, Promotion
from controlplane.training.promotion import promote
from controlplane.usage.accuracy import WIDTHS
from controlplane.usage.ingest import decode_batch, ingest
from router_ext.wire.controlplane import Heartbeat, PoolState
from tests.support.control_plane import (
    make_evaluation,
    make_length_model,
    make_tenant,
    predicted_event,
    roll_up,
    signed_in,
    usage_body,
)

pytestmark = pytest.mark.django_db
SYSTEM = system_actor("test")


@pytest.fixture
def operator() -> Client:
    return signed_in(Role.OPERATOR)


@pytest.fixture
def pool() -> Pool:
    return create_pool(actor=SYSTEM, name="org/model")


@pytest.fixture
def version(pool: Pool) -> Artifact:
    """A judged version that passed, with its dataset."""
    model = make_length_model("one", metrics={"epochs": 7, "new_prompts": {"median_relative_error": 0.25}})
    job = make_evaluation(model, pool, reason="better than all others").job
    now = utc_now()
    counts = {"train": 1_600, "heldout": 400, "tenants": 3, "cap": 900, "capped": 12}
    job.dataset = Dataset.objects.create(
        from_at=now - timedelta(days=28), to_at=now, n_rows=2_000, digest="d", counts=counts,
        filters={"feature_version": 1, "pools": []},
    )  # fmt: skip
    job.save()
    return model


def shown(client: Client, query: str = "") -> str:
    """The page and what it loads at once."""
    answers = [client.get(reverse(name) + query) for name in ("console:predictor", "console:predictor_fragment")]
    assert {answer.status_code for answer in answers} == {200}
    return re.sub(r"\s+", " ", "".join(answer.content.decode() for answer in answers))


def press(client: Client, name: str, *words: str, **fields: str) -> str:
    """The page after pressing a button."""
    answer = client.post(reverse(f"console:predictor_{name}", args=words), fields, follow=True)
    assert answer.status_code == 200
    return re.sub(r"\s+", " ", answer.content.decode())


def test_without_a_pool_it_says_what_to_do(operator: Client) -> None:
    assert reverse("console:pool_new") in shown(operator)


def test_without_anything_it_says_what_is_missing(operator: Client, pool: Pool) -> None:
    ingest(decode_batch(usage_body(*(predicted_event(pool=pool.id) for _ in range(3)))))
    roll_up()
    page = shown(operator)
    assert "3 of 2,000 samples as of " in page
    assert "Answers booked until <time datetime=" in page
    assert "No version yet" in page
    assert "the empirical quantiles serve" in page
    assert "Nothing to judge yet" in shown(operator, "?days=1&tenant=" + make_tenant(SYSTEM).id)


def test_accuracy_is_drawn_with_its_numbers_beside(operator: Client, pool: Pool) -> None:
    tenant = make_tenant(SYSTEM)
    at = utc_now() - timedelta(hours=5)
    events = [
        predicted_event(pool=pool.id, tenant=each, output_tokens=150, arrived_at_us=to_us(at + timedelta(hours=i)))
        for i in range(4)
        for each in (tenant.id, "ten_other")
    ]
    ingest(decode_batch(usage_body(*events)))
    roll_up()
    page = shown(operator)
    assert page.count('<svg class="chart"') == 6
    assert page.count('role="img" aria-label="') == 6
    assert '<div class="tile"><b>8</b><span>answers judged' in page
    assert "Mean absolute error in tokens; latest: what was served 50, empirical quantiles 110" in page
    assert "observed 0% at 5%" in page
    one = shown(operator, f"?pool={pool.id}&tenant={tenant.id}&days=1")
    assert '<div class="tile"><b>4</b>' in one
    assert f'<option value="{tenant.id}" selected>' in one


def test_a_version_is_promoted_rolled_back_and_taken_out(operator: Client, pool: Pool, version: Artifact) -> None:
    page = shown(operator)
    assert "1,600 answers, 400 held out, 3 tenants, at most 900 of one (12 left out)" in page
    assert "better than all others" in page
    assert '<td>new prompts: median relative error</td><td class="num">0.25</td>' in page
    assert "Roll back" not in page
    page = press(operator, "promote", pool=pool.id, artifact=version.id, reason="I looked at it")
    assert '<span class="badge good">serves</span>' in page
    assert "I looked at it" in page
    assert "operator@example.org" in page
    assert version.digest[:12] in operator.get(reverse("console:pools")).content.decode()
    page = press(operator, "roll_back", pool=pool.id)
    assert "no trained model serves now" in page
    press(operator, "promote", pool=pool.id, artifact=version.id, reason="again")
    page = press(operator, "demote", pool=pool.id)
    assert "Taken out" in page
    assert [p.action for p in Promotion.objects.order_by("id")] == ["promoted", "rolled_back", "promoted", "demoted"]
    pool.refresh_from_db()
    assert pool.length_model_digest == ""


def test_one_that_did_not_pass_is_warned_of_and_needs_the_box(operator: Client, pool: Pool) -> None:
    model = make_length_model("bad")
    make_evaluation(model, pool, is_passed=False, reason="worse: its rank 0.1 against 0.4 of the pool's median")
    page = shown(operator)
    assert "its rank 0.1 against 0.4" in page
    assert "It did not pass the gate" in page
    fields = {"pool": pool.id, "artifact": model.id, "reason": "trust me"}
    assert "did not pass the gate for pool org/model: worse: its rank 0.1" in press(operator, "promote", **fields)
    assert not Promotion.objects.exists()
    assert "despite the gate" in press(operator, "promote", **fields, despite_gate="on")


def test_a_viewer_sees_it_all_and_changes_nothing(pool: Pool, version: Artifact) -> None:
    viewer = signed_in(Role.VIEWER)
    job = start_job(actor=SYSTEM)
    assert version.digest[:12] in shown(viewer)
    for name, words, fields in (
        ("start", (), {}),
        ("cancel", (job.id,), {}),
        ("promote", (), {"artifact": version.id, "reason": "x"}),
        ("roll_back", (), {}),
        ("demote", (), {}),
    ):
        answer = viewer.post(reverse(f"console:predictor_{name}", args=words), {"pool": pool.id, **fields})
        assert answer.status_code == 403
        assert "lacks the scope" in answer.content.decode()
    assert (Job.objects.exclude(kind="mixture").count(), Promotion.objects.count()) == (1, 0)
    assert Job.objects.get(pk=job.id).state == JobState.QUEUED


def test_a_job_is_started_watched_and_cancelled(operator: Client, pool: Pool) -> None:
    assert "queued" in press(operator, "start", pool=pool.id, kind="mixture", only=pool.id)
    job = Job.objects.get()
    assert (job.kind, job.pools) == ("mixture", [pool.id])
    assert "already queued or running" in press(operator, "start", pool=pool.id)
    Job.objects.update(progress=0.4, log="12:00:01 epoch 3: loss 0.3\n")
    fragment = operator.get(reverse("console:predictor_fragment")).content.decode()
    assert 'value="0.4"' in fragment
    assert "epoch 3: loss 0.3" in fragment
    assert "cancelled" in press(operator, "cancel", job.id, pool=pool.id)
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED


def test_why_a_job_failed_or_was_not_promoted_stands_there(operator: Client, pool: Pool) -> None:
    Job.objects.create(kind="mixture", state="failed", requested_by="x", error="only 42 samples; at least 2,000")
    make_evaluation(make_length_model("m"), pool, is_passed=False, reason="worse: its pinball loss")
    page = shown(operator)
    assert "only 42 samples; at least 2,000" in page
    assert "worse: its pinball loss" in page


def test_routers_say_what_they_run_and_refuse(operator: Client, pool: Pool) -> None:
    router, _ = create_router(actor=SYSTEM, name="r")
    state = PoolState(
        pool=pool.id, policy="vtc", length_model_digest="ab" * 32, length_model_refused="damaged file",
        predictions_total={"model": 1_234}, prediction_fallbacks_total={"late": 5},
    )  # fmt: skip
    beat = Heartbeat(
        router="r-1", version="1", address="a:1", applied_revision=1, applied_at_us=to_us(utc_now()), pools=[state]
    )
    take_heartbeat(router=router, heartbeat=beat)
    page = shown(operator)
    for words in ("r-1", "abababababab", "refused: damaged file", "model 1,234", "fell back: late 5"):
        assert words in page


def test_drift_is_shown_by_pool(operator: Client, pool: Pool, version: Artifact) -> None:
    assert "not looked at yet" in shown(operator)
    promote(actor=SYSTEM, pool_id=pool.id, artifact_id=version.id, reason="better")
    watch()
    page = shown(operator)
    assert "Too Few" in page
    assert "0 of 1,000 answers" in page


def test_more_to_show_takes_no_more_queries(operator: Client, pool: Pool, version: Artifact) -> None:
    def n_queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            shown(operator, f"?pool={pool.id}")
        return len(captured)

    def add(n: int) -> None:
        other = create_pool(actor=SYSTEM, name=f"pool {n}")
        model = make_length_model(f"model {n}")
        for each in (pool, other):
            make_evaluation(model, each)
            promote(actor=SYSTEM, pool_id=each.id, artifact_id=model.id, reason="better")
        ingest(decode_batch(usage_body(predicted_event(pool=pool.id))))
        roll_up()
        watch()

    add(1)
    few = n_queries()
    for n in range(2, 5):
        add(n)
    assert n_queries() <= few


class TestPlots:
    TIMES = tuple(datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in range(4))

    def test_a_gap_breaks_a_line_and_says_so_in_the_table(self) -> None:
        drawn = plots.over_time(
            title="T & U", times=self.TIMES, series=[("a", [1.0, 2.0, None, 4.0])], shown=lambda v: f"{v:.0f}"
        )
        assert drawn.count("<polyline") == 1
        assert drawn.count("<circle") == 3
        assert "<td>–</td>" in drawn
        assert "T &amp; U; latest: a 4" in drawn

    def test_what_is_plotted_has_gaps_and_names_that_stay_text(self) -> None:
        odd = "\"'><script>x</script>"
        drawn = plots.over_time(
            title="T", times=self.TIMES, series=[(odd, [1.0, None, 0.0, 4.0])], shown=str, rules=[(2.0, "target")],
            plotted=Plotted(key="k", unit="s"),
        )  # fmt: skip
        found = re.search(r'id="plot-k" data-plot="([^"]*)"', drawn)
        assert found is not None
        assert json.loads(html.unescape(found[1])) == {
            "kind": "lines", "zone": "UTC", "unit": "s", "rules": [[2.0, "target"]],
            "times": [1_767_225_600.0 + 3_600 * hour for hour in range(4)],
            "series": [{"name": odd, "values": [1.0, None, 0.0, 4.0]}],
        }  # fmt: skip
        assert "<script" not in drawn

    def test_bars_of_the_future_are_not_known(self) -> None:
        bars = Bars(plotted=Plotted(key="k"), times=self.TIMES[:3], stamps=["a", "b", "c"], n_begun=2)
        drawn = stacked_bars(title="T", days=["a", "b", "c"], series=[("x", [1.0, 0.0, 0.0])], bars=bars)
        assert "[1.0,0.0,null]" in drawn
        assert "<td>b</td><td>0</td></tr><tr><td>c</td><td>–</td>" in drawn

    def test_points_lie_where_their_numbers_say(self) -> None:
        drawn = plots.calibration(title="T", points=[(0.5, 0.5), (0.9, 0.45)])
        dots = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)
        (x1, y1), (x2, y2) = ((float(x), float(y)) for x, y in dots)
        # On the diagonal of the plot's own axes, and half as high above the floor at 0.45 as at 0.9.
        assert (x1, y1) == (52 + 0.5 * 254, 270 - 0.5 * 258)
        assert (x2, y2) == pytest.approx((52 + 0.9 * 254, 270 - 0.45 * 258), abs=0.06)

    def test_bars_show_observed_over_expected(self) -> None:
        shares = [0.1, *WIDTHS[1:]]
        labels = [str(i) for i in range(8)]
        drawn = plots.against_expected(title="T", labels=labels, edges=labels[1:], shares=shares, expected=WIDTHS)
        heights = [float(h) for h in re.findall(r'height="([\d.]+)"', drawn)]
        assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
        assert "furthest from expected: 0 10.0% instead of 5%" in drawn

    def test_one_moment_alone_is_in_the_middle(self) -> None:
        drawn = plots.over_time(title="T", times=self.TIMES[:1], series=[("a", [3.0])], shown=str)
        assert 'cx="339.0"' in drawn

    @pytest.mark.parametrize(("value", "top"), [(0.03, 0.04), (1, 1), (1.1, 2), (49, 50), (50.1, 80), (900, 1_000)])
    def test_axes_end_at_round_numbers(self, value: float, top: float) -> None:
        assert plots.round_up(value) == pytest.approx(top)
