"""Reads of the audit log."""

from __future__ import annotations

import re
from collections.abc import Iterable

from django.db import transaction
from django.db.models import QuerySet

from controlplane.audit.chain import COLUMNS, FIRST, Verdict, walk
from controlplane.audit.models import AuditEntry, AuditHead
from controlplane.common.actor import Actor, Scope
from controlplane.common.errors import Invalid
from controlplane.common.validation import without_nul

_HASH = re.compile(r"[0-9a-f]{64}\Z")


def entries(*, actor: Actor, object_type: str = "", object_id: str = "", tenant: str = "") -> QuerySet[AuditEntry]:
    """Entries, newest first, narrowed by whatever is given."""
    actor.require(Scope.READ)
    rows = AuditEntry.objects.order_by("-id")
    given = {"object_type": object_type, "object_id": object_id, "tenant": tenant}
    return rows.filter(**{name: without_nul(value) for name, value in given.items() if without_nul(value)})


def head(*, actor: Actor) -> tuple[int | None, str]:
    """Id and hash of the newest entry."""
    actor.require(Scope.READ)
    return AuditEntry.objects.order_by("-id").values_list("id", "hash").first() or (None, FIRST)


def heads(*, actor: Actor) -> QuerySet[AuditHead]:
    """Heads of the chain as they were logged day by day, newest first."""
    actor.require(Scope.READ)
    return AuditHead.objects.order_by("-id")


def verify(*, actor: Actor, heads: Iterable[str] = ()) -> Verdict:
    """Walk along the whole chain; the heads that were logged must be in it, and those that are given.

    Cost: one pass, in batches; some 30 us an entry.

    Raises:
        Invalid: what is given is no hash.
    """
    actor.require(Scope.READ)
    given = [head.strip().lower() for head in heads]
    if wrong := [head for head in given if not _HASH.match(head)]:
        raise Invalid({"head": f"64 hexadecimal digits, not {wrong[0][:80]!r}"})
    with transaction.atomic():  # a cursor on the server needs one
        # Heads first: a head is logged after its entry, so each of these is seen by the walk.
        known = [*AuditHead.objects.values_list("hash", flat=True), *given]
        rows = AuditEntry.objects.order_by("id").values_list(*COLUMNS, "hash")
        return walk(rows.iterator(chunk_size=2_000), known)
