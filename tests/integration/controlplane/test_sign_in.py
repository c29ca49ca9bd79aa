"""Signing in: guessing is slowed down, nobody is locked out for good."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.test import Client

from controlplane.accounts.actions import authenticate_password, reset_password
from controlplane.accounts.models import User
from controlplane.accounts.tasks import forget_sessions
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import TooManyAttempts
from controlplane.common.valkey import valkey
from tests.support.control_plane import make_user

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery staple"


@pytest.fixture
def user() -> User:
    return make_user(email="someone@example.test", password=PASSWORD)


def attempt(password: str, *, address: str = "10.0.0.1", email: str = "Someone@Example.Test ") -> User | None:
    return authenticate_password(email=email, password=password, address=address)


def test_the_right_password_signs_in(user: User) -> None:
    assert attempt(PASSWORD) == user


@pytest.mark.parametrize("email", ["nobody@example.test", "", "a\0b"])
def test_an_unknown_account_is_like_a_wrong_password(user: User, email: str) -> None:
    assert attempt(PASSWORD, email=email) is None
    assert attempt("wrong") is None


def test_a_closed_account_does_not_sign_in(user: User) -> None:
    User.objects.filter(pk=user.pk).update(is_active=False)
    assert attempt(PASSWORD) is None


def test_guessing_waits_longer_each_time_and_elsewhere_the_owner_still_signs_in(user: User) -> None:
    for _ in range(5):
        assert attempt("wrong") is None
    with pytest.raises(TooManyAttempts) as caught:
        attempt(PASSWORD)
    first = caught.value.retry_after_s
    assert 1 <= first <= 2
    assert attempt(PASSWORD, address="10.0.0.2") == user
    for key in valkey().scan_iter("*:wait"):
        valkey().delete(key)
    assert attempt("wrong") is None
    with pytest.raises(TooManyAttempts) as caught:
        attempt(PASSWORD)
    assert caught.value.retry_after_s > first


def test_the_page_says_when_to_try_again(user: User) -> None:
    page, wrong = Client(), {"email": user.email, "password": "wrong"}
    answers = [page.post("/sign-in/", wrong) for _ in range(6)]
    assert [each.status_code for each in answers] == [401] * 5 + [429]
    assert 1 <= int(answers[-1]["Retry-After"]) <= 2
    assert all("Retry-After" not in each for each in answers[:5])


def test_the_page_tells_of_the_first_start_until_somebody_has_signed_in(user: User) -> None:
    assert "First start?" in Client().get("/sign-in/").content.decode()
    assert Client().post("/sign-in/", {"email": user.email, "password": PASSWORD}).status_code == 302
    assert "First start?" not in Client().get("/sign-in/").content.decode()


def test_one_address_cannot_try_many_accounts(user: User) -> None:
    for n in range(20):
        assert attempt("wrong", email=f"person{n}@example.test") is None
    with pytest.raises(TooManyAttempts):
        attempt("wrong", email="person99@example.test")


def test_without_valkey_signing_in_goes_on(user: User, settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    valkey.cache_clear()
    try:
        assert attempt("wrong") is None
        assert attempt(PASSWORD) == user
    finally:
        settings.REDIS_URL = settings.ENVIRONMENT.redis_url
        valkey.cache_clear()


def test_a_reset_signs_out_whoever_was_signed_in(user: User, system: Actor) -> None:
    client = Client()
    client.force_login(user)
    assert client.get("/api/v1/tiers").status_code == 200
    reset_password(actor=system, user_id=user.id)
    assert client.get("/api/v1/tiers").status_code == 401


def test_only_expired_sessions_are_forgotten(user: User) -> None:
    client = Client()
    client.force_login(user)
    Session.objects.create(session_key="old", session_data="", expire_date=utc_now() - timedelta(seconds=1))
    forget_sessions()
    assert not Session.objects.filter(pk="old").exists()
    assert client.get("/api/v1/tiers").status_code == 200
