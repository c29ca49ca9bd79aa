"""Use cases of invitations: one email, one role, one link, used once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError

from controlplane.accounts.actions import check_role, checked_email, tenant_id_of, user_fields
from controlplane.accounts.models import Invitation, User
from controlplane.audit.actions import record
from controlplane.common import secrets
from controlplane.common.access import visible
from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict, NotFound
from controlplane.common.use_case import use_case
from controlplane.common.validation import Checks, get_or_not_found

OPEN_FOR = timedelta(days=7)
PREFIX = "fli"


def invitation_fields(invitation: Invitation) -> dict[str, Any]:
    return {
        "email": invitation.email,
        "role": invitation.role,
        "tenant": invitation.tenant_id,
        "expires_at": invitation.expires_at,
        "revoked_at": invitation.revoked_at,
        "managed_by": invitation.managed_by,
    }


@use_case(scope=Scope.MEMBERS)
def invite(
    *, actor: Actor, email: str, role: str, tenant: str | None = None, managed_by: str = ""
) -> tuple[Invitation, str]:
    """An invitation and the text of its link, which is shown this once and kept nowhere.

    A tenant's admin invites into the own tenant, and learns of an address that is another's no more than that: neither
    whose, nor whether it has an account or an invitation. An invitation that is still open for the email is revoked:
    the last one counts.

    Args:
        tenant: id or short name. managed_by: as of ``Managed``; the account carries it on.
    """
    checks = Checks()
    email = checked_email(checks, email)
    tenant = (tenant_id_of(tenant) or tenant) if tenant else actor.tenant
    check_role(checks, actor=actor, role=role, tenant=tenant)
    checks.manager(managed_by)
    checks.done()
    taken = Conflict(f"{email} cannot be invited: the address is in use elsewhere")
    account = User.objects.filter(email=email).first()
    if account is not None:
        raise Conflict(f"an account for {email} exists") if actor.tenant in (None, account.tenant_id) else taken
    for earlier in Invitation.objects.select_for_update().filter(email=email, accepted_at=None, revoked_at=None):
        # One that has lapsed is nobody's any more.
        if earlier.expires_at > utc_now() and actor.tenant not in (None, earlier.tenant_id):
            raise taken
        _revoke(actor, earlier)
    text, _ = secrets.generate_token(PREFIX)
    invitation = Invitation.objects.create(
        email=email,
        role=role,
        tenant_id=tenant,
        invited_by=actor.label,
        digest=secrets.digest(text),
        pepper_version=settings.KEY_PEPPER_VERSION,
        expires_at=utc_now() + OPEN_FOR,
        managed_by=managed_by,
    )
    record(
        actor=actor,
        action="invitation.created",
        object_type="invitation",
        object_id=invitation.id,
        tenant=tenant or "",
        after=invitation_fields(invitation),
    )
    return invitation, text


def _revoke(actor: Actor, invitation: Invitation) -> None:
    before = invitation_fields(invitation)
    invitation.revoked_at = utc_now()
    invitation.save()
    record(
        actor=actor,
        action="invitation.revoked",
        object_type="invitation",
        object_id=invitation.id,
        tenant=invitation.tenant_id or "",
        before=before,
        after=invitation_fields(invitation),
    )


@use_case(scope=Scope.MEMBERS)
def revoke_invitation(*, actor: Actor, invitation_id: str) -> Invitation:
    """Close an open invitation; doing it again changes nothing."""
    rows = visible(Invitation.objects.select_for_update(), actor=actor)
    invitation = get_or_not_found(rows, "invitation", invitation_id)
    if invitation.accepted_at is not None:
        raise Conflict(f"{invitation.email} has accepted; remove the account instead")
    if invitation.revoked_at is None:
        _revoke(actor, invitation)
    return invitation


def open_invitation(text: str, *, is_locked: bool = False) -> Invitation:
    """The invitation of a link.

    Raises:
        NotFound: unknown, used, revoked or lapsed; they look alike.
    """
    rows = Invitation.objects.select_for_update() if is_locked else Invitation.objects.all()
    open_rows = rows.filter(accepted_at=None, revoked_at=None, expires_at__gt=utc_now())
    found = secrets.holder(open_rows, text) if secrets.is_token(text, PREFIX) else None
    if found is None:
        raise NotFound("This invitation is not open: it was used, taken back, or is older than seven days.")
    return found


def invited(email: str) -> Invitation | None:
    """The open invitation of a verified email, locked."""
    open_rows = Invitation.objects.select_for_update().filter(accepted_at=None, revoked_at=None)
    return open_rows.filter(email=email, expires_at__gt=utc_now()).first()


def take_up(invitation: Invitation, *, name: str = "", password: str | None = None) -> User:
    """The account of a locked invitation, which is used up by it. Without a password none ever opens the account."""
    if User.objects.filter(email=invitation.email).exists():
        raise Conflict(f"an account for {invitation.email} exists")
    fields = {
        "role": invitation.role, "tenant_id": invitation.tenant_id, "name": name, "managed_by": invitation.managed_by
    }  # fmt: skip
    user = User.objects.create_user(invitation.email, password, **fields)
    invitation.accepted_at = utc_now()
    invitation.save()
    record(
        actor=user.actor,
        action="invitation.accepted",
        object_type="user",
        object_id=user.id,
        tenant=user.tenant_id or "",
        after={**user_fields(user), "invitation": invitation.id},
    )
    return user


@use_case(scope=None)
def accept_invitation(*, actor: Actor, text: str, name: str, password: str) -> User:
    """The account of a link, under the password its holder chooses.

    Raises:
        NotFound: the invitation is not open. Invalid: the password is too easy.
    """
    invitation = open_invitation(text, is_locked=True)
    checks = Checks()
    try:
        validate_password(password, User(email=invitation.email, name=name))
    except ValidationError as error:
        for message in error.messages:
            checks.add("password", message)
    if name and (len(name) > 200 or not name.isprintable()):
        checks.add("name", "at most 200 printable characters")
    checks.done()
    return take_up(invitation, name=name.strip(), password=password)
