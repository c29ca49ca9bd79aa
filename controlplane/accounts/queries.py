"""Reads of people and their tokens."""

from __future__ import annotations

from django.db.models import Q, QuerySet, TextField, Value
from django.db.models.functions import Cast, Coalesce

from controlplane.accounts.models import Invitation, OperatorToken, Role, User
from controlplane.common.access import visible
from controlplane.common.actor import Actor
from controlplane.common.sorting import SortKey


def tokens(*, actor: Actor) -> QuerySet[OperatorToken]:
    """Tokens of everybody, or of the own tenant's people: a colleague's must not outlive them."""
    return visible(OperatorToken.objects.select_related("user"), actor=actor).order_by("-id")


def first_operator() -> User | None:
    """The longest-standing active owner, or without one operator."""
    people = User.objects.filter(role__in=(Role.OWNER, Role.OPERATOR), is_active=True)
    return people.order_by("-role", "id").first()


def has_anybody_signed_in() -> bool:
    """False on an installation that nobody has used yet."""
    return User.objects.exclude(last_login=None).exists()


SORTED_BY = {
    "email": SortKey(by="email"),
    "name": SortKey(by="name"),
    "role": SortKey(by="role"),
    "tenant": SortKey(by=Coalesce("tenant__slug", Value(""))),
    "last_login": SortKey(by=Coalesce(Cast("last_login", TextField()), Value("", TextField()))),
}
"""What ``members`` may be sorted by."""


def members(*, actor: Actor, search: str = "") -> QuerySet[User]:
    """Everybody's accounts, or those of the own tenant.

    Args:
        search: a part of the email or name, or a tenant's short name; "" for all.
    """
    rows = visible(User.objects.select_related("tenant"), actor=actor)
    if search:
        rows = rows.filter(Q(email__icontains=search) | Q(name__icontains=search) | Q(tenant__slug=search))
    return rows.order_by("email")


def invitations(*, actor: Actor) -> QuerySet[Invitation]:
    """Invitations into the platform, or into the own tenant; used and revoked ones included."""
    return visible(Invitation.objects.select_related("tenant"), actor=actor).order_by("-id")
