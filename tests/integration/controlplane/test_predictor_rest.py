"""REST of the predictor: versions, promotions, accuracy, drift and samples; refusals name value and range."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from controlplane.common.actor import Actor
from controlplane.common.clock import to_us, utc_now
from controlplane.training.drift import watch
from controlplane.training.models import Artifact, Dataset, Job, Promotion
from controlplane.usage.ingest import decode_batch, ingest
from tests.support.control_plane import (
    ApiClient,
    make_evaluation,
    make_length_model,
    make_pool,
    predicted_event,
    roll_up,
    usage_body,
)

pytestmark = pytest.mark.django_db

NOW = utc_now()


def test_a_version_is_shown_with_its_data_and_its_verdicts(api: ApiClient, system: Actor) -> None:
    pool = make_pool(system)
    model = make_length_model("one", metrics={"epochs": 7})
    evaluation = make_evaluation(model, pool, is_passed=False, reason="worse")
    dataset = Dataset.objects.create(
        from_at=NOW - timedelta(days=1), to_at=NOW, n_rows=10, digest="d", counts={"train": 8, "heldout": 2}
    )
    Job.objects.filter(pk=evaluation.job_id).update(dataset=dataset)
    Artifact.objects.create(kind="baseline", digest="b", body=b"x", n_bytes=1)
    make_length_model("trimmed", body=None)
    shown = api.send("GET", f"/artifacts/{model.id}").json()
    assert (shown["kind"], shown["is_kept"], shown["metrics"]) == ("mixture", True, {"epochs": 7})
    assert shown["dataset"]["counts"] == {"train": 8, "heldout": 2}
    (verdict,) = shown["evaluations"]
    assert (verdict["pool"], verdict["is_passed"], verdict["reason"]) == (pool.id, False, "worse")
    assert verdict["contenders"]["candidate"]["pinball"] == 0.25
    listed = api.send("GET", "/artifacts?kind=mixture").json()["results"]
    assert [each["is_kept"] for each in listed] == [False, True]
    problem = api.send("GET", "/artifacts?kind=oracle")
    assert problem.status_code == 422
    assert problem.json()["errors"] == {"kind": ["one of baseline, mixture, not 'oracle'"]}


def test_promoting_by_rest_needs_a_reason_and_the_gate(api: ApiClient, system: Actor) -> None:
    pool = make_pool(system, aliases=["alias"])
    model = make_length_model("one")
    make_evaluation(model, pool, is_passed=False, reason="its rank 0.1 against 0.4")
    body = {"pool": "alias", "artifact": model.id, "reason": "trust me"}
    assert api.send("POST", "/promotions", {**body, "reason": ""}).status_code == 422
    assert api.send("POST", "/promotions", {**body, "artifact": "art_none"}).status_code == 404
    assert api.send("POST", "/promotions", {**body, "pool": "nowhere"}).status_code == 404
    refused = api.send("POST", "/promotions", body)
    assert refused.status_code == 409
    assert "its rank 0.1 against 0.4" in refused.json()["detail"]
    first = api.send("POST", "/promotions", {**body, "despite_gate": True}, idempotency_key="k1")
    again = api.send("POST", "/promotions", {**body, "despite_gate": True}, idempotency_key="k1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert (first.json()["is_forced"], first.json()["artifact"]) == (True, model.id)
    assert api.send("GET", f"/pools/{pool.id}").json()["length_model"]["digest"] == model.digest
    back = api.send("POST", "/promotions/roll-back", {"pool": pool.id, "reason": "no good"})
    assert (back.status_code, back.json()["artifact"]) == (201, None)
    assert api.send("GET", f"/pools/{pool.id}").json()["length_model"] is None
    assert api.send("POST", "/promotions/demote", {"pool": pool.id, "reason": "x"}).status_code == 409
    listed = api.send("GET", "/promotions?pool=alias").json()["results"]
    assert [each["action"] for each in listed] == ["rolled_back", "promoted"]
    assert api.send("GET", f"/promotions?pool={make_pool(system).id}").json()["results"] == []
    assert Promotion.objects.count() == 2


def test_accuracy_is_the_figures_of_the_books(api: ApiClient, system: Actor) -> None:
    pool = make_pool(system, aliases=["short"])
    at = NOW - timedelta(hours=3)
    events = [
        predicted_event(pool=pool.id, tenant=tenant, output_tokens=150, arrived_at_us=to_us(at) + i)
        for i, tenant in enumerate(("ten_a", "ten_a", "ten_b"))
    ]
    ingest(decode_batch(usage_body(*events)))
    roll_up()
    found = api.send("GET", "/predictor/accuracy?pool=short").json()
    assert found["as_of"] is not None
    served = found["total"]["served"]
    assert (served["n"], served["mae"], served["coverage_80"], served["n_model"]) == (3, 50, 1, 3)
    assert found["total"]["fallback"]["mae"] == 110
    assert [point["level"] for point in served["calibration"]] == [0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95]
    assert [point["observed"] for point in served["calibration"]] == [0, 0, 0, 0, 1, 1, 1]
    assert len(found["steps"]) == 1
    assert found["models"].keys() == {"d" * 64}
    one = api.send("GET", f"/predictor/accuracy?pool={pool.id}&tenant=ten_b").json()
    assert one["total"]["served"]["n"] == 1


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("", 422, "is needed"),
        ("?pool=nowhere", 404, "nowhere"),
        ("?pool=p&from=yesterday", 422, "an instant such as 2026-01-31T12:00:00Z, not 'yesterday'"),
        ("?pool=p&from=2026-13-01T00:00:00Z", 422, "an instant"),
        ("?pool=p&to=0001-01-01T00:00:00Z", 422, "a year from 2000 to 9000, not 1"),
        ("?pool=p&from=2026-05-01T00:00:00Z&to=2026-04-01T00:00:00Z", 422, "must be after from"),
        ("?pool=p&from=2025-01-01T00:00:00Z&to=2026-01-01T00:00:00Z", 422, "at most 92 days after from, not 365"),
    ],
)
def test_what_accuracy_cannot_show_is_refused(
    api: ApiClient, system: Actor, query: str, status: int, words: str
) -> None:
    make_pool(system, name="p")
    answer = api.send("GET", f"/predictor/accuracy{query}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert words in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"kind": "oracle"}, "kind", "oracle"),
        ({"kind": "baseline", "pools": ["p"]}, "kind", "for a mixture"),
        ({"kind": "mixture", "pools": ["p", "nowhere"]}, "pools", "no pool 'nowhere'"),
        ({"kind": "mixture", "from_at": "soon"}, "from_at", "format"),
        ({"kind": "mixture", "from_at": (NOW - timedelta(days=60)).isoformat()}, "from_at", "samples are kept 28 days"),
        (
            {"kind": "mixture", "from_at": NOW.isoformat(), "to_at": (NOW - timedelta(days=1)).isoformat()},
            "to_at",
            "must be after",
        ),
        ({"kind": "mixture", "speed": 3}, "speed", "unknown field"),
    ],
)
def test_a_job_that_cannot_be_is_refused_by_field(
    api: ApiClient, system: Actor, body: dict[str, Any], field: str, words: str
) -> None:
    make_pool(system, name="p")
    answer = api.send("POST", "/training-jobs", body)
    assert answer.status_code == 422, answer.content
    assert words in " ".join(answer.json()["errors"][field])
    assert not Job.objects.exists()


def test_a_job_says_what_it_was_asked_for(api: ApiClient, system: Actor) -> None:
    pool = make_pool(system, aliases=["a"])
    begin = NOW - timedelta(days=3)
    body = {"kind": "mixture", "pools": ["a", pool.id], "from_at": begin.isoformat()}
    shown = api.send("POST", "/training-jobs", body).json()
    assert (shown["kind"], shown["pools"], shown["trigger"], shown["to_at"]) == ("mixture", [pool.id], "request", None)
    assert api.send("POST", "/training-jobs", {"kind": "mixture"}).status_code == 409
    assert api.send("POST", "/training-jobs", {"kind": "baseline"}).status_code == 201


def test_samples_and_drift_by_pool(api: ApiClient, system: Actor) -> None:
    pool, other = make_pool(system), make_pool(system)
    events = [predicted_event(pool=pool.id) for _ in range(3)]
    events += [predicted_event(pool=pool.id, feature_version=99), predicted_event(pool=pool.id, features=b"")]
    ingest(decode_batch(usage_body(*events)))
    roll_up()
    found = api.send("GET", "/predictor/samples").json()
    assert found["as_of"] is not None
    counts = {each["pool"]: each for each in found["pools"]}
    assert counts[pool.id] == {"pool": pool.id, "usable": 3, "other_version": 1, "dropped": 1, "needed": 2_000}
    assert counts[other.id]["usable"] == 0
    assert api.send("GET", "/predictor/drift").json() == {"pools": []}
    watch()
    states = api.send("GET", "/predictor/drift").json()["pools"]
    assert {each["state"] for each in states} == {"no_model"}
