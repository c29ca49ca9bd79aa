"""The one function that writes the audit log, and the end of every use case that changes a row."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import structlog
from django.db import connection, transaction

from controlplane.audit.chain import COLUMNS, FIRST, next_hash
from controlplane.audit.models import AuditEntry, AuditHead
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.middleware import current_request_id
from controlplane.common.models import Record
from controlplane.common.use_case import mark_config_changed, run_last

logger = structlog.get_logger(__name__)

_CHAIN_LOCK = 0x66_6C_02


def record(
    *,
    actor: Actor,
    action: str,
    object_type: str,
    object_id: str,
    tenant: str = "",
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    bulk: Sequence[str] = (),
) -> None:
    """Append one entry in the transaction of the mutation it describes, at the end of the running use case.

    With both ``before`` and ``after`` only the fields that differ are kept.

    Args:
        bulk: ids of all objects of one action on many; ``before`` and ``after`` are by id then, ``object_id`` is "".

    Raises:
        RuntimeError: outside a transaction, where entry and mutation could part.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("audit.record outside a transaction")
    if before is not None and after is not None:
        changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
        before = {k: v for k, v in before.items() if k in changed}
        after = {k: v for k, v in after.items() if k in changed}
    entry = AuditEntry(
        actor_kind=actor.kind,
        actor_id=actor.id,
        actor_label=actor.label,
        action=action,
        object_type=object_type,
        object_id=object_id,
        bulk=list(bulk),
        tenant=tenant,
        before=_plain(before),
        after=_plain(after),
        request_id=current_request_id(),
    )
    if not run_last(functools.partial(_append, entry)):
        _append(entry)


def _append(entry: AuditEntry) -> None:
    """Put an entry behind the newest one that is committed, or was written by this transaction.

    The lock is held until the commit, so that there is one chain, and the order of ids is that of commits. Whoever
    waits for it holds whatever it changed, and whoever holds it waits for nothing: it is taken last.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_CHAIN_LOCK])
        # A statement of its own: it must see what was committed while the lock was waited for.
        cursor.execute(
            "SELECT nextval(pg_get_serial_sequence('audit_auditentry', 'id')),"
            " (SELECT hash FROM audit_auditentry ORDER BY id DESC LIMIT 1)"
        )
        entry.id, previous = cursor.fetchone()
    entry.at = utc_now()
    entry.hash = next_hash(previous or FIRST, [getattr(entry, name) for name in COLUMNS])
    entry.save(force_insert=True)


def log_head() -> AuditHead | None:
    """Note the chain's head as a row and as a line of the log, which other machines keep; None without entries."""
    last = AuditEntry.objects.order_by("-id").values("id", "hash").first()
    if last is None:
        return None
    head = AuditHead.objects.create(entry=last["id"], hash=last["hash"])
    logger.info("audit.head", entry=head.entry, hash=head.hash)
    return head


def save_change(
    row: Record,
    *,
    actor: Actor,
    action: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    tenant: str = "",
    publish: str = "",
) -> None:
    """Save a row under its next version with its audit entry; nothing happens where nothing changed.

    Args:
        action: type of the object and what was done to it, such as ``tier.updated``.
        publish: reason of the revision that tells routers; "" where they need not know.
    """
    if after == before:
        return
    row.version += 1
    row.save()
    record(
        actor=actor,
        action=action,
        object_type=action.partition(".")[0],
        object_id=str(row.pk),
        tenant=tenant,
        before=before,
        after=after,
    )
    if publish:
        mark_config_changed(publish)


def delete_change(row: Record, *, actor: Actor, action: str, before: Mapping[str, Any], publish: str) -> None:
    """Delete a row with its audit entry, and tell routers.

    Args:
        action, publish: as of ``save_change``.

    Raises:
        ProtectedError: other rows refer to it; nothing has happened.
    """
    object_id = str(row.pk)
    row.delete()
    record(actor=actor, action=action, object_type=action.partition(".")[0], object_id=object_id, before=before)
    mark_config_changed(publish)


def _plain(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if values is None:
        return None
    return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in values.items()}
