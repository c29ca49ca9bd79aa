"""Who calls ``/api/v1``: an operator's session or an operator's API token. Tenant keys open nothing here."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import Q
from django.http import Http404
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from controlplane.accounts.models import OperatorToken, User
from controlplane.common import secrets
from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.errors import NotAllowed

# One text for unknown, malformed, revoked and expired: a caller learns nothing by trying.
REFUSAL = "The API token is missing or not valid."
_LAST_USED_STEP = timedelta(minutes=1)


class TokenAuthentication(BaseAuthentication):
    """``Authorization: Bearer flt_...``"""

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"

    def authenticate(self, request: Request) -> tuple[User, OperatorToken] | None:
        header = request.headers.get("authorization", "")
        if not header:
            return None
        scheme, _, text = header.partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or not secrets.is_token(text, "flt"):
            raise AuthenticationFailed(REFUSAL)
        instant = utc_now()
        live = OperatorToken.objects.select_related("user").filter(revoked_at__isnull=True, user__is_active=True)
        token = secrets.holder(live.filter(Q(expires_at__isnull=True) | Q(expires_at__gt=instant)), text)
        if token is None:
            raise AuthenticationFailed(REFUSAL)
        if token.last_used_at is None or token.last_used_at < instant - _LAST_USED_STEP:
            OperatorToken.objects.filter(pk=token.pk).update(last_used_at=instant)
        return token.user, token


class OperatorSessionAuthentication(SessionAuthentication):
    """The console's session, with CSRF protection."""


class HasScope(BasePermission):
    """Reading needs ``admin.read`` and everything else ``admin.write``, unless the view says otherwise in ``scopes`` by
    action or method (several: any of them); use cases check again. What is the platform's does not exist for people of
    a tenant."""

    def has_permission(self, request: Request, view: Any) -> bool:
        if request.user is None or not request.user.is_authenticated:
            return False
        actor = request_actor(request)
        name = getattr(view, "action", None) or str(request.method).lower()
        default = Scope.READ if request.method in SAFE_METHODS else Scope.WRITE
        needed: Scope | tuple[Scope, ...] = getattr(view, "scopes", {}).get(name, default)
        any_of = needed if isinstance(needed, tuple) else (needed,)
        request.actor = actor  # type: ignore[attr-defined] # read by common.rest.UseCaseViewSet.actor
        if any(map(actor.holds, any_of)):
            return True
        if actor.tenant is not None and needed in (Scope.READ, Scope.WRITE):
            raise Http404
        missing = " or ".join(dict.fromkeys(map(actor.needed, any_of)))
        raise NotAllowed(f"{actor.label} lacks the scope {missing}")


def request_actor(request: Request) -> Actor:
    """On whose behalf this REST request acts: the token's scopes if it came with one, else the user's."""
    if isinstance(request.auth, OperatorToken):
        return request.auth.actor
    user = request.user
    assert isinstance(user, User)
    return user.actor


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call] # the library's metaclass is untyped
    target_class = "controlplane.accounts.authentication.TokenAuthentication"
    name = "operatorToken"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "bearerFormat": "flt_..."}


class SessionScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call] # the library's metaclass is untyped
    target_class = "controlplane.accounts.authentication.OperatorSessionAuthentication"
    name = "operatorSession"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "cookie", "name": "fairlane_session"}
