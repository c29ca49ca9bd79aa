"""The operator's brakes, the guard's settings and hazards on the console."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import Client
from django.urls import reverse
from django.utils.html import escape

from controlplane.accounts.models import Role
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import system_actor
from controlplane.fleet import brakes
from controlplane.fleet.hazards import n_open
from controlplane.fleet.models import Backend, Cancellation, Hazard, Pool
from controlplane.keys.models import ApiKey
from controlplane.tenants.models import Tenant
from controlplane.tiers.models import Tier
from router_ext.wire.controlplane import BackendState, LiveRequest, PoolState
from tests.support.control_plane import (
    make_backend,
    make_hazard,
    make_key,
    make_pool,
    make_tenant,
    signed_in,
    tell,
)

pytestmark = pytest.mark.django_db

SYSTEM = system_actor("test")


@pytest.fixture
def operator() -> Client:
    return signed_in(Role.OPERATOR)


@pytest.fixture
def pool() -> Pool:
    return make_pool(SYSTEM)


@pytest.fixture
def backend(pool: Pool) -> Backend:
    return make_backend(SYSTEM, pool, name="left")


@pytest.fixture
def tenant() -> Tenant:
    return make_tenant(SYSTEM, name="Web chat")


@pytest.fixture(autouse=True)
def _fresh_valkey() -> Iterator[None]:
    from controlplane.common.valkey import valkey

    yield
    valkey().flushdb()


def press(client: Client, page: str, /, *parts: str, **form: str) -> str:
    """Press a button; the page it leads to."""
    return client.post(reverse(f"console:{page}", args=parts), form, follow=True).content.decode()


def look(client: Client, name: str, *parts: str, **query: str) -> str:
    answer = client.get(reverse(f"console:{name}", args=parts), query)
    assert answer.status_code == 200
    return answer.content.decode()


# --- settings --------------------------------------------------------------------------------------------------------


def pool_form(client: Client, pool: Pool, **changes: str) -> dict[str, str]:
    initial = client.get(reverse("console:pool", args=[pool.id])).context["form"].initial
    return {"name": pool.name, "policy": "slo-fair", "version": str(initial["version"]), **changes}


def test_what_guards_a_pool_is_set_on_its_page(operator: Client, pool: Pool) -> None:
    page = look(operator, "pool", pool.id)
    assert "Without a tokenizer file grammars are priced by the number above." in page
    form = pool_form(operator, pool, vocabulary="49152", takes_grammars="on", tokenizer_path="/t.json")
    page = press(operator, "pool", pool.id, **form)
    pool.refresh_from_db()
    assert (pool.is_guarded, pool.vocabulary, pool.takes_grammars) == (False, 49_152, True)
    assert "grammars are not proven" in page
    assert "priced by the vocabulary of the tokenizer file" in page
    press(operator, "pool", pool.id, **pool_form(operator, pool, is_guarded="on", takes_grammars="on"))
    pool.refresh_from_db()
    assert (pool.is_guarded, pool.vocabulary) == (True, 131_072)


@pytest.mark.parametrize("value", ["0", "10000001"])
def test_a_vocabulary_out_of_range_is_named_beside_its_field(operator: Client, pool: Pool, value: str) -> None:
    page = press(operator, "pool", pool.id, **pool_form(operator, pool, vocabulary=value))
    assert escape(f"must be from 1 to 10,000,000, not {value}") in page


def test_a_new_pool_is_guarded_unless_said_otherwise(operator: Client) -> None:
    form = operator.get(reverse("console:pool_new")).context["form"]
    assert {name: form[name].value() for name in ("is_guarded", "takes_grammars")} == {
        "is_guarded": True,
        "takes_grammars": True,
    }


def test_a_tier_says_how_long_a_grammar_may_stall(operator: Client, tenant: Tenant) -> None:
    tier = Tier.objects.get()
    for text, stall, shown in (("0.5", 0.5, "at most 0.5 s"), ("0", 0.0, "none taken"), ("", None, "at most 2 s")):
        page = press(operator, "tier", tier.id, rank="1", grammar_stall_s=text)
        tier.refresh_from_db()
        assert tier.grammar_stall_s == stall
        assert shown in page
    assert "must be from 0 to 60, not 61.0" in press(operator, "tier", tier.id, rank="1", grammar_stall_s="61")


def test_a_backend_is_kept_free_of_grammars_on_its_page(operator: Client, backend: Backend) -> None:
    form = {
        "name": "left",
        "url": backend.url,
        "block_size": "1",
        "prefill_budget_tokens": "4096",
        "speculate": "0",
    }
    assert "no grammars" in press(operator, "backend", backend.pool_id, backend.id, **form)
    backend.refresh_from_db()
    assert not backend.takes_grammars


# --- brakes ----------------------------------------------------------------------------------------------------------


def test_a_backend_is_drained_watched_and_uncordoned(operator: Client, backend: Backend) -> None:
    parts = (backend.pool_id, backend.id)

    def say(state: str, running: int) -> str:
        there = BackendState(backend=backend.id, state=state, running=running)
        tell(pools=[PoolState(pool=backend.pool_id, policy="fifo", backends=[there])])
        return look(operator, "backend_fragment", *parts)

    assert "No router reports this backend." in look(operator, "backend", *parts)
    assert "reason" in press(operator, "backend_drain", *parts), "refused, and said why"
    backend.refresh_from_db()
    assert not backend.is_drained
    press(operator, "backend_drain", *parts, reason="new disks")
    backend.refresh_from_db()
    assert (backend.is_cordoned, backend.is_drained) == (True, True)
    assert "has not applied it yet" in say("up", 2)
    page = say("cordoned", 2)
    assert "draining" in page
    assert "<b>2</b> running there." in page
    page = say("cordoned", 0)
    assert ">drained<" in page
    assert "Nothing runs there." in page
    assert "draining" in look(operator, "pool", backend.pool_id)
    press(operator, "backend_uncordon", *parts)
    backend.refresh_from_db()
    assert (backend.is_cordoned, backend.is_drained) == (False, False)


def test_a_tenant_is_stopped_and_goes_on(operator: Client, tenant: Tenant) -> None:
    page = press(operator, "tenant_stop", tenant.id, reason="its loop")
    assert '<span class="badge bad">stopped</span>' in page
    assert "Let it go on" in page
    page = press(operator, "tenant_resume", tenant.id)
    assert '<span class="badge good">active</span>' in page
    assert AuditEntry.objects.get(action="tenant.stopped").after == {"state": "stopped", "reason": "its loop"}


def test_the_grammars_of_a_pool_are_stopped_and_allowed(operator: Client, pool: Pool) -> None:
    page = press(operator, "pool_stop_grammars", pool.id, reason="they kill it")
    assert "takes no grammars" in page
    assert "Allow grammars" in page
    assert "takes no grammars" in look(operator, "pools")
    press(operator, "pool_allow_grammars", pool.id)
    pool.refresh_from_db()
    assert pool.takes_grammars


def test_a_request_is_cancelled_by_its_id(operator: Client) -> None:
    page = look(operator, "requests", id="trace/7?<x>")
    assert "it may wait or run" in page
    assert f'name="id" value="{escape("trace/7?<x>")}"' in page
    page = press(operator, "request_cancel", id="trace/7?<x>", reason="never ends")
    assert Cancellation.objects.get().request == "trace/7?<x>"
    assert "never ends" in page
    assert "<x>" not in page
    refused = press(operator, "request_cancel", id="", reason="x")
    assert "1 to 128 printable ASCII characters" in refused


BRAKES = (
    ("backend_drain", ("pool", "backend")),
    ("backend_uncordon", ("pool", "backend")),
    ("tenant_stop", ("tenant",)),
    ("tenant_resume", ("tenant",)),
    ("pool_stop_grammars", ("pool",)),
    ("pool_allow_grammars", ("pool",)),
    ("request_cancel", ()),
    ("hazard_resolve", ("hazard",)),
)


@pytest.mark.parametrize(("name", "words"), BRAKES)
def test_a_viewer_stops_nothing_and_a_link_neither(
    name: str, words: tuple[str, ...], tenant: Tenant, backend: Backend
) -> None:
    hazard = make_hazard(backend=backend.id, tenant=tenant.id)
    ids = {"pool": backend.pool_id, "backend": backend.id, "tenant": tenant.id, "hazard": hazard.id}
    address = reverse(f"console:{name}", args=[ids[word] for word in words])
    viewer = signed_in(Role.VIEWER)
    entries = AuditEntry.objects.count()
    page = viewer.post(address, {"reason": "x", "note": "x", "id": "req_1"}, follow=True).content.decode()
    assert "lacks the scope admin.write" in page
    assert viewer.get(address).status_code == 405
    assert Client().post(address).headers["location"].startswith("/sign-in/")
    assert AuditEntry.objects.count() == entries


# --- hazards ---------------------------------------------------------------------------------------------------------


def test_a_hazard_sets_off_an_alarm_on_every_page_until_it_is_seen_to(
    operator: Client, tenant: Tenant, backend: Backend
) -> None:
    key: ApiKey = make_key(SYSTEM, tenant, backend.pool)[0]
    assert "felled backends" not in look(operator, "live")
    hazard = make_hazard(backend=backend.id, tenant=tenant.id, key=key.public_id, request="req_<odd>", kind="freeze")
    for name in ("live", "live_fragment", "tenants", "pools"):
        assert look(operator, name).count("1 request felled backends") == 1, name
    assert "felled backends" not in Client().get(reverse("console:sign_in")).content.decode()
    page = look(operator, "hazards")
    link = reverse("console:tenant", args=[tenant.id])
    for text in (f'href="{link}">Web chat</a>', f'href="{link}#key-{key.public_id}"', "stopped answering", "left",
                 escape("req_<odd>")):  # fmt: skip
        assert text in page
    assert f'id="key-{key.public_id}"' in look(operator, "tenant", tenant.id)
    assert "note" in press(operator, "hazard_resolve", hazard.id), "refused without a note"
    assert n_open() == 1
    page = press(operator, "hazard_resolve", hazard.id, note="key revoked")
    assert "key revoked" in page
    assert "felled backends" not in page


def test_hazards_are_narrowed_and_paged(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from controlplane.console.views import hazards as views

    monkeypatch.setattr(views, "PAGE", 2)
    for n in range(5):
        make_hazard(tenant=f"ten_{n % 2}", request=f"req_{n}")
    first = look(operator, "hazards", tenant="ten_0")
    assert [f"req_{n}" in first for n in range(5)] == [False, False, True, False, True]
    oldest = Hazard.objects.get(request="req_2").id
    second = look(operator, "hazards", tenant="ten_0", before=oldest)
    assert [f"req_{n}" in second for n in range(5)] == [True, False, False, False, False]
    assert f"before={oldest}" in first
    assert "None of these" in look(operator, "hazards", state="resolved")


def test_what_was_cancelled_lately_is_listed(operator: Client) -> None:
    brakes.cancel_request(actor=SYSTEM, request_id="req_7", reason="for a test")
    page = look(operator, "requests")
    assert "req_7" in page
    assert "for a test" in page


def test_what_waits_or_runs_is_listed_to_be_cancelled(operator: Client, backend: Backend, tenant: Tenant) -> None:
    assert "Nothing." in look(operator, "requests")
    fields = {"tenant": tenant.id, "key": "abc", "tier": "standard"}
    waits = LiveRequest(request="req/<1>", event="evt_1", arrived_at_us=2_000_000, **fields)
    runs = LiveRequest(
        request="req_2", event="evt_2", arrived_at_us=1_000_000, output_tokens=1_234, backend=backend.id, **fields
    )
    tell(pools=[PoolState(pool=backend.pool_id, policy="fifo", oldest=[waits, runs])])
    page = look(operator, "requests")
    rows = page[page.index("Waiting or running longest") :]
    assert rows.index("req_2") < rows.index("req/&lt;1&gt;"), "the oldest first"
    assert "1,234" in rows
    assert "left" in rows, "the backend by its name"
    assert "Web chat" in rows
    assert "?id=req/%3C1%3E" in rows or "?id=req%2F%3C1%3E" in rows
    assert rows.count("waits</span>") == 1
    brakes.cancel_request(actor=SYSTEM, request_id="req_2", reason="for a test")
    assert "has been booked yet; it was cancelled." in look(operator, "requests", id="req_2")
