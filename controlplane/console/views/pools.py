"""Pools: the policy that shares them, and the TGI servers that make them up."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.common.actor import Actor, Scope
from controlplane.common.errors import Invalid
from controlplane.common.validation import get_or_not_found, without_nul
from controlplane.console.frame import Section, VersionedForm, act, actor_of, apply, number_input, section, signed_in
from controlplane.console.pickers import TenantField, named_tenant
from controlplane.fleet import actions, brakes, queries
from controlplane.fleet.fairness import bound_if, fairness_of
from controlplane.fleet.models import Backend, Pool
from controlplane.tenants.queries import weights
from router_ext.core.config import KNOBS, SECTIONS, Knob

GUARD_FIELDS = ("is_guarded", "vocabulary", "takes_grammars")
MAX_TENANTS = 200
"""Rows of a page."""


def _policy_choices() -> list[tuple[str, str]]:
    return [(name, f"{name}: {page.summary}") for name, page in queries.policy_pages().items()]


def _knob_field(knob: Knob) -> forms.Field:
    """An empty field means the default, so that a pool follows it when it changes."""
    text = f"{knob.help} {knob.range_text[:1].upper()}{knob.range_text[1:]}; empty: {knob.default}."
    if knob.policies:
        text += f" Read by {', '.join(knob.policies)} only."
    stated: dict[str, Any] = {"required": False, "label": knob.label, "help_text": text}
    match knob.kind:
        case "boolean":
            return forms.TypedChoiceField(
                choices=[("", "default"), ("true", "yes"), ("false", "no")],
                coerce=lambda word: word == "true",
                empty_value=None,
                **stated,
            )
        case "choice":
            return forms.ChoiceField(choices=[("", "default"), *((word, word) for word in knob.choices)], **stated)
        case "integer":
            return forms.IntegerField(widget=_number_input(knob, "1"), **stated)
        case _:
            return forms.FloatField(widget=_number_input(knob, "any"), **stated)


def _number_input(knob: Knob, step: str) -> forms.NumberInput:
    return number_input(knob.low, knob.high, step=step, placeholder=f"{knob.default:g}")


class PoolForm(VersionedForm):
    """Name, words and policy of a pool, then its knobs as fields ``scheduling.<name>``."""

    name = forms.CharField(max_length=200, help_text="The model's name, as requests say it; 1 to 200 characters.")
    aliases = forms.CharField(required=False, help_text="Other names for it, separated by commas.")
    tokenizer_path = forms.CharField(
        required=False,
        help_text="A tokenizer.json on the routers' machines; without it every prompt costs a round trip.",
    )
    policy = forms.ChoiceField(
        choices=_policy_choices,
        initial="slo-fair",
        widget=forms.RadioSelect,
        help_text="Whose turn it is when the hardware is full. Queues and counters survive a change.",
    )

    is_guarded = forms.BooleanField(
        required=False,
        initial=True,
        label="Prove grammars before a backend sees them",
        help_text="What would stall or kill a backend is refused with the figures. Off: backends are told apart from "
        "bad requests only after they fell.",
    )
    vocabulary = forms.IntegerField(
        required=False,
        help_text="Tokens of the model: what a grammar costs grows with them. Used where there is no tokenizer file; "
        f"1 to 10,000,000, empty: {actions.VOCABULARY:,}.",
        widget=number_input(1, 10_000_000, placeholder=str(actions.VOCABULARY)),
    )
    takes_grammars = forms.BooleanField(
        required=False,
        initial=True,
        label="Take grammars, response formats and tools",
        help_text="Off: requests that have one end within two seconds, and more are refused.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, knob in KNOBS.items():
            self.fields[f"scheduling.{name}"] = _knob_field(knob)

    def plain_fields(self) -> list[forms.BoundField]:
        """The fields under no heading."""
        fields = (field for field in self.visible_fields() if not field.name.startswith("scheduling."))
        return [field for field in fields if field.name not in GUARD_FIELDS]

    def guard_fields(self) -> list[forms.BoundField]:
        """What is asked of grammars."""
        return [self[name] for name in GUARD_FIELDS]

    def sections(self) -> list[Section]:
        """The knobs under their headings."""
        found = []
        for title in SECTIONS:
            fields = [self[f"scheduling.{name}"] for name, knob in KNOBS.items() if knob.section == title]
            if fields:
                found.append(section(title, fields))
        return found

    def values(self) -> dict[str, Any]:
        values = super().values()
        values["aliases"] = [word.strip() for word in values["aliases"].split(",") if word.strip()]
        if values["vocabulary"] is None:
            values["vocabulary"] = actions.VOCABULARY
        stated = {name: values.pop(f"scheduling.{name}") for name in KNOBS}
        values["scheduling"] = {name: value for name, value in stated.items() if value not in (None, "")}
        return values


def _shown(pool: Pool) -> dict[str, Any]:
    """A pool as the form's initial values."""
    fields = actions.pool_fields(pool)
    knobs = {f"scheduling.{name}": _word(value) for name, value in fields.pop("scheduling").items()}
    return {**fields, **knobs, "aliases": ", ".join(fields["aliases"]), "version": pool.version}


def _word(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


class BackendForm(VersionedForm):
    name = forms.SlugField(max_length=63, help_text="1 to 63 of a-z, 0-9 and -.")
    url = forms.CharField(max_length=500, label="URL", help_text="Such as http://10.0.0.7:3000.")
    kv_tokens = forms.IntegerField(
        required=False,
        label="KV tokens",
        help_text="TGI's log says “Setting max batch total tokens to N”. "
        "Empty: the limit of /info, which is safe but small. At least two blocks (2 where a block is 1), at most "
        "1,000,000,000.",
        widget=number_input(2, 1_000_000_000, placeholder="of /info"),
    )
    block_size = forms.IntegerField(
        initial=1,
        help_text="TGI's log says “KV-cache blocks: N, size: B”. flashinfer 1, paged 16, flashdecoding 256; "
        "1 to 1,024.",
        widget=number_input(1, 1_024),
    )
    prefill_budget_tokens = forms.IntegerField(
        initial=4_096,
        help_text="TGI's --max-batch-prefill-tokens (1 to 10,000,000).",
        widget=number_input(1, 10_000_000),
    )
    is_chunked = forms.BooleanField(
        required=False,
        initial=True,
        label="Chunked prefill is on",
        help_text="As TGI's log says at its start. On: a long prompt is read in pieces beside what is being generated.",
    )
    speculate = forms.IntegerField(initial=0, help_text="TGI's --speculate (0 to 64).", widget=number_input(0, 64))
    is_cordoned = forms.BooleanField(
        required=False,
        label="Cordoned: finish what runs, start nothing new",
        help_text="What could be resumed elsewhere stays here until its end; “Drain” moves it.",
    )
    takes_grammars = forms.BooleanField(
        required=False,
        initial=True,
        label="Takes grammars, response formats and tools",
        help_text="Off keeps what may stall a server away from this one, as long as another of the pool takes them.",
    )
    api_key_name = forms.CharField(
        required=False,
        label="API key name",
        max_length=100,
        help_text="Name of the secret that the routers send as this server's API key; empty for none.",
    )


def _pool(request: HttpRequest, pool_id: str) -> Pool:
    return get_or_not_found(queries.pools(actor=actor_of(request)), "pool", pool_id)


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    return render(request, "console/pools.html", {"pools": queries.pools(actor=actor_of(request))})


@require_http_methods(["GET", "POST"])
@signed_in
def create(request: HttpRequest) -> HttpResponseBase:
    form = PoolForm(request.POST or None)
    made: list[Pool] = []

    def change() -> str:
        made.append(actions.create_pool(actor=actor_of(request), **form.values()))
        return f"Pool {made[0].name} created. Add its TGI servers."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:pool", made[0].id)
    return render(request, "console/pool_new.html", {"form": form})


@require_safe
@signed_in
def policies(request: HttpRequest) -> HttpResponseBase:
    """What each policy does, promises and costs, in its own words."""
    actor_of(request).require(Scope.READ)
    return render(request, "console/policies.html", {"policies": queries.policy_pages().values()})


@require_http_methods(["GET", "POST"])
@signed_in
def detail(request: HttpRequest, pool_id: str) -> HttpResponseBase:
    """Policy and knobs of a pool, and its backends."""
    pool = _pool(request, pool_id)
    form = PoolForm(request.POST or None, initial=_shown(pool))

    def change() -> str:
        actions.update_pool(
            actor=actor_of(request), pool_id=pool.id, expected_version=form.shown_version, **form.values()
        )
        return "Saved. Routers apply it within two seconds; queues and counters are kept."

    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect("console:pool", pool.id)
    context = {
        "pool": pool,
        "form": form,
        "backends": pool.backends.all(),
        "fairness": fairness_of(pool),
    }
    return render(request, "console/pool.html", context)


@require_safe
@signed_in
def bound(request: HttpRequest, pool_id: str) -> HttpResponseBase:
    """The bound of what the form holds at this moment, beside the one in force; nothing is saved."""
    pool = _pool(request, pool_id)
    in_force = fairness_of(pool)
    form = PoolForm(request.GET)
    problems: list[str] = []
    edited = None
    if form.is_valid():
        values = form.values()
        try:
            edited = bound_if(pool, policy=values["policy"], scheduling=values["scheduling"])
        except Invalid as problem:
            problems = [problem.message]
    else:
        problems = [f"{form.fields[name].label or name}: {texts[0]}" for name, texts in form.errors.items()]
    context = {"in_force": in_force, "edited": edited, "problems": problems}
    return render(request, "console/fragments/edited_bound.html", context)


class PairForm(forms.Form):
    """Two tenants of whom the bound shall be shown."""

    first = TenantField(label="Tenant", required=False)
    second = TenantField(label="and tenant", required=False)

    def pair(self, actor: Actor) -> tuple[str, str] | None:
        """The ids of the two, if both are chosen."""
        if not self.is_valid():
            return None
        first, second = (named_tenant(self, name, actor=actor) for name in ("first", "second"))
        return None if first is None or second is None else (first.id, second.id)


@require_safe
@signed_in
def fairness(request: HttpRequest, pool_id: str) -> HttpResponseBase:
    """The bound of a pool taken apart, by tenant, and for two tenants. ``after``: the short name before the page's."""
    pool = _pool(request, pool_id)
    form = PairForm(request.GET if "first" in request.GET else None)
    tenants = weights(after=without_nul(request.GET.get("after", "")), limit=MAX_TENANTS + 1)
    shown = fairness_of(
        pool, pair=form.pair(actor_of(request)) if form.is_bound else None, tenants=tenants[:MAX_TENANTS]
    )
    more = tenants[MAX_TENANTS - 1].slug if len(tenants) > MAX_TENANTS else None
    context = {"pool": pool, "fairness": shown, "form": form, "next": more}
    return render(request, "console/fairness.html", context)


@require_http_methods(["GET", "POST"])
@signed_in
def add_backend(request: HttpRequest, pool_id: str) -> HttpResponseBase:
    pool = _pool(request, pool_id)
    form = BackendForm(request.POST or None)

    def change() -> str:
        return f"Backend {actions.create_backend(actor=actor_of(request), pool=pool.id, **form.values()).name} added."

    return _backend_page(request, pool, form, change, f"New backend of {pool.name}", "Add backend")


@require_http_methods(["GET", "POST"])
@signed_in
def backend(request: HttpRequest, pool_id: str, backend_id: str) -> HttpResponseBase:
    pool = _pool(request, pool_id)
    row: Backend = get_or_not_found(queries.backends(actor=actor_of(request)), "backend", backend_id)
    form = BackendForm(request.POST or None, initial={**actions.backend_fields(row), "version": row.version})

    def change() -> str:
        actions.update_backend(
            actor=actor_of(request), backend_id=row.id, expected_version=form.shown_version, **form.values()
        )
        return f"Backend {row.name} saved."

    here = {"backend": row, "occupancy": brakes.occupancy(actor=actor_of(request), backend_id=row.id)}
    return _backend_page(request, pool, form, change, f"Backend {row.name}", "Save", **here)


@require_safe
@signed_in
def backend_fragment(request: HttpRequest, pool_id: str, backend_id: str) -> HttpResponseBase:
    """What runs on a backend, for its page."""
    shown = brakes.occupancy(actor=actor_of(request), backend_id=backend_id)
    return render(request, "console/fragments/occupancy.html", {"occupancy": shown})


def _backend_page(
    request: HttpRequest, pool: Pool, form: BackendForm, change: Any, heading: str, submit: str, **here: Any
) -> HttpResponseBase:
    back = reverse("console:pool", args=[pool.id])
    if request.method == "POST" and form.is_valid() and apply(request, form, change):
        return redirect(back)
    lead = "What the ledger needs to know of this TGI server; /info tells only its two limits."
    context = {"form": form, "heading": heading, "submit": submit, "back": back, "lead": lead, "pool": pool, **here}
    return render(request, "console/backend.html" if here else "console/form.html", context)


@require_POST
@signed_in
def delete_backend(request: HttpRequest, pool_id: str, backend_id: str) -> HttpResponseBase:
    def change() -> str:
        actions.delete_backend(actor=actor_of(request), backend_id=backend_id)
        return "Backend taken out; what ran on it goes on elsewhere."

    return act(request, change, reverse("console:pool", args=[pool_id]))
