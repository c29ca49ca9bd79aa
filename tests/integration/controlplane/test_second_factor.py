"""The second factor: codes as authenticator apps make them, each taken once, kept so that the database gives none."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts import second_factor, totp
from controlplane.accounts.actions import bootstrap_operator
from controlplane.accounts.models import Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.errors import Conflict, Invalid, NotAllowed, NotFound, TooManyAttempts
from tests.support.control_plane import PASSWORD, api_client, make_tenant, make_user

pytestmark = pytest.mark.django_db


class Clock:
    """The present step, which tests move."""

    step = 60_000_000

    def __call__(self, now: float | None = None) -> int:
        return self.step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(totp, "counter", clock)
    return clock


@pytest.fixture
def user() -> User:
    return make_user(password=PASSWORD, email="someone@example.test")


def enrolled(user: User, clock: Clock) -> tuple[bytes, list[str]]:
    """Secret and recovery codes; the code of the present step is used up."""
    secret = totp.new_secret()
    codes = second_factor.enrol(actor=user.actor, user=user, secret=secret, code=totp.code(secret, clock.step))
    user.refresh_from_db()
    return secret, codes


def give(user: User, code: str, address: str = "10.0.0.1") -> bool:
    return second_factor.give_code(user=user, code=code, address=address)


# RFC 6238, appendix B: the last six of the eight digits.
@pytest.mark.parametrize(
    ("at", "code"),
    [(59, "287082"), (1111111109, "081804"), (1111111111, "050471"), (1234567890, "005924"), (20000000000, "353130")],
)
def test_codes_are_those_of_the_standard(at: int, code: str) -> None:
    assert totp.code(b"12345678901234567890", totp.counter(at)) == code


def test_a_device_is_enrolled_on_the_page_and_asked_for_from_then_on(user: User, clock: Clock) -> None:
    client, elsewhere = Client(), Client()
    for each in (client, elsewhere):
        each.force_login(user)
    page = client.get(reverse("console:second_factor"))
    text = page.content.decode()
    secret = base64.b32decode(page.context["secret"].replace(" ", ""))
    assert "<svg" in text
    assert "style=" not in text
    assert page.context["secret"] == client.get(reverse("console:second_factor")).context["secret"]
    wrong = client.post(reverse("console:second_factor"), {"code": totp.code(secret, clock.step + 9)})
    assert "is not the present code" in wrong.content.decode()
    first = totp.code(secret, clock.step)
    codes = re.findall(
        r"<li><code>([a-z0-9-]+)</code>",
        client.post(reverse("console:second_factor"), {"code": first}).content.decode(),
    )
    assert len(set(codes)) == second_factor.N_RECOVERY_CODES
    assert client.get("/").status_code == 200
    # A session that was opened by the password alone is none any more.
    assert elsewhere.get("/").headers["location"].startswith("/sign-in/")

    stranger = Client()
    answer = stranger.post(reverse("console:sign_in"), {"email": user.email, "password": PASSWORD, "next": "/pools/"})
    assert answer.headers["location"] == reverse("console:sign_in_code")
    assert stranger.get("/").headers["location"].startswith("/sign-in/")
    assert stranger.get("/api/v1/tiers").status_code == 401
    assert stranger.post(reverse("console:sign_in_code"), {"code": first}).status_code == 401
    clock.step += 1
    answer = stranger.post(reverse("console:sign_in_code"), {"code": totp.code(secret, clock.step)})
    assert answer.headers["location"] == "/pools/"
    assert stranger.get("/pools/").status_code == 200


def test_no_code_is_taken_twice(user: User, clock: Clock) -> None:
    secret, _ = enrolled(user, clock)
    assert not give(user, totp.code(secret, clock.step))
    clock.step += 2
    code = totp.code(secret, clock.step)
    assert give(user, f"{code[:3]} {code[3:]}")
    assert not give(user, code)
    # Nor one from before it, though its step would be near enough.
    assert not give(user, totp.code(secret, clock.step - 1))
    # The device's clock may be a step ahead.
    assert give(user, totp.code(secret, clock.step + 1))


@pytest.mark.parametrize("code", ["", "000000", "12345", "1234567", "абвгде", "١٢٣٤٥٦", "0" * 40])
def test_what_is_no_code_of_the_account_opens_nothing(user: User, clock: Clock, code: str) -> None:
    secret, _ = enrolled(user, clock)
    clock.step += 2
    assert code not in [totp.code(secret, clock.step + d) for d in (-1, 0, 1)]
    assert not give(user, code)


def test_a_recovery_code_opens_the_account_once(user: User, clock: Clock) -> None:
    _, codes = enrolled(user, clock)
    assert give(user, codes[3].upper())
    assert not give(user, codes[3])
    assert give(user, codes[4].replace("-", " "))
    assert AuditEntry.objects.filter(action="user.recovery_code_used").count() == 2
    other = make_user()
    enrolled(other, clock)
    assert not give(other, codes[5])


def test_the_database_gives_neither_secret_nor_codes(user: User, clock: Clock, settings: Any) -> None:
    secret, codes = enrolled(user, clock)
    kept = str(User.objects.filter(pk=user.pk).values().get()) + str(list(AuditEntry.objects.values()))
    for text in (secret.hex(), base64.b32encode(secret).decode(), str(secret)[2:-1], *codes):
        assert text not in kept
    blob = bytes(user.totp_secret or b"")
    assert secret not in blob
    assert totp.opened(blob, user.id) == secret
    assert totp.opened(blob, "usr_another") is None
    settings.SECRET_KEY = "another"
    assert totp.opened(blob, user.id) == secret
    settings.KEY_PEPPERS = {1: b"another" * 8}
    assert totp.opened(blob, user.id) is None
    clock.step += 2
    assert not give(user, totp.code(secret, clock.step))


def test_guessing_codes_waits_longer_and_the_right_password_does_not_clear_it(user: User, clock: Clock) -> None:
    secret, _ = enrolled(user, clock)
    clock.step += 2
    client = Client()
    sign_in = {"email": user.email, "password": PASSWORD}
    for _ in range(5):
        client.post(reverse("console:sign_in"), sign_in)
        assert client.post(reverse("console:sign_in_code"), {"code": "000000"}).status_code == 401
    assert client.post(reverse("console:sign_in"), sign_in).status_code == 302
    right = totp.code(secret, clock.step)
    assert client.post(reverse("console:sign_in_code"), {"code": right}).status_code == 429
    with pytest.raises(TooManyAttempts):
        give(user, right, "127.0.0.1")
    # Nobody is locked out: elsewhere the owner of the account signs in.
    assert give(user, right, "10.9.9.9")


def test_half_a_sign_in_is_good_for_its_password_and_a_while(user: User, clock: Clock, monkeypatch: Any) -> None:
    secret, _ = enrolled(user, clock)
    clock.step += 2
    client = Client()
    client.post(reverse("console:sign_in"), {"email": user.email, "password": PASSWORD})
    user.set_password("another password of theirs")
    user.save()
    answer = client.post(reverse("console:sign_in_code"), {"code": totp.code(secret, clock.step)})
    assert answer.headers["location"] == reverse("console:sign_in")
    client.post(reverse("console:sign_in"), {"email": user.email, "password": "another password of theirs"})
    session = client.session
    session["half_signed_in"] = {**session["half_signed_in"], "at": session["half_signed_in"]["at"] - 601}
    session.save()
    answer = client.post(reverse("console:sign_in_code"), {"code": totp.code(secret, clock.step)})
    assert answer.headers["location"] == reverse("console:sign_in")
    assert Client().get(reverse("console:sign_in_code")).headers["location"] == reverse("console:sign_in")


@pytest.mark.parametrize(("role", "is_held"), [("owner", True), ("operator", True), ("viewer", False)])
def test_with_tls_owners_and_operators_must_have_one(role: str, is_held: bool, clock: Clock, settings: Any) -> None:
    settings.SECOND_FACTOR_REQUIRED = True
    user = make_user(role=role)
    client = Client()
    client.force_login(user)
    if not is_held:
        assert client.get("/tenants/").status_code == 200
        return
    assert client.get("/tenants/").headers["location"] == "/second-factor/"
    answer = client.get("/api/v1/tiers")
    assert (answer.status_code, answer.json()["code"]) == (403, "second_factor_required")
    assert api_client(user).send("GET", "/tiers").status_code == 200
    page = client.get("/second-factor/")
    secret = base64.b32decode(page.context["secret"].replace(" ", ""))
    assert "recovery-codes" in client.post("/second-factor/", {"code": totp.code(secret, clock.step)}).content.decode()
    assert client.get("/tenants/").status_code == 200


def test_a_lost_device_is_reset_by_who_keeps_members(user: User, clock: Clock, system: Any) -> None:
    secret, _ = enrolled(user, clock)
    tenant_admin = make_user(role=Role.TENANT_ADMIN, tenant=make_tenant(system).id)
    with pytest.raises(NotAllowed):
        second_factor.reset_second_factor(actor=user.actor, user_id=user.id)
    with pytest.raises(NotFound):
        second_factor.reset_second_factor(actor=tenant_admin.actor, user_id=user.id)
    second_factor.reset_second_factor(actor=make_user(role=Role.OWNER).actor, user_id=user.id)
    user.refresh_from_db()
    assert not user.has_second_factor
    clock.step += 2
    assert not give(user, totp.code(secret, clock.step))
    enrolled(user, clock)
    with pytest.raises(Conflict):
        enrolled(user, clock)
    with pytest.raises(NotAllowed):
        second_factor.enrol(actor=tenant_admin.actor, user=user, secret=secret, code="000000")
    assert bootstrap_operator(email=user.email, is_reset=True) is not None
    user.refresh_from_db()
    assert (user.role, user.has_second_factor) == (Role.OWNER, False)


def test_a_wrong_code_enrols_nothing(user: User, clock: Clock) -> None:
    secret = totp.new_secret()
    with pytest.raises(Invalid):
        second_factor.enrol(actor=user.actor, user=user, secret=secret, code=totp.code(secret, clock.step + 2))
    user.refresh_from_db()
    assert not user.has_second_factor
