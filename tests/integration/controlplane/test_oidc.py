"""Signing in elsewhere, against a provider in a process of its own: who gets in, and what a provider may not do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
import requests
from django.core.cache import cache
from django.test import Client

from controlplane.accounts.actions import update_user
from controlplane.accounts.invitations import invite
from controlplane.accounts.models import Invitation, Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from router_ext.ops.embedded import free_port
from tests.support.control_plane import make_tenant, make_user, wait_for
from tests.support.oidc_provider import CLIENT_ID, CLIENT_SECRET

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.support.oidc_provider", str(port)])
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None
        try:
            return requests.get(f"{url}/jwks", timeout=5).status_code == 200
        except requests.ConnectionError:
            return False

    try:
        wait_for(is_up, limit_s=60, what="the provider")
        yield url
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(autouse=True)
def configured(issuer: str, settings: Any) -> None:
    cache.clear()
    settings.OIDC_IS_ON, settings.OIDC_NAME = True, "Example SSO"
    app = {
        "provider_id": "sso", "name": "Example SSO", "client_id": CLIENT_ID, "secret": CLIENT_SECRET,
        "settings": {"server_url": issuer, "oauth_pkce_enabled": True},
    }  # fmt: skip
    providers = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]
    settings.SOCIALACCOUNT_PROVIDERS = {"openid_connect": {**providers, "APPS": [app]}}


def person(name: str, **claims: Any) -> dict[str, Any]:
    return {"sub": f"sub-{name}", "email": f"{name}@example.test", "email_verified": True, "name": name, **claims}


def sign_in(who: dict[str, Any], *, client: Client | None = None, after: str = "", **more: str) -> Any:
    """A browser's way: to the provider, where the person signs in, and back."""
    client = client or Client()
    start = client.get("/oidc/sso/login/" + (f"?{urlencode({'next': after})}" if after else ""))
    assert start.status_code == 302, start.content
    asked = start.headers["location"] + "&" + urlencode({"person": json.dumps(who), **more})
    sent_back = requests.get(asked, allow_redirects=False, timeout=10)
    assert sent_back.status_code == 302, sent_back.text
    address = urlsplit(sent_back.headers["location"])
    return client.get(f"{address.path}?{address.query}")


def test_the_sign_in_page_leads_there_with_pkce_and_state(issuer: str) -> None:
    client = Client()
    assert "Sign in with Example SSO" in client.get("/sign-in/").content.decode()
    asked = parse_qs(urlsplit(client.get("/oidc/sso/login/").headers["location"]).query)
    assert asked["code_challenge_method"] == ["S256"]
    assert set(asked["scope"][0].split()) == {"openid", "email", "profile"}
    assert asked["redirect_uri"] == ["http://testserver/oidc/sso/callback/"]
    assert len(asked["state"][0]) >= 16
    again = parse_qs(urlsplit(client.get("/oidc/sso/login/").headers["location"]).query)
    for name in ("state", "nonce", "code_challenge"):
        assert len(asked[name][0]) >= 16
        assert again[name] != asked[name]


def test_a_link_adds_nothing_to_what_the_provider_is_asked(issuer: str) -> None:
    forged = {"auth_params": "nonce=mine&redirect_uri=https://evil.example/&prompt=none", "scope": "admin"}
    asked = parse_qs(urlsplit(Client().get(f"/oidc/sso/login/?{urlencode(forged)}").headers["location"]).query)
    assert asked["nonce"] != ["mine"]
    assert asked["redirect_uri"] == ["http://testserver/oidc/sso/callback/"]
    assert (set(asked["scope"][0].split()), "prompt" in asked) == ({"openid", "email", "profile"}, False)


def test_an_id_token_of_another_sign_in_opens_nothing(system: Actor) -> None:
    """State and PKCE are right, but the token carries the nonce of an earlier sign-in: it is replayed."""
    invite(actor=system, email="jon@example.test", role=Role.OWNER)
    client = Client()
    earlier = parse_qs(urlsplit(client.get("/oidc/sso/login/").headers["location"]).query)["nonce"][0]
    assert sign_in(person("jon", nonce=earlier), client=client).status_code == 403
    assert client.get("/").status_code == 302
    assert not User.objects.exists()
    assert sign_in(person("jon"), client=client).status_code == 302


def test_without_an_issuer_there_is_no_such_page(settings: Any) -> None:
    settings.OIDC_IS_ON, settings.OIDC_NAME = False, ""
    assert Client().get("/oidc/sso/login/").status_code == 404
    assert Client().get("/oidc/sso/callback/?code=1&state=2").status_code == 404
    settings.OIDC_IS_ON = True
    assert Client().get("/oidc/another/login/").status_code == 404
    assert "oidc" not in Client().get("/sign-in/").content.decode()


def test_the_invited_get_in_by_their_verified_email_and_come_back(system: Actor, settings: Any) -> None:
    settings.SECOND_FACTOR_REQUIRED = True  # the provider's counts
    invite(actor=system, email="Ann@Example.Test", role=Role.OPERATOR)
    client = Client()
    answer = sign_in(person("ann", email="ANN@example.test"), client=client, after="/pools/")
    assert answer.headers["location"] == "/pools/"
    assert client.get("/pools/").status_code == 200
    user = User.objects.get()
    assert (user.email, user.role, user.name, user.has_usable_password()) == (
        "ann@example.test", Role.OPERATOR, "ann", False,
    )  # fmt: skip
    assert Invitation.objects.get().accepted_at is not None
    # Known by subject from then on, whatever the email says.
    assert sign_in(person("ann", email="new@example.test", email_verified=False)).status_code == 302
    assert User.objects.count() == 1
    actions = list(AuditEntry.objects.order_by("id").values_list("action", flat=True))
    assert actions[-4:] == ["invitation.accepted", "user.linked", "user.signed_in", "user.signed_in"]


@pytest.mark.parametrize(
    "who",
    [
        person("stranger"),
        person("bob", email_verified=False),
        person("bob", email_verified="true"),
        {"sub": "sub-bob", "email": "bob@example.test"},
        person("bob", email="bob@example.test\0"),
        {"sub": "sub-bob"},
    ],
)
def test_others_see_no_access(system: Actor, who: dict[str, Any]) -> None:
    invite(actor=system, email="bob@example.test", role=Role.VIEWER)
    client = Client()
    answer = sign_in(who, client=client)
    assert answer.status_code == 403
    assert "You have no access" in answer.content.decode()
    assert not User.objects.exists()
    assert client.get("/").status_code == 302


def test_an_account_of_the_verified_email_is_linked_once(system: Actor) -> None:
    user = make_user(email="carl@example.test", role=Role.VIEWER)
    assert sign_in(person("carl")).status_code == 302
    user.refresh_from_db()
    assert user.oidc_subject == "sub-carl"
    # Another subject under the same email is not the same person.
    assert sign_in(person("carl", sub="sub-impostor")).status_code == 403
    update_user(actor=system, user_id=user.id, is_active=False)
    assert sign_in(person("carl")).status_code == 403


def test_groups_give_roles_and_take_them(system: Actor, settings: Any) -> None:
    tenant = make_tenant(system)
    settings.OIDC_GROUP_ROLES = {
        "ops": "operator", "readers": "viewer", "team": f"tenant_admin:{tenant.slug}", "lost": "tenant_admin:nowhere",
    }  # fmt: skip
    assert sign_in(person("dora", groups=["readers", "ops", "others"])).status_code == 302
    dora = User.objects.get(email="dora@example.test")
    assert dora.role == Role.OPERATOR
    assert sign_in(person("dora", groups=["team"])).status_code == 302
    dora.refresh_from_db()
    assert (dora.role, dora.tenant) == (Role.TENANT_ADMIN, tenant)
    for groups in ([], ["lost"], "ops", ["OPS"]):
        assert sign_in(person("dora", groups=groups)).status_code == 403
        assert sign_in(person("erik", groups=groups)).status_code == 403
    # Somebody decided otherwise: groups do no longer.
    update_user(actor=system, user_id=dora.id, role=Role.VIEWER)
    assert sign_in(person("dora", groups=[])).status_code == 302
    dora.refresh_from_db()
    assert dora.role == Role.VIEWER
    # A group opens no account that belongs to somebody else.
    make_user(email="fay@example.test", role=Role.OWNER)
    assert sign_in(person("eve", email="fay@example.test", email_verified=False, groups=["ops"])).status_code == 403


def test_groups_do_not_take_the_last_owner(settings: Any) -> None:
    settings.OIDC_GROUP_ROLES = {"heads": "owner", "readers": "viewer"}
    assert sign_in(person("kim", groups=["heads"])).status_code == 302
    assert sign_in(person("kim", groups=["readers"])).status_code == 409
    make_user(role=Role.OWNER)
    assert sign_in(person("kim", groups=["readers"])).status_code == 302
    assert User.objects.get(email="kim@example.test").role == Role.VIEWER


@pytest.mark.parametrize(
    "cheat",
    [
        "issuer", "audience", "expired", "key", "other_subject", "no_id_token", "cancelled", "nonce", "no_nonce",
    ],
)  # fmt: skip
def test_what_the_provider_may_not_do(system: Actor, cheat: str) -> None:
    invite(actor=system, email="gil@example.test", role=Role.OWNER)
    client = Client()
    answer = sign_in(person("gil"), client=client, cheat=cheat)
    assert answer.status_code in (403, 502)
    assert client.get("/").status_code == 302
    assert not User.objects.exists()


def test_a_callback_of_another_browser_opens_nothing(system: Actor) -> None:
    invite(actor=system, email="hal@example.test", role=Role.OWNER)
    theirs, mine = Client(), Client()
    asked = theirs.get("/oidc/sso/login/").headers["location"]
    mine.get("/oidc/sso/login/")
    url = asked + "&" + urlencode({"person": json.dumps(person("hal"))})
    address = urlsplit(requests.get(url, allow_redirects=False, timeout=10).headers["location"])
    assert mine.get(f"{address.path}?{address.query}").status_code in (401, 403, 502)
    assert mine.get("/").status_code == 302
    # And a code is good once, in the browser that asked.
    assert theirs.get(f"{address.path}?{address.query}").status_code == 302
    assert theirs.get(f"{address.path}?{address.query}").status_code != 302


def test_the_address_after_it_stays_on_this_host(system: Actor) -> None:
    invite(actor=system, email="ida@example.test", role=Role.VIEWER)
    assert sign_in(person("ida"), after="https://evil.example/").headers["location"] == "/"


def test_a_provider_that_is_down_is_said(settings: Any) -> None:
    app = {**settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"][0]}
    app["settings"] = {**app["settings"], "server_url": f"http://127.0.0.1:{free_port()}"}
    settings.SOCIALACCOUNT_PROVIDERS = {"openid_connect": {"APPS": [app]}}
    answer = Client().get("/oidc/sso/login/")
    assert answer.status_code == 502
    assert "does not answer" in answer.content.decode()
