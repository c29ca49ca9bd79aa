"""Publishing a revision."""

from __future__ import annotations

import structlog
from django.db import connection, transaction

from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.valkey import UNAVAILABLE, valkey
from controlplane.rollout import bodies
from controlplane.rollout.models import Revision
from controlplane.rollout.queries import KEPT_BODIES
from controlplane.rollout.snapshot import build_snapshot, delta_between, validate_snapshot

logger = structlog.get_logger(__name__)

CHANNEL = "fairlane:revision"
_PUBLISH_LOCK = 0x66_6C_01


def publish(actor: Actor, reason: str) -> Revision | None:
    """Build, validate and store the next revision, in the transaction of the change it carries.

    The lock is taken after the rows were changed and held until the commit is visible: whoever gets it next sees
    every change published before, and nothing unpublished by others is visible to anybody. So numbers are monotone
    and the newest revision always equals the rows.

    Returns:
        The revision, or None where routers would see no difference.

    Raises:
        ConfigRefused: the change is rolled back.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_PUBLISH_LOCK])
    last = Revision.objects.defer("body", "delta").order_by("-number").first()
    published_at = utc_now()
    built = build_snapshot(revision=last.number + 1 if last is not None else 1, published_at=published_at)
    if last is not None and last.content_digest == built.content_digest:
        return None
    snapshot, body = built.snapshot, built.body
    validate_snapshot(snapshot)
    before = None if last is None else bodies.read(last.number)
    delta = None if before is None else delta_between(before, body)
    revision = Revision.objects.create(
        number=snapshot.revision,
        digest=snapshot.digest,
        content_digest=built.content_digest,
        delta=delta,
        n_bytes=len(body),
        published_at=published_at,
        actor=actor.label,
        reason=reason,
    )
    bodies.write(snapshot.revision, body)
    transaction.on_commit(lambda: announce(snapshot.revision))
    return revision


def announce(number: int) -> None:
    """Wake the long polls of every process. Only a help: each looks into the database every second anyway."""
    logger.info("revision.published", revision=number)
    try:
        valkey().publish(CHANNEL, str(number))
    except UNAVAILABLE:
        logger.warning("revision.announcement_failed", revision=number)


def trim_revisions() -> int:
    """Forget bodies and deltas of all but the newest revisions; their lines stay. Returns how many were trimmed."""
    newest = Revision.objects.order_by("-number").values_list("number", flat=True)[:KEPT_BODIES]
    oldest_kept = min(newest, default=0)
    return Revision.objects.filter(number__lt=oldest_kept, body__isnull=False).update(body=None, delta=None)
