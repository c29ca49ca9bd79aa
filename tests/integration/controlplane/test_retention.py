"""Bytes of artifacts: what serves, or one click would bring back, stays; of the rest the newest few."""

from __future__ import annotations

import pytest

from controlplane.common.actor import Actor
from controlplane.common.errors import Conflict
from controlplane.training import retention
from controlplane.training.models import Artifact
from controlplane.training.promotion import promote, roll_back
from controlplane.training.queries import artifact_body
from controlplane.training.retention import trim_artifacts
from tests.support.control_plane import make_evaluation, make_length_model, make_pool

pytestmark = pytest.mark.django_db


def kept() -> set[str]:
    return {bytes(body).decode() for body in Artifact.objects.values_list("body", flat=True) if body is not None}


def test_the_newest_of_each_kind_and_what_is_in_use_stay(system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "KEPT_PER_KIND", 2)
    pool = make_pool(system)
    models = [make_length_model(f"m{n}") for n in range(6)]
    for n in range(4):
        make_length_model(f"b{n}", kind="baseline")
    for model in models[:3]:
        make_evaluation(model, pool)
        promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="better")
    assert trim_artifacts() == 4
    # m2 serves, m1 would come back.
    assert kept() == {"m1", "m2", "m4", "m5", "b2", "b3"}
    assert trim_artifacts() == 0
    assert artifact_body(models[0].digest) is None
    roll_back(actor=system, pool_id=pool.id)
    with pytest.raises(Conflict, match="deleted"):
        roll_back(actor=system, pool_id=pool.id)
    assert Artifact.objects.count() == 10


def test_all_together_stay_under_a_size(system: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_TOTAL_BYTES", 25)
    pool = make_pool(system)
    old = make_length_model("x" * 10)
    make_evaluation(old, pool)
    promote(actor=system, pool_id=pool.id, artifact_id=old.id, reason="better")
    for letter in "abc":
        make_length_model(letter * 10)
    trim_artifacts()
    assert kept() == {"x" * 10, "c" * 10}
