"""Creates that may be sent twice: the second answer is the first one again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from django.db import transaction
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.common.actor import Actor
from controlplane.common.errors import Invalid
from controlplane.common.models import IdempotencyRecord

MAX_KEY = 200


def create_once(
    request: Request, *, actor: Actor, create: Callable[[], Response], secret_fields: Collection[str] = ()
) -> Response:
    """Run ``create`` under the request's ``Idempotency-Key``, if it has one.

    The record and what is created commit together; a twin that comes meanwhile waits for that. The repeated answer
    says ``Idempotency-Replayed: true`` and carries null for ``secret_fields``: a secret is shown once and not kept.

    Raises:
        Invalid: the key was used for another request, or is malformed.
    """
    key = request.headers.get("idempotency-key")
    if key is None:
        return create()
    if not 1 <= len(key) <= MAX_KEY or not key.isprintable():
        raise Invalid({"Idempotency-Key": f"1 to {MAX_KEY} printable characters"})
    content = json.dumps([request.method, request.path, request.data], sort_keys=True, default=str)
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    with transaction.atomic():
        # The insert of a twin blocks here until this transaction has ended.
        IdempotencyRecord.objects.bulk_create(
            [IdempotencyRecord(actor=actor.id, key=key, fingerprint=fingerprint)], ignore_conflicts=True
        )
        row = IdempotencyRecord.objects.select_for_update().get(actor=actor.id, key=key)
        if row.fingerprint != fingerprint:
            raise Invalid({"Idempotency-Key": "was used for another request"})
        if row.status is not None:
            return Response(row.body, status=row.status, headers={"Idempotency-Replayed": "true", **etag_of(row.body)})
        response = create()
        row.status = response.status_code
        row.body = json.loads(json.dumps(_without(response.data, secret_fields), default=str))
        row.save()
        return response


def etag_of(body: Any) -> dict[str, str]:
    """The header with the version that a body shows, none where it shows none."""
    version = body.get("version") if isinstance(body, Mapping) else None
    return {"ETag": f'"{version}"'} if isinstance(version, int) else {}


def _without(data: Any, secret_fields: Collection[str]) -> Any:
    return {k: None if k in secret_fields else v for k, v in data.items()}
