"""``GET /v1/usage``: the report of the own tenant, by one of its keys."""

from __future__ import annotations

from typing import Any

import structlog
from django.conf import settings
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts import throttle
from controlplane.common import secrets
from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.errors import NotFound, TooManyAttempts
from controlplane.common.validation import without_nul
from controlplane.common.valkey import UNAVAILABLE, valkey
from controlplane.fleet.routers import authenticate_router
from controlplane.keys.models import ApiKey
from controlplane.usage.api import CsvRenderer, asked, page_of, report_fields, wants_csv
from controlplane.usage.report import usage_report
from controlplane.usage.report_export import export_response
from router_ext.wire.controlplane import KEY_HEADER, parse_key

logger = structlog.get_logger(__name__)

PER_MINUTE = 60
"""Reports a key may ask for in a minute."""
_REFUSAL = "The API key is missing or not valid."


def actor_of_key(header: str, address: str) -> Actor:
    """Who holds the key of an ``Authorization`` header: may read what belongs to its tenant, and nothing else.

    Unknown, revoked and expired keys get the same words. Keys are compared by their digests in constant time. Failures
    slow down further ones from the address and with the key's public part.

    Raises:
        AuthenticationFailed: no such key. TooManyAttempts: too many failures, or reports.
    """
    scheme, _, text = header.partition(" ")
    text = text.strip()
    public_id = parse_key(text) if scheme.lower() == "bearer" and text.isascii() else None
    if public_id is None:
        raise AuthenticationFailed(_REFUSAL)
    throttle.check(email=f"key:{public_id}", address=address)
    key = ApiKey.objects.filter(public_id=public_id).first()
    kept, version = ("", settings.KEY_PEPPER_VERSION) if key is None else (key.digest, key.pepper_version)
    is_same = secrets.is_digest_of(text, kept, version)
    is_live = key is not None and key.revoked_at is None and (key.expires_at is None or key.expires_at > utc_now())
    if key is None or not is_same or not is_live:
        throttle.failed(email=f"key:{public_id}", address=address)
        raise AuthenticationFailed(_REFUSAL)
    return _holder(key)


def actor_of_routers_key(header: str, key_id: str) -> Actor:
    """The holder of a key that a router has authenticated.

    Raises:
        AuthenticationFailed: no live router token. NotFound: no such key that still holds.
    """
    if authenticate_router(header) is None:
        raise AuthenticationFailed("The router token is missing or not valid.")
    key = ApiKey.objects.filter(pk=without_nul(key_id), revoked_at__isnull=True).first()
    if key is None:
        raise NotFound(f"no key {key_id[:40]!r}")
    return _holder(key)


def _holder(key: ApiKey) -> Actor:
    _count(key.id)
    return Actor(
        kind="key", id=key.id, label=key.public_id, scopes=frozenset({Scope.TENANT_READ}), tenant=key.tenant_id
    )


def _count(key: str) -> None:
    """Raises TooManyAttempts above ``PER_MINUTE``; without Valkey nothing is counted."""
    name = f"fairlane:usage-reports:{key}:{utc_now():%H%M}"
    try:
        with valkey().pipeline() as pipe:
            pipe.incr(name)
            pipe.expire(name, 120)
            n = int(pipe.execute()[0])
    except UNAVAILABLE:
        logger.warning("usage.throttle_unavailable")
        return
    if n > PER_MINUTE:
        raise TooManyAttempts(f"At most {PER_MINUTE} reports a minute.", retry_after_s=60 - utc_now().second)


class KeyUsageView(APIView):
    """The usage report of the tenant whose key asks: parameters and answer of ``/api/v1/usage/report``."""

    authentication_classes = ()
    permission_classes = ()
    renderer_classes = (JSONRenderer, CsvRenderer)
    schema = None

    def get_authenticate_header(self, request: Any) -> str:
        return "Bearer"

    def actor(self, request: Any) -> Actor:
        return actor_of_key(request.headers.get("authorization", ""), request.META.get("REMOTE_ADDR", ""))

    def get(self, request: Any) -> Any:
        request.actor = self.actor(request)
        question = asked(request)
        if wants_csv(request):
            return export_response(question, "csv")
        limit, cursor = page_of(request)
        return Response(report_fields(usage_report(question, limit=limit, cursor=cursor)))


class RouterUsageView(KeyUsageView):
    """The same for a router, which names in ``KEY_HEADER`` the key that it has authenticated."""

    def actor(self, request: Any) -> Actor:
        return actor_of_routers_key(request.headers.get("authorization", ""), request.headers.get(KEY_HEADER, ""))
