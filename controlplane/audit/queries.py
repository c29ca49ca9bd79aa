"""Reads of the audit log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import transaction
from django.db.models import Q, QuerySet

from controlplane.audit.chain import COLUMNS, FIRST, Verdict, walk
from controlplane.audit.models import AuditEntry, AuditHead
from controlplane.common.actor import Actor, Scope
from controlplane.common.errors import Invalid
from controlplane.common.validation import Checks, without_nul

TEXT_FILTERS = ("actor", "action", "object_type", "object_id", "tenant")
FILTERS = (*TEXT_FILTERS, "from", "to")
_HASH = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """What narrows the log; what is empty does not.

    Attributes:
        actor: id of who acted, or a part of the label. action: such as ``tenant.updated``, or the beginning of it
            before a point. object_id, tenant: those of actions on many are found too.
        since, before: instants, the second one outside.
    """

    actor: str = ""
    action: str = ""
    object_type: str = ""
    object_id: str = ""
    tenant: str = ""
    since: datetime | None = None
    before: datetime | None = None


EVERYTHING = Filter()


def read_filter(given: Mapping[str, str]) -> Filter:
    """A filter from the parameters of an address: those of ``Filter``, with ``from`` and ``to`` for the time span.

    ``from`` and ``to`` are days or instants, UTC where they name no offset; the day ``to`` is inside.

    Raises:
        Invalid: by parameter.
    """
    checks = Checks()
    texts = {name: without_nul(given.get(name, "")).strip() for name in TEXT_FILTERS}
    since, before = (_instant(checks, name, given.get(name, "")) for name in ("from", "to"))
    checks.done()
    return Filter(**texts, since=since, before=before)


def _instant(checks: Checks, name: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        instant = datetime.fromisoformat(text)
        instant = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
        is_day = len(text) == len("2026-01-31") and "-" in text
        return (instant + timedelta(days=1) if is_day and name == "to" else instant).astimezone(UTC)
    except (ValueError, OverflowError):
        checks.add(name, f"a day such as 2026-01-31 or an instant such as 2026-01-31T12:00:00Z, not {text[:40]!r}")
        return None


def entries(*, actor: Actor, narrowed: Filter = EVERYTHING) -> QuerySet[AuditEntry]:
    """Entries, newest first, narrowed by whatever is given."""
    actor.require(Scope.READ)
    rows = AuditEntry.objects.order_by("-id")
    if narrowed.actor:
        rows = rows.filter(Q(actor_id=narrowed.actor) | Q(actor_label__icontains=narrowed.actor))
    if narrowed.action:
        rows = rows.filter(Q(action=narrowed.action) | Q(action__startswith=f"{narrowed.action}."))
    if narrowed.object_type:
        rows = rows.filter(object_type=narrowed.object_type)
    for name in ("object_id", "tenant"):
        if wanted := getattr(narrowed, name):
            rows = rows.filter(Q(**{name: wanted}) | Q(bulk__contains=[wanted]))
    if narrowed.since is not None:
        rows = rows.filter(at__gte=narrowed.since)
    if narrowed.before is not None:
        rows = rows.filter(at__lt=narrowed.before)
    return rows


def all_of(rows: QuerySet[AuditEntry]) -> Iterator[AuditEntry]:
    """Every entry, newest first, a thousand at a time: a long export holds neither memory nor a transaction."""
    last: int | None = None
    while page := list((rows if last is None else rows.filter(id__lt=last))[:1_000]):
        yield from page
        last = page[-1].id


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
