"""Reads of people and their tokens."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.accounts.models import OperatorToken, User
from controlplane.common.actor import Actor, Scope


def tokens(*, actor: Actor) -> QuerySet[OperatorToken]:
    """Tokens of everybody: an operator must be able to revoke what a colleague left behind."""
    actor.require(Scope.READ)
    return OperatorToken.objects.select_related("user").order_by("-id")


def first_operator() -> User | None:
    """The longest-standing active operator."""
    return User.objects.filter(role="operator", is_active=True).order_by("id").first()
