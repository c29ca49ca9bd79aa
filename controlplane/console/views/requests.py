"""What waits or runs now and what ended: searched, and each with its timeline and why it waited."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.db.models import Q
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.common.actor import Actor, Scope
from controlplane.common.clock import utc_now
from controlplane.common.errors import Invalid
from controlplane.common.validation import without_nul
from controlplane.console import charts
from controlplane.console.frame import actor_of, of_tenants
from controlplane.fleet import brakes
from controlplane.fleet import queries as fleet_queries
from controlplane.keys.queries import keys
from controlplane.tenants.queries import booked_tenant, names_of
from controlplane.usage import queries as usage_queries

MAX_CANCELLED = 100
PAGE = 50
DEFAULT_SPAN = timedelta(days=1)
STATES = (("", "any"), ("queued", "waits"), ("running", "runs"), ("ended", "has ended"))


class SearchForm(forms.Form):
    """Which requests; an empty field lets all through."""

    id = forms.CharField(required=False, max_length=128, label="Request id")
    tenant = forms.CharField(
        required=False, max_length=200, widget=forms.TextInput(attrs={"placeholder": "id, short name or name"})
    )
    key = forms.CharField(required=False, max_length=60, widget=forms.TextInput(attrs={"placeholder": "public id"}))
    state = forms.ChoiceField(required=False, choices=STATES)
    outcome = forms.ChoiceField(required=False, choices=[("", "any"), *((o, o) for o in usage_queries.OUTCOMES)])
    since = forms.DateTimeField(
        required=False, label="Arrived from", widget=forms.DateTimeInput(attrs={"type": "datetime-local"})
    )
    until = forms.DateTimeField(
        required=False, label="and before", widget=forms.DateTimeInput(attrs={"type": "datetime-local"})
    )

    def __init__(self, data: Any, *, actor: Actor) -> None:
        super().__init__(data, auto_id="find_%s")
        self._actor = actor
        if actor.tenant is not None:
            del self.fields["tenant"]

    def clean_tenant(self) -> str:
        """Its id, "" for all."""
        word = self.cleaned_data["tenant"].strip()
        if not word:
            return ""
        found = booked_tenant(word, actor=self._actor)
        if found is None:
            raise forms.ValidationError(f"no tenant {word!r}, or several of that name")
        return found

    def clean_key(self) -> Any:
        """The key, None for all."""
        word = without_nul(self.cleaned_data["key"]).strip()
        if not word:
            return None
        found = keys(actor=self._actor).filter(Q(public_id=word) | Q(pk=word)).first()
        if found is None:
            raise forms.ValidationError(f"no key {word!r}")
        return found

    def clean_since(self) -> datetime | None:
        return _moment(self.cleaned_data["since"])

    def clean_until(self) -> datetime | None:
        return _moment(self.cleaned_data["until"])

    def clean_id(self) -> str:
        return without_nul(self.cleaned_data["id"]).strip()


def _moment(given: datetime | None) -> datetime | None:
    """An instant with which one can still reckon."""
    if given is not None and not 2000 <= given.year <= 9000:
        raise forms.ValidationError(f"a year from 2000 to 9000, not {given.year}")
    return given


@require_safe
@of_tenants
def index(request: HttpRequest) -> HttpResponseBase:
    """Those of one id with all that is known of them, or what the other fields let through, newest first."""
    actor = actor_of(request)
    form = SearchForm(request.GET, actor=actor)
    is_valid = form.is_valid()
    asked = form.cleaned_data if is_valid else {}
    wanted = asked.get("id", "")
    under_way = _narrowed(brakes.under_way(actor=actor), asked) if is_valid else []
    found = usage_queries.explained_requests(actor=actor, request_id=wanted) if wanted else []
    ended = usage_queries.Found(events=[], following="")
    if is_valid and not wanted and asked["state"] in ("", "ended"):
        try:
            ended = _ended(actor, asked, request.GET.get("cursor", ""))
        except Invalid as problem:
            form.add_error(None, problem.message)
    is_of_platform = actor.tenant is None
    servers: dict[str, str] = {}
    if is_of_platform and (found or under_way):
        servers = {b.id: b.name for b in fleet_queries.backends(actor=actor)}
    shown_tenants = {each.event.tenant for each in found} | {each.live.tenant for each in under_way}
    shown_tenants |= {event.tenant for event in ended.events}
    names = names_of(shown_tenants)
    booked = {each.event.event for each in found}
    rows: list[dict[str, Any]] = [
        {
            "row": each,
            "tenant": names.get(each.live.tenant, each.live.tenant),
            "where": servers.get(each.live.backend or "", each.live.backend),
        }
        for each in under_way
    ]
    live = {each.live.event for each in under_way if wanted and each.is_called(wanted)} - booked
    cancelled = list(brakes.cancellations(actor=actor)[:MAX_CANCELLED])
    given = {name: value for name, value in request.GET.items() if value and name in form.fields}
    context = {
        "form": form,
        "wanted": wanted,
        "found": [_entry(each, names.get(each.event.tenant, each.event.tenant), servers) for each in found],
        "under_way": [] if asked.get("state") == "ended" else rows,
        "live": [each for each in rows if each["row"].live.event in live],
        "ended": [_line(event, names) for event in ended.events],
        "shows_ended": is_valid and not wanted and asked["state"] in ("", "ended"),
        "next_query": urlencode({**given, "cursor": ended.following}) if ended.following else "",
        "cancelled": cancelled,
        "was_cancelled": any(each.request == wanted for each in cancelled),
        "may_cancel": actor.holds(Scope.TENANT_WRITE),
        "is_narrowed": bool(given),
    }
    return render(request, "console/requests.html", context, status=200 if form.is_valid() else 422)


def _ended(actor: Actor, asked: dict[str, Any], cursor: str) -> usage_queries.Found:
    key, now = asked["key"], utc_now()
    until: datetime = asked["until"] or now + timedelta(minutes=1)
    since: datetime = asked["since"] or until - DEFAULT_SPAN
    return usage_queries.search_events(
        actor=actor,
        from_at=since.astimezone(UTC),
        to_at=until.astimezone(UTC),
        # A key is its tenant's, whose events stand together in an index.
        tenant=asked.get("tenant") or ("" if key is None else key.tenant_id),
        key="" if key is None else key.id,
        outcome=asked["outcome"],
        after=cursor,
        limit=PAGE,
    )


def _narrowed(under_way: list[brakes.UnderWay], asked: dict[str, Any]) -> list[brakes.UnderWay]:
    """Those of the requests under way that the search lets through; an outcome is what none of them has yet."""
    tenant, key, wanted = asked.get("tenant", ""), asked["key"], asked["id"]
    since, until = asked["since"], asked["until"]
    return [
        each
        for each in under_way
        if tenant in ("", each.live.tenant)
        and (key is None or each.live.key == key.id)
        and asked["state"] in ("", "ended", each.state)
        and not asked["outcome"]
        and (not wanted or each.is_called(wanted))
        and (since is None or each.arrived_at >= since)
        and (until is None or each.arrived_at < until)
    ]


def _line(event: Any, names: dict[str, str]) -> dict[str, Any]:
    first = event.first_token_at
    return {
        "event": event,
        "tenant": names.get(event.tenant, event.tenant),
        "waited_s": ((event.first_dispatch_at or event.ended_at) - event.arrived_at).total_seconds(),
        "ttft_s": None if first is None else (first - event.arrived_at).total_seconds(),
    }


def _entry(found: usage_queries.ExplainedRequest, tenant: str, servers: dict[str, str]) -> dict[str, Any]:
    kept = found.explanation
    moments = [] if kept is None else kept.timeline
    return {
        "found": found,
        "tenant": tenant,
        "reasons": [] if kept is None else [r["text"] for r in kept.reasons] or kept.lines,
        "timeline": [
            {**m, "what": m["step"].replace("_", " "), "where": servers.get(m["backend"], m["backend"] or "")}
            for m in moments
        ],
        "chart": charts.timeline(title="When it waited and where it ran", moments=moments, names=servers),
    }
