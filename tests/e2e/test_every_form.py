"""Every form of the console, filled in a real browser: what was typed is there when it is opened again.

Fields are found on the page, so a new one is filled and compared without being named; a new form has to be named in
one of the tables below.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from controlplane.accounts.models import Role
from controlplane.accounts.totp import code, counter
from controlplane.audit.models import AuditEntry
from controlplane.common.clock import utc_now
from controlplane.common.leases import JobState
from controlplane.training.models import Job, Promotion
from controlplane.usage.prices import create_price_list
from tests.support.console_pages import FORMS, NOT_OURS, WIDE, Console, Looking, answers_by_role, is_file
from tests.support.control_plane import (
    make_backend,
    make_group,
    make_hazard,
    make_key,
    make_length_model,
    make_pool,
    make_tenant,
    make_tier,
    make_user,
)

NAMED = str
Filled = dict[str, list[str]]

TODAY = utc_now().date()
GIVEN = {
    "slug": "second-slug", "timezone": "Asia/Kolkata", "tz": "America/St_Johns", "url": "http://10.9.8.7:3001",
    "expires_at": "2027-03-04T05:06", "valid_from": "2026-04-01", "aliases": "first alias, second alias",
    "prices": "2026-03-01, 1, 2, model-x", "currency": "USD", "email": "somebody@example.test",
    "from_day": str(TODAY - timedelta(days=4)), "to_day": str(TODAY - timedelta(days=1)),
    "from": "2026-01-02", "to": "2026-02-03", "since": "2026-01-02T03:04", "until": "2026-02-03T04:05",
}  # fmt: skip
"""What a field of this name takes, where its kind does not say it."""

EDITED = {
    "/tenants/{tenant_id}/": {"tiers": ["spare"], "default_tier": "spare"},
    "/tenants/{tenant_id}/keys/{key_id}/": {},
    "/groups/{group_id}/": {},
    "/tiers/{tier_id}/": {},
    "/pools/{pool_id}/": {},
    "/pools/{pool_id}/backends/{backend_id}/": {"name": "second-name", "is_cordoned": ["on"]},
    "/price-lists/{price_list_id}/": {"name": "second-name"},
    "/members/{member_id}/": {"role": ["tenant_admin"], "tenant": "{other_slug}"},
}
"""Pages with a form that changes what they show, and what its fields take."""

CREATED: dict[str, tuple[str, dict[str, Any]]] = {
    "/tenants/new/": ("", {"slug": "new-tenant", "tiers": ["spare"], "default_tier": "spare"}),
    "/groups/new/": ("", {"name": "new-group"}),
    "/tiers/new/": ("", {"name": "new-tier"}),
    "/pools/new/": ("", {"name": "new/model <b>{{7*7}} שלום", "aliases": "<i>other</i>, new alias"}),
    "/pools/{pool_id}/backends/new/": (
        "",
        {"name": "new-backend", "kv_tokens": "9000", "url": "http://[fd00::7]:3001"},
    ),
    "/price-lists/new/": ("", {"name": "new-list"}),
    "/tenants/{tenant_id}/keys/": ("/tenants/{tenant_id}/", {}),
}
"""Forms that make something: the page they stand on, if that is another, and what their fields take."""

SEARCHES: dict[str, dict[str, Any]] = {
    "/audit/": {},
    "/hazards/": {},
    "/jobs/": {},
    "/members/": {},
    "/pools/{pool_id}/fairness/": {"first": "{tenant_id}", "second": "{other_id}"},
    "/predictor/": {},
    "/requests/": {"tenant": "{slug}", "key": "{public_id}"},
    "/statements/": {},
    "/tenants/": {},
    "/usage/": {},
    "/usage/shares/": {},
}
"""Pages with a form that narrows what they show."""

DONE: list[tuple[str, str, dict[str, Any]]] = [
    ("/hazards/{hazard_id}/resolve/", "/hazards/", {}),
    ("/members/", "/members/", {"role": ["tenant_admin"], "tenant": "{slug}"}),
    ("/pools/{pool_id}/stop-grammars/", "/pools/{pool_id}/", {}),
    ("/pools/{pool_id}/backends/{backend_id}/drain/", "/pools/{pool_id}/backends/{backend_id}/", {}),
    ("/predictor/start/", "/predictor/?pool={pool_id}", {"kind": "mixture"}),
    ("/predictor/start/", "/predictor/?pool={pool_id}", {"kind": "baseline", "only": ""}),
    ("/predictor/promote/", "/predictor/?pool={pool_id}", {"despite_gate": ["on"]}),
    ("/price-lists/{price_list_id}/assign/", "/price-lists/{price_list_id}/", {"tenant": "{slug}"}),
    ("/requests/cancel/", "/requests/?id=req_runs", {}),
    ("/tenants/bulk/", "/tenants/", {"what": "weight", "weight": "7.25", "tier": "", "tenant": ["{tenant_id}"]}),
    ("/tenants/bulk/", "/tenants/", {"what": "tier", "weight": "", "tier": "spare", "tenant": ["{tenant_id}"]}),
    ("/tenants/{tenant_id}/state/", "/tenants/{tenant_id}/", {}),
    ("/tenants/{tenant_id}/stop/", "/tenants/{tenant_id}/", {}),
    ("/tokens/", "/tokens/", {"scopes": ["admin.write"]}),
]
"""Forms whose fields the audit log has afterwards: where they stand, and what their fields take."""

OF_THE_ACCOUNT = {"/invitations/{text}/", "/password/", "/second-factor/", "/sign-in/"}


@pytest.fixture(scope="module")
def looking(console: Console) -> Looking:
    looking = console.look("owner")
    looking.context.add_init_script(path=FORMS)
    return looking


@pytest.fixture
def ids(console: Console) -> dict[str, str]:
    """Objects of this test alone."""
    actor = console.actor
    tenant = make_tenant(actor, tiers=["standard", "spare"])
    pool = make_pool(actor)
    backend, member = make_backend(actor, pool), make_user(role=Role.TENANT_MEMBER, tenant=tenant.id)
    key, _ = make_key(actor, tenant, pool)
    make_length_model(pool.id)
    Job.objects.exclude(state=JobState.CANCELLED).update(state=JobState.CANCELLED)  # of a kind one runs at a time
    price_list = create_price_list(actor=actor, name=f"list-{tenant.slug}", currency="EUR")
    return {
        **console.world.ids, "other_slug": console.world.tenant.slug, "judged_pool": console.world.pool.id,
        "other_id": console.world.tenant.id, "public_id": key.public_id,
        "tenant_id": tenant.id, "slug": tenant.slug, "pool_id": pool.id, "member_id": member.id,
        "backend_id": backend.id, "key_id": key.id, "price_list_id": price_list.id, "group_id": make_group(actor).id,
        "tier_id": make_tier(actor, f"tier-{tenant.slug}").id,
        "hazard_id": make_hazard(backend=backend.id, tenant=tenant.id).id,
    }  # fmt: skip


def filled(looking: Looking, form: str, given: dict[str, Any], ids: dict[str, str]) -> Filled:
    """Fill the form on the page with what it did not say; what it says then."""

    def put(value: Any) -> Any:
        return [each.format(**ids) for each in value] if isinstance(value, list) else value.format(**ids)

    before: Filled = looking.page.evaluate("form => fairlaneForms.read(form)", form)
    values = {**GIVEN, **{name: put(value) for name, value in given.items()}}
    after: Filled = looking.page.evaluate("([form, given]) => fairlaneForms.fill(form, given)", [form, values])
    kept = {name for name in after if after[name] == before[name]} - given.keys()
    assert kept == set(), "fields keep what they had"
    return after


def submit(looking: Looking, form: str) -> None:
    looking.problems.clear()
    with looking.page.expect_navigation():
        assert looking.page.evaluate("form => fairlaneForms.submit(form)", form) == []
    assert looking.page.evaluate("() => fairlaneForms.refusals()") == []
    assert looking.problems == []


def read(looking: Looking, form: str) -> Filled:
    values: Filled = looking.page.evaluate("form => fairlaneForms.read(form)", form)
    return values


@pytest.mark.parametrize("route", EDITED)
def test_what_was_changed_is_there_again(looking: Looking, ids: dict[str, str], route: str) -> None:
    path = route.format(**ids)
    looking.visit(path)
    said = filled(looking, f"post {path}", EDITED[route], ids)
    submit(looking, f"post {path}")
    looking.visit(path)
    assert read(looking, f"post {path}") == said


@pytest.mark.parametrize("route", CREATED)
def test_what_was_made_is_there_again(looking: Looking, ids: dict[str, str], route: str) -> None:
    page, given = CREATED[route]
    looking.visit((page or route).format(**ids))
    form = f"post {route.format(**ids)}"
    said = filled(looking, form, given, ids)
    submit(looking, form)
    if page:
        assert looking.faults() == []  # of the page that shows the key, this once
        looking.visit(page.format(**ids))
    (name,) = said["name"]
    if looking.page.locator("h1", has_text=name).count() == 0:
        looking.page.get_by_role("link", name=name, exact=True).click()
    looking.page.locator("h1", has_text=name).wait_for()
    again = read(looking, f"post {looking.page.evaluate('() => location.pathname')}")
    assert again == {field: said[field] for field in again}
    shown = looking.page.inner_text("main")
    assert [field for field in said.keys() - again.keys() if said[field][0] not in shown] == []


@pytest.mark.parametrize("route", SEARCHES)
def test_what_was_searched_for_is_shown_with_what_was_found(looking: Looking, ids: dict[str, str], route: str) -> None:
    path = route.format(**ids)
    looking.visit(path + (f"?pool={ids['judged_pool']}" if route == "/predictor/" else ""))
    said = filled(looking, f"get {path}", SEARCHES[route], ids)
    submit(looking, f"get {path}")
    assert read(looking, f"get {path}") == said


@pytest.mark.parametrize(("route", "page", "given"), DONE)
def test_what_was_done_is_in_the_audit_log_with_every_field(
    looking: Looking, ids: dict[str, str], route: str, page: str, given: dict[str, Any]
) -> None:
    looking.visit(page.format(**ids))
    form = f"post {route.format(**ids)}"
    said = filled(looking, form, given, ids)
    submit(looking, form)
    if looking.page.locator(".secret").count():
        assert looking.faults() == []
    entry = AuditEntry.objects.latest("id")
    ticks = {name: values == ["on"] for name, values in said.items() if name in TICKS}
    assert {name: TICKS[name](entry) for name in ticks} == ticks
    kept = json.dumps([entry.action, entry.object_id, entry.tenant, entry.after, entry.bulk], ensure_ascii=False)
    texts = [_kept(value, ids) for name, values in said.items() if name not in {"what", *ticks} for value in values]
    assert [text for text in texts if text not in kept] == [], kept


TICKS: dict[str, Callable[[AuditEntry], bool]] = {
    "is_cut": lambda entry: entry.action == "tenant.stopped",
    "despite_gate": lambda entry: Promotion.objects.latest("created_at").is_forced,
}
"""What the log says of a box that was ticked."""


def _kept(value: str, ids: dict[str, str]) -> str:
    """How the log writes a value of a form."""
    if value == ids["slug"]:
        return ids["tenant_id"]
    if value == GIVEN["expires_at"]:
        return value + ":00"
    return value if value.replace(".", "").isdigit() else json.dumps(value, ensure_ascii=False)[1:-1]


def test_a_refused_form_keeps_what_was_typed(console: Console, looking: Looking, ids: dict[str, str]) -> None:
    looking.visit("/pools/new/")
    said = filled(looking, "post /pools/new/", {"name": console.world.pool.name}, ids)
    with looking.page.expect_navigation():
        looking.page.evaluate("form => fairlaneForms.submit(form)", "post /pools/new/")
    (refusal,) = looking.page.evaluate("() => fairlaneForms.refusals()")
    assert "exists" in refusal
    assert read(looking, "post /pools/new/") == said
    assert looking.faults() == []


PASSWORD = "four words of my own"


def test_an_account_from_its_invitation_to_its_second_factor(
    console: Console, looking: Looking, ids: dict[str, str]
) -> None:
    looking.visit("/members/")
    invited = {"email": "asked@example.test", "role": ["tenant_admin"], "tenant": "{slug}"}
    filled(looking, "post /members/", invited, ids)
    submit(looking, "post /members/")
    link = looking.page.inner_text("#invitation-link")
    guest = console.stranger()
    guest.context.add_init_script(path=FORMS)

    def send(form: str, **values: str) -> None:
        guest.page.evaluate("([form, given]) => fairlaneForms.fill(form, given)", [form, values])
        submit(guest, form)

    guest.visit(link)
    send(f"post {urlsplit(link).path}", name="<b>Asked</b>", password=PASSWORD, repeated=PASSWORD)
    guest.page.get_by_text("Your account is open").wait_for()
    guest.visit("/password/")
    send("post /password/", old_password=PASSWORD, new_password=PASSWORD[::-1], repeated=PASSWORD[::-1])
    guest.page.get_by_text("Password changed").wait_for()

    guest.visit("/second-factor/")
    secret = base64.b32decode(guest.page.inner_text("#second-factor-secret").replace(" ", ""))
    send("post /second-factor/", code=code(secret, counter()))
    assert guest.faults() == []
    recovery = guest.page.locator("#recovery-codes li").first.inner_text()
    guest.page.set_viewport_size(WIDE)
    guest.page.get_by_role("button", name="Sign out").click()
    guest.page.wait_for_url("**/sign-in/")
    send("post /sign-in/", email="asked@example.test", password=PASSWORD[::-1])
    assert guest.page.inner_text("h1") == "Second step"
    assert guest.faults() == []
    send("post /sign-in/code/", code=recovery)
    guest.page.get_by_role("heading", name="Live").wait_for()
    guest.close()

    looking.visit("/members/")
    looking.page.get_by_role("cell", name="<b>Asked</b>", exact=True).wait_for()
    looking.page.get_by_role("link", name="asked@example.test").click()
    looking.page.get_by_label("Reset the password of asked@example.test", exact=True).click()
    looking.page.get_by_role("button", name="Really reset the password of").click()
    looking.page.wait_for_url("**/password/")
    assert looking.faults() == []


def test_no_form_is_forgotten(console: Console, looking: Looking) -> None:
    make_length_model("not yet in service")
    found = set()
    pages = [each for each, words in answers_by_role().items() if words["owner"] == "ok"]
    pages = [each for each in pages if not is_file(each) and each not in NOT_OURS]
    looking.visit("/tokens/")
    for page in [*pages, "/requests/?id=req_runs"]:
        for form in looking.page.evaluate("page => fairlaneForms.list(page)", console.path(page)):
            method, address = form.split()
            found.add((method, console.fetched(address)))
    posted = {*EDITED, *CREATED, *(route for route, _, _ in DONE), *OF_THE_ACCOUNT}
    assert found == {("get", each) for each in SEARCHES} | {("post", each) for each in posted}
