"""The console as a browser without scripts sees it."""

from __future__ import annotations

import csv
import io
import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.html import escape

from controlplane.accounts import actions as account_actions
from controlplane.accounts.models import OperatorToken, Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import system_actor
from controlplane.common.clock import utc_now
from controlplane.console import charts
from controlplane.console.views import tenants as tenant_views
from controlplane.fleet import actions as fleet_actions
from controlplane.fleet.models import Pool
from controlplane.fleet.routers import create_router, take_heartbeat
from controlplane.keys.actions import issue_key, revoke_key
from controlplane.keys.models import ApiKey
from controlplane.tenants.actions import create_group, create_tenant
from controlplane.tenants.models import Group, Tenant
from controlplane.tiers import actions as tier_actions
from controlplane.tiers.models import Tier
from controlplane.training.actions import cancel_job, start_job
from router_ext.core.config import KNOBS, policy_pages
from router_ext.wire.controlplane import GroupState, Heartbeat, PoolState, TenantState
from tests.support.control_plane import PASSWORD, make_hazard, signed_in

pytestmark = pytest.mark.django_db

SYSTEM = system_actor("test")


@pytest.fixture
def operator() -> Client:
    return signed_in(Role.OPERATOR)


@pytest.fixture
def platform() -> None:
    tier_actions.create_tier(actor=SYSTEM, name="interactive", rank=0, ttft_target_s=2.0)
    tier_actions.create_tier(actor=SYSTEM, name="batch", rank=50)
    fleet_actions.create_pool(actor=SYSTEM, name="tiny-model")


def make_tenant(client: Client, **changes: object) -> Tenant:
    form = {
        "name": "Web chat", "slug": "", "weight": "3", "tiers": ["interactive", "batch"],
        "default_tier": "interactive", "max_queued": "100",
    }  # fmt: skip
    answer = client.post(reverse("console:tenant_new"), {**form, **changes})
    assert answer.status_code == 302, answer.content.decode()
    return Tenant.objects.get(slug="web-chat")


def test_a_one_time_password_leads_to_the_password_form_and_nowhere_else() -> None:
    user, one_time = account_actions.create_user(actor=SYSTEM, email="new@example.org", role=Role.OPERATOR)
    client = Client()
    client.post(reverse("console:sign_in"), {"email": user.email, "password": one_time})
    assert client.get(reverse("console:tenants")).headers["location"] == reverse("console:password")
    form = {"old_password": one_time, "new_password": PASSWORD, "repeated": PASSWORD}
    assert client.post(reverse("console:password"), form).status_code == 302
    assert client.get(reverse("console:tenants")).status_code == 200


def test_a_wrong_password_and_an_unknown_email_look_alike() -> None:
    account_actions.create_user(actor=SYSTEM, email="known@example.org", role=Role.VIEWER)
    answers = [
        Client().post(reverse("console:sign_in"), {"email": email, "password": "wrong"})
        for email in ("known@example.org", "unknown@example.org")
    ]
    assert [a.status_code for a in answers] == [401, 401]
    assert all("Email or password is wrong." in a.content.decode() for a in answers)


def test_the_address_after_sign_in_stays_on_this_host() -> None:
    user, one_time = account_actions.create_user(actor=SYSTEM, email="next@example.org", role=Role.VIEWER)
    form = {"email": user.email, "password": one_time, "next": "https://evil.example/"}
    assert Client().post(reverse("console:sign_in"), form).headers["location"] == "/"


PAGES = ("live", "live_fragment", "tenants", "tenant_new", "groups", "group_new", "tiers", "tier_new", "pools",
         "pool_new", "pool_policies",
         "requests", "hazards", "usage", "usage_csv", "usage_quarantine", "predictor", "predictor_fragment", "audit",
         "tokens")  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_itself_to_an_operator_and_a_sign_in_form_to_a_stranger(
    name: str, operator: Client, platform: None
) -> None:
    assert operator.get(reverse(f"console:{name}")).status_code == 200
    stranger = Client().get(reverse(f"console:{name}"))
    assert stranger.status_code == 302
    assert stranger.headers["location"].startswith("/sign-in/")


def test_a_tenant_is_created_changed_and_suspended(operator: Client, platform: None) -> None:
    tenant = make_tenant(operator)
    assert (tenant.weight, tenant.default_tier.name) == (3.0, "interactive")
    page = reverse("console:tenant", args=[tenant.id])
    form = {"name": "Web chat", "slug": "web-chat", "weight": "5", "tiers": ["batch"], "default_tier": "batch",
            "max_queued": "100"}  # fmt: skip
    assert operator.post(page, form).status_code == 302
    tenant.refresh_from_db()
    assert (tenant.weight, tenant.default_tier.name) == (5.0, "batch")
    operator.post(reverse("console:tenant_state", args=[tenant.id]), {"state": "suspended"})
    assert "suspended" in operator.get(page).content.decode()


def test_a_fairness_group_is_made_joined_weighed_and_deleted(operator: Client, platform: None) -> None:
    assert operator.post(reverse("console:group_new"), {"name": "research", "weight": "2.5"}).status_code == 302
    group = Group.objects.get()
    tenant = make_tenant(operator, group="research")
    assert tenant.group == group
    assert "research" in operator.get(reverse("console:tenants")).content.decode()
    page = operator.get(reverse("console:groups")).content.decode()
    assert '>research</a></td><td class="num">2.5</td><td class="num">1</td>' in page
    assert operator.post(reverse("console:group", args=[group.id]), {"weight": "4"}).status_code == 302
    group.refresh_from_db()
    assert group.weight == 4.0
    delete = reverse("console:group_delete", args=[group.id])
    assert "has 1 tenant" in operator.post(delete, follow=True).content.decode()
    form = {"name": "Web chat", "slug": "web-chat", "weight": "3", "tiers": ["batch"], "default_tier": "batch",
            "max_queued": "100", "group": ""}  # fmt: skip
    operator.post(reverse("console:tenant", args=[tenant.id]), form)
    assert "Fairness group deleted." in operator.post(delete, follow=True).content.decode()
    assert not Group.objects.exists()


def test_a_value_out_of_range_is_named_with_its_range(operator: Client, platform: None) -> None:
    form = {"name": "X", "weight": "0", "tiers": ["batch"], "default_tier": "interactive", "max_queued": "1"}
    page = operator.post(reverse("console:tenant_new"), form).content.decode()
    assert "0.001 to 10000" in page.replace(",", "")
    assert "is not one of the tenant" in page
    assert not Tenant.objects.exists()


def test_a_key_is_shown_once_and_revoked(operator: Client, platform: None) -> None:
    tenant = make_tenant(operator)
    answer = operator.post(
        reverse("console:key_new", args=[tenant.id]),
        {"name": "first", "default_pool": "tiny-model", "default_tier": ""},
    )
    key = ApiKey.objects.get()
    text = re.search(r"flk_[0-9a-z]{12}_[0-9A-Za-z]+", answer.content.decode())
    assert text is not None
    assert "no-store" in answer.headers["cache-control"]
    page = operator.get(reverse("console:tenant", args=[tenant.id])).content.decode()
    assert key.public_id in page
    assert text[0] not in page
    operator.post(reverse("console:key_revoke", args=[tenant.id, key.id]))
    key.refresh_from_db()
    assert key.revoked_at is not None


def test_a_viewer_reads_and_changes_nothing(operator: Client, platform: None) -> None:
    tenant = make_tenant(operator)
    viewer = signed_in(Role.VIEWER)
    assert viewer.get(reverse("console:tenant", args=[tenant.id])).status_code == 200
    viewer.post(reverse("console:tenant_state", args=[tenant.id]), {"state": "suspended"})
    tenant.refresh_from_db()
    assert tenant.state == "active"


def test_a_change_is_in_the_audit_log_with_its_author(operator: Client, platform: None) -> None:
    make_tenant(operator)
    page = operator.get(reverse("console:audit")).content.decode()
    assert "tenant.created" in page
    assert "operator@example.org" in page


def test_the_policy_of_a_pool_is_chosen_on_its_page(operator: Client, platform: None) -> None:
    pool = Pool.objects.get()
    form = {"name": "tiny-model", "aliases": "tiny, small", "policy": "fifo", "tokenizer_path": ""}
    assert operator.post(reverse("console:pool", args=[pool.id]), form).status_code == 302
    pool.refresh_from_db()
    assert pool.policy == "fifo"
    assert sorted(n.word for n in pool.model_names.all()) == ["small", "tiny", "tiny-model"]


def test_the_csv_has_a_header_even_without_rows(operator: Client) -> None:
    answer = operator.get(reverse("console:usage_csv"))
    text = b"".join(answer.streaming_content).decode()  # type: ignore[attr-defined]
    assert next(csv.reader(io.StringIO(text)))[:3] == ["day", "tenant", "tenant_name"]


def test_an_unknown_id_is_a_page_with_404(operator: Client) -> None:
    answer = operator.get(reverse("console:tenant", args=["ten_nobody"]))
    assert answer.status_code == 404
    assert "ten_nobody" in answer.content.decode()


def test_a_page_allows_scripts_and_styles_of_this_host_only_and_is_stored_nowhere(operator: Client) -> None:
    answer = operator.get(reverse("console:tenants"))
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
    }
    assert answer.headers["cache-control"] == "no-store"
    page = answer.content.decode()
    assert not re.search(r"<style|style=|<script(?![^>]* src=)|\son[a-z]+=", page)


def test_only_the_api_documentation_may_use_style_attributes(operator: Client) -> None:
    page = operator.get("/api/v1/docs")
    assert "style-src 'self' 'unsafe-inline'" in page.headers["content-security-policy"]
    assert "script-src 'self';" in page.headers["content-security-policy"]
    assert not re.search(r"<script(?![^>]* src=)", page.content.decode())
    script = operator.get("/api/v1/docs?script=")
    assert script.headers["content-type"].startswith("application/javascript")


def test_a_fragment_of_somebody_signed_out_reloads_the_page_instead_of_filling_it() -> None:
    answer = Client().get(reverse("console:live_fragment"), headers={"hx-request": "true"})
    assert answer.headers["hx-refresh"] == "true"
    assert answer.content == b""


def test_the_live_page_says_how_much_was_preempted(operator: Client, platform: None) -> None:
    router, _ = create_router(actor=SYSTEM, name="edge")
    pool = Pool.objects.get()

    def shown(**fields: object) -> str:
        state = PoolState(pool=pool.id, policy="slo-fair", running=1, **fields)  # type: ignore[arg-type]
        beat = Heartbeat(
            router="rtr_1", version="1", address="127.0.0.1:1", applied_revision=0, applied_at_us=0, pools=[state]
        )
        take_heartbeat(router=router, heartbeat=beat)
        page = operator.get(reverse("console:live_fragment")).content.decode()
        return " ".join(re.sub(r"<[^>]*>", " ", page).split())

    page = shown(
        preempted_total={"deadline": 1_300, "gap": 4},
        recomputed_tokens_total=98_765,
        queued_by_tier={"batch": 9},
        parked=7,
    )
    assert "1,304 streams told to stop for others (deadline 1,300, gap 4)" in page
    assert "98,765 tokens computed again for them" in page
    assert "9 waiting, 7 of them for a server large enough" in page
    tenant = create_tenant(actor=SYSTEM, name="Chat", slug="chat", tiers=["batch"], default_tier="batch")
    page = shown(
        tenants=[TenantState(tenant=tenant.id, group="research", queued=3)],
        groups=[GroupState(group="research", queued=3, running=1, counter=1_234.0)],
    )
    assert "Chat research 3 0" in page
    assert "research 3 1 1,234" in page
    page = shown(preempted_total={"deadline": 0, "gap": 0})
    assert "Fairness groups" not in page
    assert "told to stop" not in page
    assert "large enough" not in page


def test_two_people_cannot_overwrite_each_other(operator: Client, platform: None) -> None:
    tenant = make_tenant(operator)
    page = reverse("console:tenant", args=[tenant.id])
    shown = operator.get(page).context["form"].initial["version"]
    form = {"name": "Web chat", "slug": "web-chat", "tiers": ["batch"], "default_tier": "batch", "max_queued": "100",
            "version": shown}  # fmt: skip
    assert operator.post(page, {**form, "weight": "5"}).status_code == 302
    late = operator.post(page, {**form, "weight": "7"})
    assert "Somebody else changed this meanwhile" in late.content.decode()
    tenant.refresh_from_db()
    assert tenant.weight == 5.0


@pytest.mark.parametrize("name", ["tenant", "group", "pool", "tier", "backend"])
def test_a_page_that_changes_a_row_remembers_its_version(name: str, operator: Client, platform: None) -> None:
    pool = Pool.objects.get()
    backend = fleet_actions.create_backend(actor=SYSTEM, pool=pool.id, name="one", url="http://10.0.0.7:3000")
    parts = {
        "tenant": [make_tenant(operator).id],
        "group": [create_group(actor=SYSTEM, name="research").id],
        "pool": [pool.id],
        "tier": [Tier.objects.get(name="batch").id],
        "backend": [pool.id, backend.id],
    }[name]
    page = operator.get(reverse(f"console:{name}", args=parts)).content.decode()
    assert re.search(r'<input type="hidden" name="version" value="1"', page)


def test_an_expired_key_is_shown_as_expired(operator: Client, platform: None) -> None:
    tenant = make_tenant(operator)
    key, _ = issue_key(actor=SYSTEM, tenant_id=tenant.id, name="short", expires_at=utc_now() + timedelta(hours=1))
    page = reverse("console:tenant", args=[tenant.id])
    assert "expired" not in operator.get(page).content.decode()
    ApiKey.objects.filter(pk=key.pk).update(expires_at=utc_now() - timedelta(seconds=1))
    assert '<span class="badge warn">expired</span>' in operator.get(page).content.decode()


def test_a_live_key_is_shown_before_revoked_ones(
    operator: Client, platform: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_views, "PAGE", 2)
    tenant = make_tenant(operator)
    live, *others = (issue_key(actor=SYSTEM, tenant_id=tenant.id, name=f"k{n}")[0] for n in range(4))
    for key in others:
        revoke_key(actor=SYSTEM, key_id=key.id)
    page = operator.get(reverse("console:tenant", args=[tenant.id])).content.decode()
    assert live.public_id in page
    assert sum(key.public_id in page for key in others) == 1
    assert "REST lists all of them" in page


@pytest.mark.parametrize(
    "name",
    ["tenants", "tenant", "groups", "tiers", "pools", "predictor", "audit", "tokens", "live", "usage", "hazards"],
)
def test_a_page_asks_the_database_no_more_often_when_there_is_more_to_show(
    name: str, operator: Client, platform: None
) -> None:
    tenant = make_tenant(operator)
    address = reverse(f"console:{name}", args=[tenant.id] if name == "tenant" else [])

    def n_queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert operator.get(address).status_code == 200
        return len(captured)

    def add(number: int) -> None:
        label = f"more-{number}"
        tier_actions.create_tier(actor=SYSTEM, name=label, rank=number)
        create_group(actor=SYSTEM, name=label)
        create_tenant(actor=SYSTEM, name=label, slug=label, tiers=["batch", label], default_tier=label, group=label)
        pool = fleet_actions.create_pool(actor=SYSTEM, name=label, aliases=[f"{label}-alias"])
        address = f"http://10.0.0.{number}:3000"
        backend = fleet_actions.create_backend(actor=SYSTEM, pool=pool.id, name="one", url=address)
        issue_key(actor=SYSTEM, tenant_id=tenant.id, name=label, default_pool=pool.id, tiers=["batch"])
        account_actions.issue_token(actor=SYSTEM, user=User.objects.get(), name=label, scopes=["admin.read"])
        job = start_job(actor=SYSTEM)
        cancel_job(actor=SYSTEM, job_id=job.id)
        make_hazard(tenant=tenant.id, backend=backend.id, request=label)

    add(1)
    few = n_queries()
    for number in range(2, 6):
        add(number)
    assert n_queries() <= few


@pytest.mark.parametrize("query", ["from_day=x", "to_day=0001-01-01", "from_day=9999-12-30&to_day=9999-12-31",
                                   "from_day=2026-02-02&to_day=2026-02-01", "from_day=2020-01-01", "tz=Mars",
                                   "group_by=day&group_by=hour", "group_by=weather"])  # fmt: skip
def test_days_that_cannot_be_reported_are_named_on_page_and_csv(operator: Client, query: str) -> None:
    page = operator.get(f"{reverse('console:usage')}?{query}")
    assert page.status_code == 200
    assert 'class="error" role="alert"' in page.content.decode()
    assert operator.get(f"{reverse('console:usage_csv')}?{query}").status_code == 422


@pytest.mark.parametrize("name", ["tenants", "audit", "usage"])
def test_a_filter_with_nul_finds_nothing_it_should_not(name: str, operator: Client) -> None:
    for parameter in ("q", "tenant", "after"):
        assert operator.get(f"{reverse(f'console:{name}')}?{parameter}=%00").status_code == 200


def test_knobs_are_set_by_field_shown_again_and_emptied(operator: Client, platform: None) -> None:
    pool = Pool.objects.get()
    page = reverse("console:pool", args=[pool.id])
    form = {"name": "tiny-model", "policy": "slo-fair", "scheduling.burst_ratio": "0.5", "scheduling.max_queued": "9"}
    assert operator.post(page, form).status_code == 302
    pool.refresh_from_db()
    assert pool.scheduling == {"burst_ratio": 0.5, "max_queued": 9}
    shown = operator.get(page).content.decode()
    assert re.search(r'name="scheduling.burst_ratio" value="0.5"', shown)
    assert KNOBS["burst_ratio"].label in shown
    operator.post(page, {**form, "scheduling.burst_ratio": ""})
    pool.refresh_from_db()
    assert pool.scheduling == {"max_queued": 9}
    entry = AuditEntry.objects.filter(action="pool.updated").latest("id")
    assert entry.after["scheduling"] == {"max_queued": 9}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("scheduling.gamma", "7", "gamma 7.0 is out of range (from 0 to 1)"),
        ("scheduling.w_output", "0", "w_output 0.0 is out of range (from 0.001"),
        ("scheduling.max_queued", "1.5", "Enter a whole number."),
    ],
)
def test_a_knob_out_of_range_is_named_beside_its_field(
    field: str, value: str, message: str, operator: Client, platform: None
) -> None:
    form = {"name": "other-model", "policy": "fifo", field: value}
    for address in (reverse("console:pool_new"), reverse("console:pool", args=[Pool.objects.get().id])):
        answer = operator.post(address, form)
        assert answer.status_code == 200
        assert message in answer.content.decode()
    assert Pool.objects.get().scheduling == {}


def test_the_page_of_policies_says_of_each_what_its_module_says(operator: Client) -> None:
    page = operator.get(reverse("console:pool_policies")).content.decode()
    for name, policy in policy_pages().items():
        assert f'id="policy-{name}"' in page
        assert escape(policy.summary) in page
        assert policy.document in page


def test_an_unknown_address_is_a_page_for_people_and_a_problem_for_programs(operator: Client) -> None:
    page = operator.get("/nowhere/")
    assert (page.status_code, "There is nothing at /nowhere/." in page.content.decode()) == (404, True)
    problem = operator.get("/router/v1/nowhere")
    assert (problem.status_code, problem.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("address", "content_type"), [("/tiers/", "text/html"), ("/api/v1/tiers", "application/problem+json")]
)
def test_a_fault_of_ours_is_500_in_the_callers_form(
    address: str, content_type: str, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("a defect with a secret in it")

    monkeypatch.setattr("controlplane.tiers.queries.tiers", broken)
    operator.raise_request_exception = False
    answer = operator.get(address)
    assert answer.status_code == 500
    assert answer.headers["content-type"].startswith(content_type)
    assert "secret" not in answer.content.decode()


def test_a_form_without_its_token_is_refused_in_plain_words() -> None:
    answer = Client(enforce_csrf_checks=True).post(reverse("console:sign_in"), {"email": "a@example.org"})
    assert answer.status_code == 403
    assert "reload the page" in answer.content.decode()


def test_charts_keep_tenants_of_the_same_name_apart() -> None:
    drawn = charts.stacked_bars(title="T", days=["1 Jan"], series=[("Twin", [2.0]), ("Twin", [3.0])])
    assert drawn.count("<title>1 Jan, Twin") == 2


def test_an_operator_issues_a_token_that_works_until_it_is_revoked(operator: Client) -> None:
    page = reverse("console:tokens")
    answer = operator.post(page, {"name": "export", "scopes": ["admin.read"], "expires_at": ""})
    text = re.search(r'id="token-text">(flt_[0-9a-zA-Z_]+)<', answer.content.decode())
    assert text is not None
    assert text[1] not in operator.get(page).content.decode()
    headers = {"authorization": f"Bearer {text[1]}"}
    assert Client().get("/api/v1/tenants", headers=headers).status_code == 200
    assert Client().post("/api/v1/tenants", headers=headers).status_code == 403
    operator.post(reverse("console:token_revoke", args=[OperatorToken.objects.get().id]))
    assert Client().get("/api/v1/tenants", headers=headers).status_code == 401
    assert "revoked" in operator.get(page).content.decode()


def test_a_viewer_issues_no_token() -> None:
    answer = signed_in(Role.VIEWER).post(reverse("console:tokens"), {"name": "x", "scopes": ["admin.read"]})
    assert "lacks the scope" in answer.content.decode()
    assert not OperatorToken.objects.exists()
