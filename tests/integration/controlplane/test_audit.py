"""The audit log's hash chain: one chain whoever writes, and every way of tampering with it is seen."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import StringIO
from typing import Any
from urllib.parse import urlencode

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connection, connections, transaction
from django.test import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.audit import queries
from controlplane.audit.actions import log_head
from controlplane.audit.chain import COLUMNS, FIRST, canonical_json, next_hash
from controlplane.audit.models import AuditEntry, AuditHead
from controlplane.audit.queries import all_of, verify
from controlplane.common.actor import Actor, system_actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict, Invalid
from controlplane.common.use_case import use_case
from controlplane.fleet.routers import create_router
from controlplane.tenants.actions import delete_tenant, update_tenant
from controlplane.tenants.bulk import change_tenants
from controlplane.tiers.actions import create_tier, delete_tier
from tests.support.console_world import enliven, make_world
from tests.support.control_plane import ApiClient, make_key, make_pool, make_tenant

SYSTEM = system_actor("test")
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def write_some(system: Actor) -> None:
    tenant = make_tenant(system)
    for weight in (2.0, 0.1, 3, 1e3):
        update_tenant(actor=system, tenant_id=tenant.id, weight=weight)


@pytest.mark.django_db
@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_what_the_database_gives_back_has_the_canonical_json_of_what_was_written(value: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::jsonb::text", [json.dumps(value)])
        assert canonical_json(json.loads(cursor.fetchone()[0])) == canonical_json(value)


def test_canonical_json_is_as_documented() -> None:
    value = {"b": [1.0, 1e22, 1e-7, -0.0, 0.1, True, None], "a": 'ü"\n', "ab": {}}
    assert canonical_json(value) == (
        '{"a":"ü\\"\\n","ab":{},"b":[1,10000000000000000000000,0.0000001,0,0.1,true,null]}'
    )


@pytest.mark.django_db
def test_a_log_that_nobody_touched_is_whole(system: Actor) -> None:
    assert verify(actor=system).head == FIRST
    write_some(system)
    verdict = verify(actor=system)
    assert (verdict.is_whole, verdict.entries) == (True, AuditEntry.objects.count())
    assert verdict.head == AuditEntry.objects.latest("id").hash


def tampered(sql: str) -> None:
    """What the owner of the database can do."""
    with connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
        cursor.execute(sql.replace("{third}", "(SELECT id FROM audit_auditentry ORDER BY id OFFSET 2 LIMIT 1)"))
        cursor.execute("SET session_replication_role = DEFAULT")


CHANGES = [
    *(
        f"UPDATE audit_auditentry SET {name} = {value} WHERE id = {{third}}"
        for name, value in {
            "at": "at + interval '1 microsecond'", "actor_kind": "'user'", "actor_id": "'x'", "actor_label": "'x'",
            "action": "'tenant.created'", "object_type": "'x'", "object_id": "'x'", "bulk": "'{x}'", "tenant": "'x'",
            "before": "'{}'", "after": "after || '{\"weight\": 7}'", "request_id": "'x'", "hash": "repeat('0', 64)",
        }.items()
    ),
    "DELETE FROM audit_auditentry WHERE id = {third}",
    "DELETE FROM audit_auditentry WHERE id = (SELECT min(id) FROM audit_auditentry)",
    "UPDATE audit_auditentry SET id = id + 1000 WHERE id = {third}",
]  # fmt: skip


@pytest.mark.django_db
@pytest.mark.parametrize("sql", CHANGES)
def test_an_entry_that_was_changed_or_removed_is_named(sql: str, system: Actor) -> None:
    write_some(system)
    ids = list(AuditEntry.objects.order_by("id").values_list("id", flat=True))
    tampered(sql)
    verdict = verify(actor=system)
    first = 1 if "min(id)" in sql else 3 if sql.startswith("DELETE") or "id = id" in sql else 2
    assert (verdict.is_whole, verdict.broken) == (False, ids[first])


@pytest.mark.django_db
def test_a_tail_that_was_cut_is_seen_by_a_head_alone(system: Actor) -> None:
    write_some(system)
    kept_elsewhere = AuditEntry.objects.latest("id").hash
    tampered("DELETE FROM audit_auditentry WHERE id = (SELECT max(id) FROM audit_auditentry)")
    assert verify(actor=system).is_whole
    assert verify(actor=system, heads=[kept_elsewhere]).missing == (kept_elsewhere,)


@pytest.mark.django_db
def test_a_log_that_was_written_anew_is_seen_by_the_heads_of_the_days_before(system: Actor) -> None:
    write_some(system)
    old = log_head()
    assert old is not None
    tampered("UPDATE audit_auditentry SET actor_label = 'somebody else' WHERE id = {third}")
    head = FIRST
    for values in AuditEntry.objects.order_by("id").values_list(*COLUMNS):
        head = next_hash(head, values)
        tampered(f"UPDATE audit_auditentry SET hash = '{head}' WHERE id = {values[0]}")
    verdict = verify(actor=system)
    assert (verdict.broken, verdict.missing) == (None, (old.hash,))


@pytest.mark.django_db
def test_heads_are_append_only_too(system: Actor) -> None:
    write_some(system)
    log_head()
    for change in (AuditHead.objects.all().delete, lambda: AuditHead.objects.update(hash=FIRST)):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            change()


def test_writers_at_once_form_one_chain(committed_db: None) -> None:
    """Some publish, which makes them wait for each other anyway, and most do not."""

    def write(number: int) -> None:
        try:
            tier = create_tier(actor=SYSTEM, name=f"tier-{number}", rank=number)
            for each in range(15):
                create_router(actor=SYSTEM, name=f"router-{number}-{each}")
            delete_tier(actor=SYSTEM, tier_id=tier.id)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(8)))
    verdict = verify(actor=SYSTEM)
    assert (verdict.is_whole, verdict.entries) == (True, 8 * 17)


@use_case()
def _outer(*, actor: Actor) -> None:
    create_tier(actor=actor, name="kept", rank=1)
    with pytest.raises(Conflict):
        _inner(actor=actor)


@use_case()
def _inner(*, actor: Actor) -> None:
    create_tier(actor=actor, name="undone", rank=2)
    create_tier(actor=actor, name="kept", rank=2)


@pytest.mark.django_db
def test_what_an_inner_use_case_did_is_forgotten_when_it_fails(system: Actor) -> None:
    _outer(actor=system)
    assert [e.after["name"] for e in AuditEntry.objects.filter(action="tier.created")] == ["kept"]
    assert verify(actor=system).is_whole


def command(*words: str) -> tuple[int, str]:
    out = StringIO()
    try:
        call_command("verify_audit", *words, stdout=out)
    except SystemExit as end:
        return int(str(end.code)), out.getvalue()
    return 0, out.getvalue()


@pytest.mark.django_db
def test_command_and_rest_say_the_same(api: ApiClient, system: Actor) -> None:
    write_some(system)
    status, text = command("--json")
    said = json.loads(text)
    assert (status, said["is_whole"]) == (0, True)
    assert api.send("GET", "/audit/verify").json() == said
    shown = api.send("GET", "/audit/head").json()
    assert (shown["hash"], shown["logged"]) == (said["head"], [])
    log_head()
    (logged,) = api.send("GET", "/audit/head").json()["logged"]
    assert (logged["entry"], logged["hash"]) == (shown["entry"], shown["hash"])
    assert command("--head", said["head"])[0] == 0
    assert api.send("GET", f"/audit/verify?head={'a' * 64}&head={said['head']}").json()["missing"] == ["a" * 64]
    tampered("UPDATE audit_auditentry SET tenant = 'x' WHERE id = {third}")
    status, text = command("--head", "b" * 64)
    assert status == 1
    assert "BROKEN at entry" in text
    assert f"MISSING: no entry has the hash {'b' * 64}" in text


@pytest.mark.django_db
def test_what_is_no_hash_is_refused(api: ApiClient, system: Actor) -> None:
    with pytest.raises(Invalid):
        verify(actor=system, heads=["abc"])
    assert api.send("GET", "/audit/verify?head=abc").status_code == 422


@pytest.mark.django_db
def test_the_log_is_narrowed_by_each_filter_and_by_all_at_once(api: ApiClient, system: Actor) -> None:
    first, second, third = (make_tenant(system) for _ in range(3))
    update_tenant(actor=system, tenant_id=first.id, weight=2.0)
    change_tenants(actor=system, tenant_ids=[second.id, first.id], weight=4.0)
    api.send("PATCH", f"/tenants/{third.id}", {"weight": 8})

    def actions(**given: str) -> list[str]:
        page = api.send("GET", f"/audit?{urlencode(given)}").json()
        return [entry["action"].removeprefix("tenant.") for entry in page["results"]]

    assert actions(tenant=first.id) == ["changed_together", "updated", "created"]
    assert actions(object_id=second.id, object_type="tenant") == ["changed_together", "created"]
    assert actions(tenant=third.id) == ["updated", "created"]
    assert actions(tenant=third.id, actor="example.test") == ["updated"]
    assert actions(actor="test", action="tenant.updated") == ["updated", "updated"]
    assert len(actions(action="tenant")) == 6
    assert actions(action="ten") == []
    today = utc_now().date()
    day = {"from": str(today - timedelta(days=1)), "to": str(today)}
    assert len(actions(action="tenant", **day)) == 6
    assert actions(action="tenant", to=f"{today}T00:00:00Z") == []
    assert actions(**{"from": "2000-01-01T00:00:00+05:30", "to": "2000-01-01"}) == []
    for wrong in ("from=yesterday", "to=2026-13-01", "format=xml"):
        assert api.send("GET", f"/audit?{wrong}").status_code == 422


@pytest.mark.django_db
def test_the_export_is_all_of_the_filter_and_safe_in_a_spreadsheet(api: ApiClient, system: Actor) -> None:
    tenant = make_tenant(system, name='=HYPERLINK("http://evil")')
    for weight in range(2, 7):
        update_tenant(actor=Actor(kind="user", id="u", label="@evil", scopes=system.scopes), tenant_id=tenant.id,
                      weight=weight)  # fmt: skip
    assert len(api.send("GET", f"/audit?limit=1&tenant={tenant.id}").json()["results"]) == 1
    answer = api.send("GET", f"/audit?format=csv&limit=1&tenant={tenant.id}")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(StringIO(answer.getvalue().decode())))
    assert [row["actor_label"] for row in rows] == ["'@evil"] * 5 + ["test"]
    assert json.loads(rows[0]["after"]) == {"weight": 6}
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row.values())
    exported = json.loads(api.send("GET", f"/audit?format=json&tenant={tenant.id}").getvalue())
    assert [(e["hash"], e["after"]) for e in exported] == [
        (e["hash"], e["after"]) for e in api.send("GET", f"/audit?tenant={tenant.id}").json()["results"]
    ]
    assert json.loads(api.send("GET", "/audit?format=json&tenant=nobody").getvalue()) == []


@pytest.mark.django_db
def test_an_export_reads_a_thousand_at_a_time(system: Actor, django_assert_num_queries: Any) -> None:
    entries = [
        AuditEntry(id=number, actor_kind="user", actor_id="u", actor_label="u", action="x", object_type="x",
                   object_id="x", hash="x")
        for number in range(1, 2_501)
    ]  # fmt: skip
    AuditEntry.objects.bulk_create(entries)
    with django_assert_num_queries(4):
        assert [entry.id for entry in all_of(queries.entries(actor=system))] == list(range(2_500, 0, -1))


@pytest.mark.django_db
def test_the_page_names_what_was_changed_and_links_to_it(operator: Any, system: Actor) -> None:
    world = make_world(system)
    enliven(world, system)
    alive, gone = make_tenant(system, name="Alive"), make_tenant(system, name="<b>Gone</b>")
    key, _ = make_key(system, gone, make_pool(system, name="org/named"), name="their key")
    change_tenants(actor=system, tenant_ids=[alive.id, gone.id], reason="", state="suspended")
    delete_tenant(actor=system, tenant_id=gone.id)
    tier = create_tier(actor=system, name="short-lived", rank=9)
    delete_tier(actor=system, tier_id=tier.id)
    client = Client()
    client.force_login(operator)
    answer = client.get("/audit/")
    rows = {row["entry"].action: row["objects"] for row in answer.context["entries"]}
    assert len(answer.context["entries"]) > 20
    assert [(each.name, each.url) for each in rows["tenant.deleted"].shown] == [("<b>Gone</b> (deleted)", "")]
    assert [(each.name, each.url) for each in rows["tier.deleted"].shown] == [("short-lived", "")]
    both = rows["tenant.changed_together"]
    assert ({each.id: each.url != "" for each in both.shown}, both.n_more) == ({alive.id: True, gone.id: False}, 0)
    issued = next(row["objects"] for row in answer.context["entries"] if row["entry"].object_id == key.id)
    assert (issued.shown[0].name, issued.shown[0].url, issued.tenant.name) == ("their key", "", "<b>Gone</b> (deleted)")
    text = answer.content.decode()
    assert "<b>Gone" not in text
    assert f'<code class="muted">{alive.id}</code>' in text
    links = {each.url for row in answer.context["entries"] for each in row["objects"].shown if each.url}
    assert len({link.split("/")[1] for link in links}) > 4
    for link in links:
        assert client.get(link).status_code == 200, link


@pytest.mark.django_db
def test_the_page_filters_exports_and_shows_the_head(operator: Any, system: Actor) -> None:
    tenant = make_tenant(system, name="<script>alert(1)</script>")
    head = log_head()
    assert head is not None
    client = Client()
    client.force_login(operator)
    page = client.get("/audit/", {"tenant": tenant.id, "action": "tenant"}).content.decode()
    assert page.count('<tr id="entry-') == 1
    assert head.hash in page
    assert "<script>alert" not in page
    assert f'href="/audit.csv?action=tenant&amp;tenant={tenant.id}"' in page
    assert client.get("/audit/", {"from": "nonsense"}).status_code == 422
    lines = client.get(f"/audit.csv?tenant={tenant.id}").getvalue().decode().splitlines()
    assert len(lines) == 2
    assert len(json.loads(client.get(f"/audit.json?tenant={tenant.id}").getvalue())) == 1


MIGRATION = """
import django
django.setup()
from django.core.management import call_command
from django.db import connection
call_command("migrate", "audit", "0002", verbosity=0)
with connection.cursor() as cursor:
    cursor.execute('''INSERT INTO audit_auditentry
        (at, actor_kind, actor_id, actor_label, action, object_type, object_id, tenant, before, after, request_id)
        SELECT now(), 'user', 'u', 'ü', 'tier.updated', 'tier', n::text, '', '{"rank": 1.50}', '{"rank": 1e2}', ''
        FROM generate_series(1, 2500) AS n''')
call_command("migrate", "audit", verbosity=0)
with connection.cursor() as cursor:
    try:
        cursor.execute("UPDATE audit_auditentry SET hash = ''")
    except django.db.DatabaseError:
        print("refused")
call_command("verify_audit")
"""


def test_entries_of_before_are_linked_by_the_migration(old_database: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MIGRATION],
        env=old_database | {"DJANGO_SETTINGS_MODULE": "controlplane.settings"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "refused"
    assert lines[1].startswith("2500 entries")
