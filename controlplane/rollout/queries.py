"""Reads of revisions."""

from __future__ import annotations

from typing import NamedTuple

from django.db.models import QuerySet

from controlplane.common.actor import Actor, Scope
from controlplane.rollout.models import Revision


def revisions(*, actor: Actor) -> QuerySet[Revision]:
    """Revisions without their bodies, newest first."""
    actor.require(Scope.READ)
    return Revision.objects.defer("body").order_by("-number")


class Published(NamedTuple):
    number: int
    digest: str


def current() -> Published | None:
    """The newest revision, None before the first."""
    row = Revision.objects.order_by("-number").values_list("number", "digest").first()
    return None if row is None else Published(*row)


def current_number() -> int:
    """Number of the newest revision, 0 before the first."""
    newest = current()
    return newest.number if newest is not None else 0


def current_body() -> tuple[int, str, bytes]:
    """Number, digest and JSON of the newest revision, of which there is one."""
    number, digest, body = Revision.objects.order_by("-number").values_list("number", "digest", "body")[0]
    if body is None:
        raise RuntimeError(f"the body of the newest revision {number} was trimmed")
    return number, digest, bytes(body)
