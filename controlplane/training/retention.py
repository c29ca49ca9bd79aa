"""Bytes of artifacts: which are kept, and how many at most. Their lines, with digest and figures, stay for good."""

from __future__ import annotations

import structlog
from django.db import transaction

from controlplane.fleet.models import Pool
from controlplane.training.models import Artifact
from controlplane.training.promotion import current_promotion

logger = structlog.get_logger(__name__)

KEPT_PER_KIND = 10
MAX_TOTAL_BYTES = 1 << 30
"""Of all bodies together; those that serve, and those a rollback would bring back, are kept whatever they take."""


def in_use() -> set[str]:
    """Ids of artifacts that serve a pool, or that one click would bring back."""
    used: set[str] = set()
    for pool in Pool.objects.order_by("id"):
        used |= {pool.predictor_artifact, pool.length_model_artifact}
        newest = current_promotion(pool.id)
        if newest is not None and newest.restores is not None and newest.restores.artifact_id is not None:
            used.add(newest.restores.artifact_id)
    return used - {""}


def trim_artifacts() -> int:
    """Forget the bytes of old artifacts that are not in use; returns of how many."""
    with transaction.atomic():
        # Promotions take this lock first as well: none of them can choose what is being forgotten.
        list(Pool.objects.select_for_update().order_by("id").values_list("id", flat=True))
        used = in_use()
        n_seen: dict[str, int] = {}
        n_bytes = sum(Artifact.objects.filter(pk__in=used, body__isnull=False).values_list("n_bytes", flat=True))
        trimmed: list[str] = []
        held = Artifact.objects.filter(body__isnull=False).exclude(pk__in=used).order_by("-created_at", "-id")
        for artifact_id, kind, size in held.values_list("id", "kind", "n_bytes"):
            n_seen[kind] = n_seen.get(kind, 0) + 1
            if n_seen[kind] > KEPT_PER_KIND or n_bytes + size > MAX_TOTAL_BYTES:
                trimmed.append(artifact_id)
            else:
                n_bytes += size
        Artifact.objects.filter(pk__in=trimmed).update(body=None)
    if trimmed:
        logger.info("artifact.bytes_forgotten", artifacts=trimmed)
    return len(trimmed)
