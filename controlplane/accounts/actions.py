"""Use cases of people: accounts, passwords, signing in, API tokens."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import structlog
from django.contrib.auth.hashers import make_password
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction

from controlplane.accounts import throttle
from controlplane.accounts.models import OperatorToken, Role, User
from controlplane.audit.actions import record
from controlplane.common import secrets
from controlplane.common.actor import Actor, Scope, system_actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict, Invalid, NotAllowed
from controlplane.common.use_case import use_case
from controlplane.common.validation import Checks, get_or_not_found

logger = structlog.get_logger(__name__)


def user_fields(user: User) -> dict[str, Any]:
    return {
        "email": user.email,
        "name": user.name,
        "role": user.role,
        "is_active": user.is_active,
        "must_change_password": user.must_change_password,
    }


@use_case()
def create_user(*, actor: Actor, email: str, role: str, name: str = "") -> tuple[User, str]:
    """A new account and its one-time password, which the first sign-in replaces."""
    email = email.strip().lower()
    checks = Checks()
    try:
        validate_email(email)
    except ValidationError:
        checks.add("email", f"{email!r} is not an email address")
    if role not in Role.values:
        checks.add("role", f"{role!r} is not one of {', '.join(Role.values)}")
    checks.done()
    if User.objects.filter(email=email).exists():
        raise Conflict(f"an account for {email} exists")
    password = secrets.one_time_password()
    user = User.objects.create_user(email, password, role=role, name=name, must_change_password=True)
    record(actor=actor, action="user.created", object_type="user", object_id=user.id, after=user_fields(user))
    return user, password


@use_case()
def reset_password(*, actor: Actor, user_id: str) -> str:
    """A new one-time password; whoever is signed in under the old one is signed out."""
    user = get_or_not_found(User.objects.select_for_update(), "user", user_id)
    password = secrets.one_time_password()
    user.set_password(password)
    user.must_change_password = True
    user.is_active = True
    user.save()
    record(actor=actor, action="user.password_reset", object_type="user", object_id=user.id)
    return password


@use_case()
def update_user(
    *, actor: Actor, user_id: str, role: str | None = None, is_active: bool | None = None, name: str | None = None
) -> User:
    """Change role, name or whether the account is open. The last active operator stays one."""
    user = get_or_not_found(User.objects.select_for_update(), "user", user_id)
    before = user_fields(user)
    if role is not None:
        if role not in Role.values:
            raise Invalid({"role": f"{role!r} is not one of {', '.join(Role.values)}"})
        user.role = role
    if is_active is not None:
        user.is_active = is_active
    if name is not None:
        user.name = name
    if before["role"] == Role.OPERATOR and before["is_active"] and not (user.role == Role.OPERATOR and user.is_active):
        # Locking the others makes two simultaneous demotions wait for each other.
        others = User.objects.select_for_update().filter(role=Role.OPERATOR, is_active=True).exclude(pk=user.pk)
        if not list(others.order_by("id")):
            raise Conflict("the last active operator cannot be demoted or closed")
    if user_fields(user) != before:
        user.save()
        record(
            actor=actor,
            action="user.updated",
            object_type="user",
            object_id=user.id,
            before=before,
            after=user_fields(user),
        )
    return user


@use_case(scope=None)
def change_password(*, actor: Actor, user: User, old_password: str, new_password: str) -> None:
    """A person replaces their own password; the view renews its session hash afterwards."""
    if actor.kind != "user" or actor.id != user.id:
        raise NotAllowed("a password is changed by its owner only")
    user = User.objects.select_for_update().get(pk=user.pk)
    checks = Checks()
    if not user.check_password(old_password):
        checks.add("old_password", "is not the present password")
    elif old_password == new_password:
        checks.add("new_password", "must differ from the present one")
    try:
        validate_password(new_password, user)
    except ValidationError as error:
        for message in error.messages:
            checks.add("new_password", message)
    checks.done()
    user.set_password(new_password)
    user.must_change_password = False
    user.save()
    record(actor=actor, action="user.password_changed", object_type="user", object_id=user.id)


def authenticate_password(*, email: str, password: str, address: str) -> User | None:
    """The active user of these credentials, or None; slowed down by failures from the same address or account.

    The view logs the user in; ``record_sign_in`` writes the audit entry. Unknown, closed and wrong look the same,
    in time as well.

    Raises:
        TooManyAttempts
    """
    email = email.strip().lower()
    throttle.check(email=email, address=address)
    user = User.objects.filter(email=email, is_active=True).first() if "\0" not in email else None
    if user is None:
        make_password(password)
    elif user.check_password(password):
        throttle.succeeded(email=email, address=address)
        return user
    throttle.failed(email=email, address=address)
    logger.info("signin.failed", address=address)
    return None


@use_case(scope=None)
def record_sign_in(*, actor: Actor, address: str) -> None:
    record(actor=actor, action="user.signed_in", object_type="user", object_id=actor.id, after={"address": address})


@use_case(scope=None)
def record_sign_out(*, actor: Actor) -> None:
    record(actor=actor, action="user.signed_out", object_type="user", object_id=actor.id)


def token_fields(token: OperatorToken) -> dict[str, Any]:
    return {
        "name": token.name,
        "user": token.user_id,
        "public_id": token.public_id,
        "scopes": list(token.scopes),
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
    }


@use_case()
def issue_token(
    *, actor: Actor, user: User, name: str, scopes: Sequence[str], expires_at: datetime | None = None
) -> tuple[OperatorToken, str]:
    """An API token for ``user`` and its secret, which is shown once."""
    checks = Checks()
    name = checks.text("name", name, 200)
    known = [s.value for s in Scope]
    if not scopes or any(s not in known for s in scopes):
        checks.add("scopes", f"one or more of {', '.join(known)}")
    if expires_at is not None and expires_at <= utc_now():
        checks.add("expires_at", "lies in the past")
    checks.done()
    for scope in scopes:
        actor.require(Scope(scope))
    secret, public_id = secrets.generate_token("flt")
    token = OperatorToken.objects.create(
        user=user,
        name=name,
        public_id=public_id,
        digest=secrets.digest(secret),
        scopes=sorted(set(scopes)),
        expires_at=expires_at,
    )
    record(actor=actor, action="token.issued", object_type="token", object_id=token.id, after=token_fields(token))
    return token, secret


@use_case()
def revoke_token(*, actor: Actor, token_id: str) -> OperatorToken:
    """Revoke at once; revoking again changes nothing."""
    rows = OperatorToken.objects.select_related("user").select_for_update(of=("self",))
    token = get_or_not_found(rows, "token", token_id)
    if token.revoked_at is None:
        before = token_fields(token)
        token.revoked_at = utc_now()
        token.save()
        record(
            actor=actor,
            action="token.revoked",
            object_type="token",
            object_id=token.id,
            before=before,
            after=token_fields(token),
        )
    return token


def bootstrap_operator(*, email: str, is_reset: bool) -> str | None:
    """One-time password of the operator ``email``: made if there is none, reset if asked; None if it exists already."""
    actor = system_actor("bootstrap_operator")
    with transaction.atomic():
        user = User.objects.filter(email=email.strip().lower()).first()
        if user is None:
            return create_user(actor=actor, email=email, role=Role.OPERATOR)[1]
        if not is_reset:
            return None
        update_user(actor=actor, user_id=user.id, role=Role.OPERATOR, is_active=True)
        return reset_password(actor=actor, user_id=user.id)
