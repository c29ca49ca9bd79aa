"""API tokens of operators: issue one for oneself, revoke anybody's."""

from __future__ import annotations

from typing import Any, cast

from django import forms
from django.db.models import F
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.accounts import actions, queries
from controlplane.accounts.models import User
from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.console.frame import act, actor_of, apply, of_tenants

SHOWN = 100


class TokenForm(forms.Form):
    name = forms.CharField(max_length=200, help_text="What it is for, such as “billing export”.")
    scopes = forms.MultipleChoiceField(
        widget=forms.CheckboxSelectMultiple, help_text="Never more than your own role allows."
    )
    expires_at = forms.DateTimeField(
        required=False, help_text="UTC; empty for never.", widget=forms.DateTimeInput(attrs={"type": "datetime-local"})
    )

    def __init__(self, *args: Any, actor: Actor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        read, write = (Scope.READ, Scope.WRITE) if actor.tenant is None else (Scope.TENANT_READ, Scope.TENANT_WRITE)
        choices = [(read.value, "read"), (write.value, "read and change")]
        if actor.holds(Scope.MEMBERS) and actor.tenant is None:
            choices.append((Scope.MEMBERS.value, "members and roles"))
        self.fields["scopes"].choices = choices  # type: ignore[attr-defined]  # a choice field
        self.fields["scopes"].initial = [read.value]


@require_http_methods(["GET", "POST"])
@of_tenants
def index(request: HttpRequest) -> HttpResponseBase:
    """Live tokens first; the answer to a form is the only page that ever shows a token's text."""
    actor = actor_of(request)
    form = TokenForm(request.POST or None, actor=actor)
    issued: list[str] = []

    def change() -> str:
        token, text = actions.issue_token(actor=actor, user=cast(User, request.user), **form.cleaned_data)
        issued.append(text)
        return f"Token {token.name} issued."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        form = TokenForm(actor=actor)
    rows = queries.tokens(actor=actor).order_by(F("revoked_at").asc(nulls_first=True), "-id")
    context = {"form": form, "text": "".join(issued), "tokens": rows[:SHOWN], "now": utc_now(), "shown": SHOWN}
    return render(request, "console/tokens.html", context)


@require_POST
@of_tenants
def revoke(request: HttpRequest, token_id: str) -> HttpResponseBase:
    def change() -> str:
        return f"Token {actions.revoke_token(actor=actor_of(request), token_id=token_id).name} is revoked."

    return act(request, change, reverse("console:tokens"))
