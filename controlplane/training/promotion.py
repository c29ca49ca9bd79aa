"""Use cases that decide which trained model serves a pool: promote, roll back, demote.

Each is one appended ``Promotion``, one audit entry and one revision; routers have it within two seconds. Which one is
active is decided under the lock of the pool's row, so that two people cannot both replace the same one.
"""

from __future__ import annotations

from controlplane.common.actor import Actor
from controlplane.common.errors import Conflict
from controlplane.common.use_case import use_case
from controlplane.common.validation import checked_reason, get_or_not_found
from controlplane.fleet.actions import set_pool_length_model
from controlplane.fleet.models import Pool
from controlplane.training.models import Artifact, Evaluation, JobKind, Promotion, PromotionAction


def current_promotion(pool_id: str) -> Promotion | None:
    """The newest change of a pool's trained model, None before the first."""
    rows = Promotion.objects.filter(pool=pool_id).select_related("artifact", "restores").defer("artifact__body")
    return rows.order_by("-created_at", "-id").first()


@use_case()
def promote(*, actor: Actor, pool_id: str, artifact_id: str, reason: str, despite_gate: bool = False) -> Promotion:
    """Let a trained model serve a pool.

    Args:
        reason: why, in the actor's words; kept and shown.
        despite_gate: promote it although its newest evaluation for this pool did not pass, or there is none.

    Raises:
        Conflict: it serves already, is no trained model, its bytes are gone, or it did not pass and nobody insisted.
    """
    reason = checked_reason(reason)
    pool = get_or_not_found(Pool.objects.select_for_update(), "pool", pool_id)
    artifact = get_or_not_found(Artifact.objects.defer("body"), "artifact", artifact_id)
    if artifact.kind != JobKind.MIXTURE:
        raise Conflict(f"artifact {artifact.id} is of kind {artifact.kind!r}; a pool's length model is 'mixture'")
    if pool.length_model_artifact == artifact.id:
        raise Conflict(f"artifact {artifact.id} already serves pool {pool.name}")
    evaluation = Evaluation.objects.filter(artifact=artifact, pool=pool.id).order_by("-created_at", "-id").first()
    is_passed = evaluation is not None and evaluation.is_passed
    if not is_passed and not despite_gate:
        said = evaluation.reason if evaluation is not None else "it was never evaluated on rows of this pool"
        raise Conflict(f"it did not pass the gate for pool {pool.name}: {said} (despite_gate promotes it anyway)")
    figures = evaluation.contenders if evaluation is not None else {}
    return _change(
        actor=actor,
        pool=pool,
        action=PromotionAction.PROMOTED,
        artifact=artifact,
        restores=current_promotion(pool.id),
        reason=reason,
        is_forced=not is_passed,
        metrics=figures,
        pinball=figures.get("candidate", {}).get("pinball"),
    )


@use_case()
def roll_back(*, actor: Actor, pool_id: str, reason: str = "rolled back") -> Promotion:
    """Bring back what served the pool before its present model, which may be none; again goes one further back."""
    reason = checked_reason(reason)
    pool = get_or_not_found(Pool.objects.select_for_update(), "pool", pool_id)
    current = current_promotion(pool.id)
    if current is None or (current.restores is None and current.artifact is None):
        raise Conflict(f"pool {pool.name} has nothing to roll back to")
    target = current.restores
    return _change(
        actor=actor,
        pool=pool,
        action=PromotionAction.ROLLED_BACK,
        artifact=target.artifact if target is not None else None,
        restores=target.restores if target is not None else None,
        reason=reason,
        is_forced=target.is_forced if target is not None else False,
        metrics=target.metrics if target is not None else {},
        pinball=target.pinball if target is not None else None,
    )


@use_case()
def demote(*, actor: Actor, pool_id: str, reason: str) -> Promotion:
    """Let no trained model serve the pool: its routers predict with the empirical quantiles."""
    reason = checked_reason(reason)
    pool = get_or_not_found(Pool.objects.select_for_update(), "pool", pool_id)
    if not pool.length_model_artifact:
        raise Conflict(f"no trained model serves pool {pool.name}")
    return _change(
        actor=actor,
        pool=pool,
        action=PromotionAction.DEMOTED,
        artifact=None,
        restores=current_promotion(pool.id),
        reason=reason,
    )


def _change(
    *, actor: Actor, pool: Pool, action: PromotionAction, artifact: Artifact | None, **fields: object
) -> Promotion:
    if artifact is not None and not Artifact.objects.filter(pk=artifact.pk, body__isnull=False).exists():
        raise Conflict(f"the bytes of artifact {artifact.id} were deleted; train another one")
    promotion = Promotion.objects.create(
        pool=pool.id, action=action, artifact=artifact, promoted_by=actor.label, **fields
    )
    set_pool_length_model(
        actor=actor,
        pool_id=pool.id,
        artifact=artifact.id if artifact is not None else "",
        digest=artifact.digest if artifact is not None else "",
        kind=artifact.kind if artifact is not None else "",
        how=action.value,
        reason=promotion.reason,
    )
    return promotion
