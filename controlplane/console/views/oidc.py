"""Signing in elsewhere: to the provider and back. Without a configured issuer there is no such page."""

from __future__ import annotations

from typing import Any

import requests
import structlog
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialLogin
from allauth.socialaccount.providers.oauth2.client import OAuth2Client
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView, OAuth2LoginView
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponseBase, QueryDict
from django.shortcuts import redirect, render
from django.utils.crypto import constant_time_compare, salted_hmac
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


def _nonce_of(state: str) -> str:
    """What the id token of the sign-in with this state must carry: a code that was begun elsewhere brings another.

    A keyed hash of the state (OpenID Connect Core, 15.5.2), which is random, kept in the session and good once.
    """
    return salted_hmac("fairlane.oidc.nonce", state, algorithm="sha256").hexdigest()


class Nonced(OAuth2Client):  # type: ignore[misc]  # allauth is untyped
    """Asks for an id token with our nonce, which allauth does not."""

    def get_redirect_url(self, authorization_url: str, scope: list[str], extra_params: dict[str, str]) -> str:
        url: str = super().get_redirect_url(
            authorization_url, scope, {**extra_params, "nonce": _nonce_of(str(self.state))}
        )
        return url


class Verifying(OpenIDConnectOAuth2Adapter):  # type: ignore[misc]  # allauth is untyped
    """Checks the signature of the id token, which allauth leaves to the TLS of the connection."""

    client_class = Nonced

    def get_provider(self) -> Any:
        """The provider that goes by this adapter on the way there as well."""
        provider = super().get_provider()
        provider.oauth2_adapter_class = type(self)
        return provider

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


def _identity(data: dict[str, Any], nonce: str) -> Identity:
    """What id token and userinfo say. Both must be of one person, and the signed one of this very sign-in.

    Raises:
        NotAllowed
    """
    token, userinfo = data.get("id_token"), data.get("userinfo") or {}
    if not token or (userinfo and userinfo.get("sub") != token.get("sub")):
        raise NotAllowed("The provider's answers are not of one person.")
    if not constant_time_compare(str(token.get("nonce", "")), nonce):
        raise NotAllowed("The id token was not made for this sign-in.")
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
        identity = _identity(sociallogin.account.extra_data, _nonce_of(request.GET.get("state", "")))
        user = admit(actor=system_actor("sign-in"), identity=identity)
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
    # allauth would take scopes and parameters of the provider from the address, and so from whoever made the link.
    kept = QueryDict(mutable=True)
    if address := request.GET.get("next"):
        kept["next"] = address
    request.GET = kept  # type: ignore[assignment]  # Django's own is the immutable kind
    return _run(request, provider_id, OAuth2LoginView)


@never_cache
@require_safe
def back(request: HttpRequest, provider_id: str) -> HttpResponseBase:
    return _run(request, provider_id, OAuth2CallbackView)
