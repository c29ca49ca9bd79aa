"""Reads of revisions."""

from __future__ import annotations

from typing import NamedTuple

from django.db.models import QuerySet

from controlplane.common.actor import Actor, Scope
from controlplane.rollout import bodies
from controlplane.rollout.models import Revision

KEPT_BODIES = 100
"""Of so many of the newest revisions body and delta are kept."""


def revisions(*, actor: Actor) -> QuerySet[Revision]:
    """Revisions without their bodies, newest first."""
    actor.require(Scope.READ)
    return Revision.objects.defer("body", "delta").order_by("-number")


class Published(NamedTuple):
    number: int
    digest: str


def current() -> Published | None:
    """The newest revision, None before the first."""
    row = Revision.objects.order_by("-number").values_list("number", "digest").first()
    return None if row is None else Published(*row)


def deltas_since(base: str) -> tuple[str, bytes] | None:
    """Digest of the newest revision, and ``SnapshotDeltas`` that lead to it from the revision of digest ``base``.

    None: that revision is not among the newest, a delta is missing, or the whole is shorter.
    Cost: nothing is decoded; the deltas are put together as they were stored when they were published.
    """
    newest = Revision.objects.order_by("-number").values_list("number", "n_bytes").first()
    if newest is None:
        return None
    number, n_bytes = newest
    recent = Revision.objects.filter(number__gte=number - KEPT_BODIES)
    start = recent.filter(digest=base).values_list("number", flat=True).first()
    if start is None:
        return None
    # A revision that is published meanwhile is taken along.
    rows = list(Revision.objects.filter(number__gt=start).order_by("number").values_list("digest", "delta"))
    deltas = [bytes(delta) for _, delta in rows if delta is not None]
    if not rows or len(deltas) < len(rows) or sum(map(len, deltas)) > n_bytes // 2:
        return None
    return rows[-1][0], b'{"deltas":[' + b",".join(deltas) + b"]}"


def current_number() -> int:
    """Number of the newest revision, 0 before the first."""
    newest = current()
    return newest.number if newest is not None else 0


def current_body() -> tuple[int, str, bytes]:
    """Number, digest and JSON of the newest revision, of which there is one."""
    number, digest = Revision.objects.order_by("-number").values_list("number", "digest")[0]
    body = bodies.read(number)
    if body is None:
        raise RuntimeError(f"the body of the newest revision {number} was trimmed")
    return number, digest, body
