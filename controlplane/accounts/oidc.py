"""Who of those that sign in elsewhere gets in: people with an account, the invited, and groups that are given a role.

allauth carries the protocol (discovery, state, PKCE, the exchange of the code); who may in is decided here, and nothing
else of allauth opens an account or a session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from django.conf import settings

from controlplane.accounts.actions import checked_email, keep_an_owner, record_about, user_fields
from controlplane.accounts.invitations import invited, take_up
from controlplane.accounts.models import TENANT_ROLES, Role, User
from controlplane.common.actor import Actor, system_actor
from controlplane.common.errors import NotAllowed
from controlplane.common.use_case import use_case
from controlplane.common.validation import Checks

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the provider vouches for. ``email`` is in lower case, "" without one."""

    issuer: str
    subject: str
    email: str = ""
    is_email_verified: bool = False
    name: str = ""
    groups: Sequence[str] = ()


def role_of_groups(groups: Sequence[str]) -> tuple[str, str | None] | None:
    """(role, tenant) of ``FAIRLANE_OIDC_GROUP_ROLES`` for somebody in these groups, the highest that any gives."""
    found = []
    for group, given in settings.OIDC_GROUP_ROLES.items():
        if group not in groups:
            continue
        role, _, slug = given.partition(":")
        tenants = User._meta.get_field("tenant").related_model._default_manager
        tenant = tenants.filter(slug=slug).values_list("id", flat=True).first() if slug else None
        if (tenant is not None) == (role in TENANT_ROLES):
            found.append((Role.values.index(role), role, tenant))
        else:
            logger.warning("oidc.group_without_tenant", group=group, tenant=slug)
    return min(found)[1:] if found else None


@use_case(scope=None)
def admit(*, actor: Actor, identity: Identity) -> User:
    """The account of an identity.

    By what the account was linked to before; else by a verified email, the account or the invitation of it; else by a
    group. A role that a group gave follows the groups at every sign-in.

    Raises:
        NotAllowed: the identity has no access. Conflict: the groups take the role of the last active owner.
    """
    user = _linked(identity) or _by_email(identity)
    of_groups = role_of_groups(identity.groups)
    if user is None and of_groups is not None:
        user = _open(identity, *of_groups)
    if user is None or not user.is_active:
        raise NotAllowed(f"{identity.email or identity.subject} has no access")
    if user.is_role_by_group:
        if of_groups is None:
            raise NotAllowed(f"{user.email} is in no group that has access any more")
        before = user_fields(user)
        user.role, user.tenant_id = of_groups
        if before["role"] == Role.OWNER and user.role != Role.OWNER:
            keep_an_owner(user)
        if user_fields(user) != before:
            user.version += 1
            user.save()
            by = system_actor("sign-in by group")
            record_about(by, "user.updated", user, before=before, after=user_fields(user))
    return user


def _linked(identity: Identity) -> User | None:
    rows = User.objects.select_for_update().filter(oidc_issuer=identity.issuer, oidc_subject=identity.subject)
    return rows.first()


def _by_email(identity: Identity) -> User | None:
    if not identity.is_email_verified or not identity.email:
        return None
    user = User.objects.select_for_update().filter(email=identity.email, oidc_subject="").first()
    if user is None and (invitation := invited(identity.email)) is not None:
        user = take_up(invitation, name=identity.name[:200])
    return _link(user, identity) if user is not None else None


def _open(identity: Identity, role: str, tenant: str | None) -> User | None:
    checks = Checks()
    email = checked_email(checks, identity.email)
    if checks.fields or User.objects.filter(email=email).exists():
        return None
    fields = {"role": role, "tenant_id": tenant, "name": identity.name[:200], "is_role_by_group": True}
    user = User.objects.create_user(email, None, **fields)
    record_about(system_actor("sign-in by group"), "user.created", user, after=user_fields(user))
    return _link(user, identity)


def _link(user: User, identity: Identity) -> User:
    user.oidc_issuer, user.oidc_subject = identity.issuer, identity.subject
    user.save(update_fields=["oidc_issuer", "oidc_subject"])
    after = {"issuer": identity.issuer, "subject": identity.subject}
    record_about(system_actor("sign-in elsewhere"), "user.linked", user, after=after)
    return user
