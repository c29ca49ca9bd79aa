"""Use cases of people: accounts, passwords, signing in, API tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

import structlog
from django.conf import settings
from django.contrib.auth.hashers import make_password
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction
from django.db.models import F, Q
from typing_extensions import Unpack

from controlplane.accounts import throttle
from controlplane.accounts.models import TENANT_ROLES, Invitation, OperatorToken, Role, User
from controlplane.audit.actions import record
from controlplane.common import secrets
from controlplane.common.access import visible
from controlplane.common.actor import TENANT_SCOPES, Actor, Scope, system_actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict, NotAllowed
from controlplane.common.use_case import use_case
from controlplane.common.validation import Checks, get_or_not_found, lock_version, without_nul

logger = structlog.get_logger(__name__)


def user_fields(user: User) -> dict[str, Any]:
    return {
        "email": user.email,
        "name": user.name,
        "role": user.role,
        "tenant": user.tenant_id,
        "is_active": user.is_active,
        "must_change_password": user.must_change_password,
        "managed_by": user.managed_by,
    }


def check_role(checks: Checks, *, actor: Actor, role: str, tenant: str | None) -> None:
    """A known role, with a tenant where it needs one, that the actor may give: a tenant's admin only its own."""
    mine = TENANT_ROLES if actor.tenant is not None else Role.values
    if role not in mine:
        checks.add("role", f"{role!r} is not one of {', '.join(mine)}")
        return
    if (tenant is not None) != (role in TENANT_ROLES):
        checks.add("tenant", "is needed for this role" if tenant is None else f"people of a tenant are no {role}")
    elif tenant is not None and (actor.tenant not in (None, tenant) or tenant_id_of(tenant) is None):
        checks.add("tenant", f"no tenant {tenant!r}")


def tenant_id_of(reference: str) -> str | None:
    """Id of the tenant of this id or short name, None where there is none."""
    rows = User._meta.get_field("tenant").related_model._default_manager.filter(deleted_at=None)
    named = Q(pk=without_nul(reference)) | Q(slug=without_nul(reference))
    found: str | None = rows.filter(named).values_list("pk", flat=True).first()
    return found


def checked_email(checks: Checks, email: str) -> str:
    """In lower case, without white space around it."""
    email = email.strip().lower()
    try:
        validate_email(email)
    except ValidationError:
        checks.add("email", f"{email!r} is not an email address")
    return email


@use_case(scope=Scope.MEMBERS)
def create_user(*, actor: Actor, email: str, role: str, name: str = "", tenant: str | None = None) -> tuple[User, str]:
    """A new account and its one-time password, which the first sign-in replaces."""
    checks = Checks()
    email = checked_email(checks, email)
    check_role(checks, actor=actor, role=role, tenant=tenant)
    checks.done()
    if User.objects.filter(email=email).exists():
        raise Conflict(f"an account for {email} exists")
    password = secrets.one_time_password()
    fields = {"role": role, "tenant_id": tenant, "name": name, "must_change_password": True}
    user = User.objects.create_user(email, password, **fields)
    record_about(actor, "user.created", user, after=user_fields(user))
    return user, password


def record_about(
    actor: Actor,
    action: str,
    user: User,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    record(
        actor=actor,
        action=action,
        object_type="user",
        object_id=user.id,
        tenant=user.tenant_id or "",
        before=before,
        after=after,
    )


def _locked(actor: Actor, user_id: str, expected_version: int | None = None) -> User:
    return lock_version(visible(User.objects.all(), actor=actor), "member", user_id, expected_version)


@use_case(scope=Scope.MEMBERS)
def reset_password(*, actor: Actor, user_id: str, expected_version: int | None = None) -> str:
    """A new one-time password; whoever is signed in under the old one is signed out.

    Raises:
        Conflict: the account's tenant is deleted.
    """
    user = _locked(actor, user_id, expected_version)
    if user.tenant is not None and user.tenant.deleted_at is not None:
        raise Conflict(f"the tenant of {user.email} is deleted: give another one first")
    password = secrets.one_time_password()
    user.set_password(password)
    user.must_change_password = True
    user.is_active = True
    user.version += 1
    user.save()
    record_about(actor, "user.password_reset", user)
    return password


class UserChanges(TypedDict, total=False):
    role: str
    tenant: str | None
    is_active: bool
    name: str
    managed_by: str


@use_case(scope=Scope.MEMBERS)
def update_user(
    *, actor: Actor, user_id: str, expected_version: int | None = None, **changes: Unpack[UserChanges]
) -> User:
    """Change role and tenant, name, or whether the account is open. The last active owner stays one.

    Sessions and tokens act by the new role at once; tokens of one who changes tenant are revoked.
    """
    user = _locked(actor, user_id, expected_version)
    before = user_fields(user)
    checks = Checks()
    user.role = changes.get("role", user.role)
    # A role of the platform leaves the tenant behind without being told to.
    kept = user.tenant_id if user.role in TENANT_ROLES else None
    wanted = changes.get("tenant", kept)
    user.tenant_id = (tenant_id_of(wanted) or wanted) if wanted else None
    user.is_active = changes.get("is_active", user.is_active)
    user.name = changes.get("name", user.name)
    user.managed_by = changes.get("managed_by", user.managed_by)
    checks.manager(user.managed_by)
    if {"role", "tenant"} & changes.keys() or (user.is_active and not before["is_active"]):
        check_role(checks, actor=actor, role=user.role, tenant=user.tenant_id)
    checks.done()
    after = user_fields(user)
    if before["role"] == Role.OWNER and before["is_active"] and not (user.role == Role.OWNER and user.is_active):
        keep_an_owner(user)
    if after != before:
        if {"role", "tenant"} & changes.keys():
            # Somebody has decided; groups elsewhere do no longer.
            user.is_role_by_group = False
        if user.tenant_id != before["tenant"]:
            revoked = OperatorToken.objects.filter(user=user, revoked_at=None).update(revoked_at=utc_now())
            after = {**after, "tokens_revoked": revoked}
        user.version += 1
        user.save()
        record_about(actor, "user.updated", user, before=before, after=after)
    return user


def close_people(actor: Actor, tenant: Any) -> dict[str, Any]:
    """Close the accounts and invitations of a tenant that is being deleted; returns them for the audit entry."""
    now = utc_now()
    people = User.objects.select_for_update().filter(tenant=tenant, is_active=True).order_by("id")
    closed = list(people.values_list("id", flat=True))
    User.objects.filter(pk__in=closed).update(is_active=False, version=F("version") + 1)
    OperatorToken.objects.filter(user__tenant=tenant, revoked_at=None).update(revoked_at=now)
    invitations = Invitation.objects.filter(tenant=tenant, accepted_at=None, revoked_at=None).order_by("id")
    revoked = list(invitations.values_list("id", flat=True))
    Invitation.objects.filter(pk__in=revoked).update(revoked_at=now)
    return {"accounts_closed": closed, "invitations_revoked": revoked}


def keep_an_owner(user: User) -> None:
    # Locking all of them makes two simultaneous demotions wait for each other.
    others = User.objects.select_for_update().filter(role=Role.OWNER, is_active=True).exclude(pk=user.pk)
    if not list(others.order_by("id")):
        raise Conflict("the last active owner cannot be demoted, closed or removed")


@use_case(scope=Scope.MEMBERS)
def remove_user(*, actor: Actor, user_id: str, expected_version: int | None = None) -> None:
    """Delete an account with its tokens and sessions; the audit log keeps what was done under it."""
    user = _locked(actor, user_id, expected_version)
    if user.id == actor.id:
        raise Conflict("you cannot remove yourself")
    if user.role == Role.OWNER and user.is_active:
        keep_an_owner(user)
    before = user_fields(user)
    OperatorToken.objects.filter(user=user).delete()
    user_id, tenant = user.id, user.tenant_id or ""
    user.delete()
    record(actor=actor, action="user.removed", object_type="user", object_id=user_id, tenant=tenant, before=before)


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


@use_case(scope=Scope.TENANT_WRITE)
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
    # A token acts for one side only: scopes of the platform, or those of the holder's tenant.
    if any((scope in TENANT_SCOPES) != (user.tenant_id is not None) for scope in scopes):
        raise NotAllowed(f"{user.email} cannot hold the scopes {', '.join(scopes)}")
    for scope in scopes:
        actor.require(Scope(scope))
    secret, public_id = secrets.generate_token("flt")
    token = OperatorToken.objects.create(
        user=user,
        name=name,
        public_id=public_id,
        digest=secrets.digest(secret),
        pepper_version=settings.KEY_PEPPER_VERSION,
        scopes=sorted(set(scopes)),
        expires_at=expires_at,
    )
    record(
        actor=actor,
        action="token.issued",
        object_type="token",
        object_id=token.id,
        tenant=user.tenant_id or "",
        after=token_fields(token),
    )
    return token, secret


@use_case(scope=Scope.TENANT_WRITE)
def revoke_token(*, actor: Actor, token_id: str) -> OperatorToken:
    """Revoke at once; revoking again changes nothing."""
    rows = visible(OperatorToken.objects.select_related("user").select_for_update(of=("self",)), actor=actor)
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
            tenant=token.user.tenant_id or "",
            before=before,
            after=token_fields(token),
        )
    return token


@use_case(scope=Scope.MEMBERS)
def drop_second_factor(*, actor: Actor, user: User) -> None:
    """Signing in asks for the password only, until another device is enrolled."""
    user.totp_secret, user.totp_step, user.recovery_digests = None, 0, []
    user.version += 1
    user.save(update_fields=["totp_secret", "totp_step", "recovery_digests", "version"])
    record_about(actor, "user.second_factor_reset", user)


def bootstrap_operator(*, email: str, is_reset: bool) -> str | None:
    """One-time password of the owner ``email``: made if there is none, reset if asked; None if it exists already."""
    actor = system_actor("bootstrap_operator")
    with transaction.atomic():
        user = User.objects.filter(email=email.strip().lower()).first()
        if user is None:
            return create_user(actor=actor, email=email, role=Role.OWNER)[1]
        if not is_reset:
            return None
        update_user(actor=actor, user_id=user.id, role=Role.OWNER, is_active=True)
        if user.has_second_factor:
            drop_second_factor(actor=actor, user=user)
        return reset_password(actor=actor, user_id=user.id)
