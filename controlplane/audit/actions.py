"""The one function that writes the audit log, and the end of every use case that changes a row."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import transaction

from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.common.middleware import current_request_id
from controlplane.common.models import Record
from controlplane.common.use_case import mark_config_changed


def record(
    *,
    actor: Actor,
    action: str,
    object_type: str,
    object_id: str,
    tenant: str = "",
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Append one entry in the transaction of the mutation it describes.

    With both ``before`` and ``after`` only the fields that differ are kept.

    Raises:
        RuntimeError: outside a transaction, where entry and mutation could part.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("audit.record outside a transaction")
    if before is not None and after is not None:
        changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
        before = {k: v for k, v in before.items() if k in changed}
        after = {k: v for k, v in after.items() if k in changed}
    AuditEntry.objects.create(
        actor_kind=actor.kind,
        actor_id=actor.id,
        actor_label=actor.label,
        action=action,
        object_type=object_type,
        object_id=object_id,
        tenant=tenant,
        before=_plain(before),
        after=_plain(after),
        request_id=current_request_id(),
    )


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
