"""Signing in elsewhere: to the provider and back. Without a configured issuer there is no such page."""

from __future__ import annotations

from typing import Any

import requests
import structlog
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialLogin
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView, OAuth2LoginView
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from controlplane.accounts.oidc import Identity, admit
from controlplane.common.actor import system_actor
from controlplane.common.errors import Conflict, ControlPlaneError, NotAllowed
from controlplane.console.views.account import open_session

logger = structlog.get_logger(__name__)
PROVIDER = "sso"


class ProviderProblem(ControlPlaneError):
    status = 502
    code = "provider_failed"


def _refused(request: HttpRequest, problem: ControlPlaneError) -> HttpResponseBase:
    return render(request, "console/problem.html", {"problem": problem}, status=problem.status)


class Verifying(OpenIDConnectOAuth2Adapter):  # type: ignore[misc]  # allauth is untyped
    """Checks the signature of the id token, which allauth leaves to the TLS of the connection."""

    def _decode_id_token(self, app: Any, id_token: str) -> dict[str, Any]:
        self.did_fetch_access_token = False
        decoded: dict[str, Any] = super()._decode_id_token(app, id_token)
        return decoded


class Admitting(DefaultSocialAccountAdapter):  # type: ignore[misc]  # allauth is untyped
    """Ends allauth's flow where it has the identity: what follows is ours."""

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        raise ImmediateHttpResponse(_came_back(request, sociallogin))

    def on_authentication_error(
        self, request: HttpRequest, provider: Any, error: Any = None, exception: Any = None, extra_context: Any = None
    ) -> None:
        logger.warning("oidc.failed", error=str(error), exception=repr(exception))
        problem = ProviderProblem("Signing in elsewhere did not work out; the log says why. Try again.")
        raise ImmediateHttpResponse(_refused(request, problem))


def _identity(data: dict[str, Any]) -> Identity:
    """What id token and userinfo say. Both must be of one person, and there must be a signed one.

    Raises:
        NotAllowed
    """
    token, userinfo = data.get("id_token"), data.get("userinfo") or {}
    if not token or (userinfo and userinfo.get("sub") != token.get("sub")):
        raise NotAllowed("The provider's answers are not of one person.")
    said = {**userinfo, **token}
    if any("\0" in str(said.get(claim, "")) for claim in ("iss", "sub", "email", "name")):
        raise NotAllowed("The provider's answers hold NUL.")
    groups = said.get(settings.OIDC_GROUPS_CLAIM) or []
    return Identity(
        issuer=str(token["iss"]),
        subject=str(token["sub"]),
        email=str(said.get("email") or "").strip().lower(),
        # Only the truth itself: some providers leave the claim out, some send text.
        is_email_verified=said.get("email_verified") is True,
        name=str(said.get("name") or ""),
        groups=[str(group) for group in groups] if isinstance(groups, list) else [],
    )


def _came_back(request: HttpRequest, sociallogin: SocialLogin) -> HttpResponseBase:
    try:
        user = admit(actor=system_actor("sign-in"), identity=_identity(sociallogin.account.extra_data))
    except NotAllowed as problem:
        logger.info("signin.no_access", reason=problem.message)
        return _refused(request, NotAllowed("You have no access. Ask an owner of this platform to invite you."))
    except Conflict as problem:
        return _refused(request, problem)
    open_session(request, user, is_factor_given=True)
    address = str(sociallogin.state.get("next") or "")
    is_ours = url_has_allowed_host_and_scheme(address, {request.get_host()}, require_https=request.is_secure())
    return redirect(address if is_ours else settings.LOGIN_REDIRECT_URL)


def _run(request: HttpRequest, provider_id: str, view: Any) -> HttpResponseBase:
    if not settings.OIDC_IS_ON or provider_id != PROVIDER:
        raise Http404
    try:
        answer: HttpResponseBase = view.adapter_view(Verifying(request, PROVIDER))(request)
    except (requests.RequestException, KeyError, ValueError) as error:
        logger.warning("oidc.provider_unreachable", error=repr(error))
        return _refused(request, ProviderProblem("The provider does not answer as it should. Try again later."))
    return answer


@never_cache
@require_safe
def start(request: HttpRequest, provider_id: str) -> HttpResponseBase:
    return _run(request, provider_id, OAuth2LoginView)


@never_cache
@require_safe
def back(request: HttpRequest, provider_id: str) -> HttpResponseBase:
    return _run(request, provider_id, OAuth2CallbackView)
