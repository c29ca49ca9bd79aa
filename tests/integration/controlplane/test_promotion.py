"""Which trained model serves a pool: promoted, rolled back, demoted; routers are told, everybody can read why."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.common.errors import Conflict, Invalid
from controlplane.fleet.models import Pool
from controlplane.rollout.queries import current_body, current_number
from controlplane.training.models import Promotion
from controlplane.training.promotion import current_promotion, demote, promote, roll_back
from router_ext.wire.controlplane import ArtifactRecord, ConfigSnapshot
from tests.support.control_plane import make_evaluation, make_length_model, make_pool

pytestmark = pytest.mark.django_db


def served(pool: Pool) -> ArtifactRecord | None:
    snapshot = msgspec.json.decode(current_body()[2], type=ConfigSnapshot)
    return next(each.length_model for each in snapshot.pools if each.pool == pool.id)


def test_a_promoted_model_is_in_the_next_revision_of_its_pool_alone(system: Actor) -> None:
    pool, other = make_pool(system), make_pool(system)
    model = make_length_model("one")
    make_evaluation(model, pool)
    number = current_number()
    promotion = promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="it is better")
    assert current_number() == number + 1
    assert served(pool) == ArtifactRecord(artifact=model.id, digest=model.digest, kind="mixture")
    assert served(other) is None
    assert (promotion.promoted_by, promotion.reason, promotion.pinball) == ("test", "it is better", 0.25)
    assert (promotion.is_forced, promotion.restores) == (False, None)
    entry = AuditEntry.objects.latest("id")
    assert (entry.action, entry.object_id) == ("pool.length_model_promoted", pool.id)
    assert entry.after["reason"] == "it is better"
    assert entry.after["length_model_digest"] == model.digest


def test_rolling_back_goes_back_step_by_step_to_none(system: Actor) -> None:
    pool = make_pool(system)
    models = [make_length_model(word) for word in ("one", "two", "three")]
    for model in models:
        make_evaluation(model, pool)
        promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="better")
    for expected in (models[1], models[0], None):
        roll_back(actor=system, pool_id=pool.id, reason="worse than thought")
        record = served(pool)
        assert (record.artifact if record else None) == (expected.id if expected else None)
        current = current_promotion(pool.id)
        assert current is not None
        assert current.action == "rolled_back"
    with pytest.raises(Conflict, match="nothing to roll back to"):
        roll_back(actor=system, pool_id=pool.id)
    assert Promotion.objects.count() == 6


def test_what_was_demoted_comes_back_by_rolling_back(system: Actor) -> None:
    pool = make_pool(system)
    model = make_length_model("one")
    make_evaluation(model, pool)
    promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="better")
    demote(actor=system, pool_id=pool.id, reason="holidays")
    assert served(pool) is None
    with pytest.raises(Conflict, match="no trained model"):
        demote(actor=system, pool_id=pool.id, reason="again")
    restored = roll_back(actor=system, pool_id=pool.id)
    assert served(pool) is not None
    assert restored.pinball == 0.25


@pytest.mark.parametrize("is_judged", [True, False])
def test_what_did_not_pass_needs_somebody_who_insists(system: Actor, is_judged: bool) -> None:
    pool = make_pool(system)
    model = make_length_model("one")
    if is_judged:
        make_evaluation(model, pool, is_passed=False, reason="pinball 0.31 is worse than 0.30 of fallback")
    with pytest.raises(Conflict, match=r"pinball 0\.31" if is_judged else "never evaluated"):
        promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="I like it")
    assert not Promotion.objects.exists()
    promotion = promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="I like it", despite_gate=True)
    assert promotion.is_forced
    assert served(pool) is not None


def test_what_cannot_serve_is_refused(system: Actor) -> None:
    pool = make_pool(system)
    model, baseline, trimmed = (
        make_length_model("one"),
        make_length_model("two", kind="baseline"),
        make_length_model("three", body=None),
    )
    for each in (model, trimmed):
        make_evaluation(each, pool)
    with pytest.raises(Conflict, match="baseline"):
        promote(actor=system, pool_id=pool.id, artifact_id=baseline.id, reason="x")
    with pytest.raises(Conflict, match="deleted"):
        promote(actor=system, pool_id=pool.id, artifact_id=trimmed.id, reason="x")
    with pytest.raises(Invalid, match="must not be empty"):
        promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason=" \n ")
    promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="x")
    with pytest.raises(Conflict, match="already serves"):
        promote(actor=system, pool_id=pool.id, artifact_id=model.id, reason="x")
    assert Promotion.objects.count() == 1
