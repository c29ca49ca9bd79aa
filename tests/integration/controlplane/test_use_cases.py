"""Use cases: permission, audit and revision in one transaction."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, connection, transaction

from controlplane.accounts.actions import change_password, create_user, remove_user, update_user
from controlplane.accounts.models import Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.common.clock import to_us, utc_now
from controlplane.common.errors import ConfigRefused, Conflict, Invalid, NotAllowed, VersionMismatch
from controlplane.common.use_case import mark_config_changed, use_case
from controlplane.fleet.actions import create_pool, delete_pool, update_pool
from controlplane.fleet.models import ModelName
from controlplane.keys.actions import issue_key, revoke_key, update_key
from controlplane.rollout.models import Revision
from controlplane.rollout.queries import current_body, current_number
from controlplane.tenants.actions import create_group, delete_group, update_group, update_tenant
from controlplane.tenants.models import Group, Tenant, TenantTier
from controlplane.tiers.actions import delete_tier, update_tier
from controlplane.tiers.models import Tier
from router_ext.wire.controlplane import ConfigSnapshot, key_digest, parse_key, snapshot_digest
from tests.support.control_plane import make_backend, make_group, make_key, make_pool, make_tenant, make_tier, make_user

pytestmark = pytest.mark.django_db


def published() -> ConfigSnapshot:
    return msgspec.json.decode(current_body()[2], type=ConfigSnapshot)


def test_a_new_tenant_is_in_the_next_revision(system: Actor) -> None:
    tenant = make_tenant(system, weight=3.0, tiers=["interactive", "standard"], default_tier="interactive")
    snapshot = published()
    (row,) = snapshot.tenants
    assert (row.tenant, row.weight, row.state, row.default_tier) == (tenant.id, 3.0, "active", "interactive")
    assert set(row.tiers) == {"interactive", "standard"}
    assert snapshot.digest == snapshot_digest(snapshot) == Revision.objects.get(pk=snapshot.revision).digest


def test_a_key_is_published_as_its_digest_alone(system: Actor, settings: Any) -> None:
    tenant, pool = make_tenant(system), make_pool(system)
    key, text = make_key(system, tenant, pool)
    (row,) = published().keys
    assert row.digest == key_digest(text, settings.KEY_PEPPERS[1])
    assert row.public_id == parse_key(text) == key.public_id
    assert row.default_pool == pool.name
    secret = text.split("_")[2]
    assert secret.encode() not in current_body()[2]
    assert not AuditEntry.objects.filter(after__icontains=secret).exists()


def test_a_revoked_key_leaves_the_snapshot_and_an_expired_one_stays(system: Actor) -> None:
    tenant, pool = make_tenant(system), make_pool(system)
    expiry = utc_now() + timedelta(hours=1)
    expiring, _ = make_key(system, tenant, pool, expires_at=expiry)
    revoked, _ = make_key(system, tenant, pool)
    revoke_key(actor=system, key_id=revoked.id)
    (row,) = published().keys
    assert (row.key, row.expires_at_us) == (expiring.id, to_us(expiry))


def test_a_suspended_tenant_is_published_as_such(system: Actor) -> None:
    tenant = make_tenant(system)
    update_tenant(actor=system, tenant_id=tenant.id, state="suspended")
    assert [t.state for t in published().tenants] == ["suspended"]


def test_policy_backends_and_knobs_reach_the_snapshot(system: Actor) -> None:
    pool = make_pool(system, aliases=["short"], scheduling={"burst_ratio": 0.5})
    backend = make_backend(system, pool, kv_tokens=2_048, block_size=16, is_chunked=False)
    update_pool(actor=system, pool_id=pool.id, policy="fifo")
    (row,) = published().pools
    assert row.scheduling == {"burst_ratio": 0.5, "policy": "fifo"}
    assert row.aliases == ["short"]
    (stated,) = row.backends
    assert (stated.backend, stated.kv_tokens, stated.block_size, stated.is_chunked) == (backend.id, 2_048, 16, False)


def test_several_changes_in_one_use_case_give_one_revision(system: Actor) -> None:
    @use_case()
    def both(*, actor: Actor) -> None:
        make_tenant(actor)
        make_pool(actor)

    before = current_number()
    both(actor=system)
    assert current_number() == before + 1


def test_a_change_that_changes_nothing_gives_no_revision_and_no_audit_entry(system: Actor) -> None:
    tenant = make_tenant(system)
    number, entries = current_number(), AuditEntry.objects.count()
    assert update_tenant(actor=system, tenant_id=tenant.id, weight=tenant.weight).version == tenant.version
    assert (current_number(), AuditEntry.objects.count()) == (number, entries)


def test_an_invalid_configuration_rolls_the_change_back(system: Actor) -> None:
    """A tenant cannot lose a tier that one of its keys is narrowed to."""
    tenant = make_tenant(system, tiers=["standard", "batch"])
    pool = make_pool(system)
    make_key(system, tenant, pool, tiers=["batch"])
    number, entries = current_number(), AuditEntry.objects.count()
    with pytest.raises(ConfigRefused, match="batch"):
        update_tenant(actor=system, tenant_id=tenant.id, tiers=["standard"])
    assert {t.name for t in Tenant.objects.get(pk=tenant.id).tiers.all()} == {"standard", "batch"}
    assert (current_number(), AuditEntry.objects.count()) == (number, entries)


def test_marking_a_change_outside_a_use_case_is_a_defect() -> None:
    with pytest.raises(RuntimeError):
        mark_config_changed("nothing")


def test_a_failed_use_case_leaves_no_mark_for_the_next(system: Actor) -> None:
    @use_case()
    def fails(*, actor: Actor) -> None:
        mark_config_changed("never")
        raise Conflict("no")

    @use_case()
    def harmless(*, actor: Actor) -> None:
        pass

    make_tenant(system)
    with pytest.raises(Conflict):
        fails(actor=system)
    Tenant.objects.update(name="changed behind the back of use cases")
    number = current_number()
    harmless(actor=system)
    assert current_number() == number


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 0.0}, {"weight": -1.0}, {"weight": float("nan")}, {"weight": 1e9}, {"max_queued": 0}, {"name": "  "},
        {"name": "a\nb"}, {"slug": "Has Spaces"}, {"tiers": []}, {"tiers": ["unknown"]}, {"default_tier": "unknown"},
        {"state": "gone"},
    ],
)  # fmt: skip
def test_a_tenant_out_of_range_is_refused_by_field(system: Actor, change: dict[str, Any]) -> None:
    tenant = make_tenant(system)
    with pytest.raises(Invalid) as caught:
        update_tenant(actor=system, tenant_id=tenant.id, **change)
    assert set(change) & set(caught.value.fields) or "default_tier" in caught.value.fields


def test_a_stale_version_is_refused(system: Actor) -> None:
    tenant = make_tenant(system)
    update_tenant(actor=system, tenant_id=tenant.id, expected_version=1, weight=2.0)
    with pytest.raises(VersionMismatch):
        update_tenant(actor=system, tenant_id=tenant.id, expected_version=1, weight=3.0)
    assert Tenant.objects.get(pk=tenant.id).weight == 2.0


def test_a_slug_names_one_tenant(system: Actor) -> None:
    tenant = make_tenant(system)
    with pytest.raises(Conflict):
        make_tenant(system, slug=tenant.slug)


def test_a_viewer_changes_nothing(system: Actor, viewer: User) -> None:
    tenant, pool = make_tenant(system), make_pool(system)
    for attempt in (
        lambda: update_tenant(actor=viewer.actor, tenant_id=tenant.id, weight=9.0),
        lambda: create_pool(actor=viewer.actor, name="x"),
        lambda: issue_key(actor=viewer.actor, tenant_id=tenant.id, name="x", default_pool=pool.id),
    ):
        with pytest.raises(NotAllowed):
            attempt()


def test_the_database_holds_the_default_tier_to_the_allowed_ones(system: Actor) -> None:
    tenant = make_tenant(system, tiers=["standard", "batch"])
    other = make_tier(system, "other")
    Tenant.objects.filter(pk=tenant.id).update(default_tier=other)
    with pytest.raises(IntegrityError), transaction.atomic():
        connection.check_constraints()
    Tenant.objects.filter(pk=tenant.id).update(default_tier=tenant.default_tier)
    TenantTier.objects.filter(tenant=tenant, tier=tenant.default_tier).delete()
    with pytest.raises(IntegrityError), transaction.atomic():
        connection.check_constraints()
    TenantTier.objects.create(tenant=tenant, tier=tenant.default_tier)


def test_a_tier_in_use_is_not_deleted(system: Actor) -> None:
    tenant = make_tenant(system)
    with pytest.raises(Conflict):
        delete_tier(actor=system, tier_id=tenant.default_tier_id)
    free = make_tier(system, "free")
    delete_tier(actor=system, tier_id=free.id)
    assert not Tier.objects.filter(pk=free.id).exists()


def test_a_tier_target_may_be_taken_away(system: Actor) -> None:
    tier = make_tier(system, "fast", ttft_target_s=0.5)
    update_tier(actor=system, tier_id=tier.id, ttft_target_s=None)
    assert [t.ttft_target_s for t in published().tiers] == [None]


def test_a_fairness_group_and_who_is_in_it_are_published(system: Actor) -> None:
    group = make_group(system, name="research", weight=3.0)
    tenant = make_tenant(system, weight=2.0, group="research")
    alone = make_tenant(system)
    snapshot = published()
    assert [(g.group, g.weight) for g in snapshot.groups] == [("research", 3.0)]
    assert {t.tenant: t.group for t in snapshot.tenants} == {tenant.id: "research", alone.id: None}
    update_group(actor=system, group_id=group.id, weight=5.0)
    update_tenant(actor=system, tenant_id=tenant.id, group=None)
    snapshot = published()
    assert [g.weight for g in snapshot.groups] == [5.0]
    assert all(t.group is None for t in snapshot.tenants)


def test_a_fairness_group_with_tenants_is_not_deleted(system: Actor) -> None:
    group = make_group(system)
    tenant = make_tenant(system, group=group.name)
    with pytest.raises(Conflict, match=r"has 1 tenant$"):
        delete_group(actor=system, group_id=group.id)
    update_tenant(actor=system, tenant_id=tenant.id, group=None)
    delete_group(actor=system, group_id=group.id)
    assert not Group.objects.exists()
    assert published().groups == []


def test_a_fairness_group_has_a_name_of_its_own(system: Actor) -> None:
    make_group(system, name="research")
    with pytest.raises(Conflict):
        create_group(actor=system, name="research")


@pytest.mark.parametrize("group", ["nobody", "with\0nul"])
def test_an_unknown_fairness_group_is_refused_by_field(system: Actor, group: str) -> None:
    tenant = make_tenant(system)
    with pytest.raises(Invalid) as refused:
        update_tenant(actor=system, tenant_id=tenant.id, group=group)
    assert list(refused.value.fields) == ["group"]


def test_a_word_names_one_pool(system: Actor) -> None:
    make_pool(system, name="first", aliases=["one"])
    for fields in ({"name": "one"}, {"name": "second", "aliases": ["first"]}, {"name": "second", "aliases": ["one"]}):
        with pytest.raises(Conflict):
            make_pool(system, **fields)
    for word in ("tgi", "dummy"):
        with pytest.raises(Invalid):
            make_pool(system, name=word)


def test_a_pool_renamed_answers_to_its_new_words_alone(system: Actor) -> None:
    pool = make_pool(system, name="old", aliases=["a", "b"])
    update_pool(actor=system, pool_id=pool.id, name="new", aliases=["b", "c"])
    words = set(ModelName.objects.filter(pool=pool).values_list("word", "is_alias"))
    assert words == {("new", False), ("b", True), ("c", True)}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"policy": "first-past-the-post"}, "policy"),
        ({"scheduling": {"bursts": 1}}, "scheduling"),
        ({"scheduling": {"gamma": 7}}, "scheduling.gamma"),
        ({"scheduling": {"tenants": {}}}, "scheduling"),
    ],
)
def test_a_pool_that_no_scheduler_could_run_is_refused(system: Actor, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        make_pool(system, **fields)
    assert field in caught.value.fields


def test_a_pool_with_backends_is_not_deleted(system: Actor) -> None:
    pool = make_pool(system)
    make_backend(system, pool)
    with pytest.raises(Conflict):
        delete_pool(actor=system, pool_id=pool.id)


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "ftp://host"}, {"url": "http://user:secret@host"}, {"url": "http://"}, {"url": "http://h/?x=1"},
        {"kv_tokens": 16, "block_size": 16}, {"block_size": 0}, {"speculate": 65}, {"name": "Not a slug"},
    ],
)  # fmt: skip
def test_a_backend_that_cannot_be_is_refused(system: Actor, fields: dict[str, Any]) -> None:
    pool = make_pool(system)
    with pytest.raises(Invalid) as caught:
        make_backend(system, pool, **fields)
    assert set(fields) & set(caught.value.fields)


def test_a_key_is_narrowed_only_within_its_tenant(system: Actor) -> None:
    tenant, pool = make_tenant(system), make_pool(system)
    make_tier(system, "other")
    for fields in ({"tiers": ["other"]}, {"default_tier": "other"}, {"expires_at": utc_now() - timedelta(seconds=1)}):
        with pytest.raises(Invalid):
            make_key(system, tenant, pool, **fields)


def test_a_revoked_key_is_not_changed_any_more(system: Actor) -> None:
    key, _ = make_key(system, make_tenant(system), make_pool(system))
    revoke_key(actor=system, key_id=key.id)
    entries = AuditEntry.objects.count()
    revoke_key(actor=system, key_id=key.id)
    assert AuditEntry.objects.count() == entries
    with pytest.raises(Conflict):
        update_key(actor=system, key_id=key.id, name="again")


def test_the_only_pool_is_a_keys_default(system: Actor) -> None:
    tenant = make_tenant(system)
    pool = make_pool(system)
    key, _ = issue_key(actor=system, tenant_id=tenant.id, name="x")
    assert key.default_pool == pool
    make_pool(system)
    with pytest.raises(Invalid) as caught:
        issue_key(actor=system, tenant_id=tenant.id, name="y")
    assert "default_pool" in caught.value.fields


def test_the_audit_entry_holds_what_changed_and_by_whom(operator: User, system: Actor) -> None:
    tenant = make_tenant(system)
    update_tenant(actor=operator.actor, tenant_id=tenant.id, weight=4.0)
    entry = AuditEntry.objects.latest("id")
    assert (entry.action, entry.object_id, entry.tenant) == ("tenant.updated", tenant.id, tenant.id)
    assert (entry.actor_kind, entry.actor_id, entry.actor_label) == ("user", operator.id, operator.email)
    assert (entry.before, entry.after) == ({"weight": 1.0}, {"weight": 4.0})


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_auditentry SET action = 'x'", "DELETE FROM audit_auditentry", "TRUNCATE audit_auditentry",
    ],
)  # fmt: skip
def test_the_audit_log_refuses_change(system: Actor, statement: str) -> None:
    make_tenant(system)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)


def test_a_one_time_password_must_be_replaced_by_its_owner(system: Actor, operator: User) -> None:
    user, password = create_user(actor=system, email="New@Example.Test", role=Role.OPERATOR)
    assert (user.email, user.must_change_password) == ("new@example.test", True)
    assert user.check_password(password)
    fresh = "quite another password"
    with pytest.raises(NotAllowed):
        change_password(actor=operator.actor, user=user, old_password=password, new_password=fresh)
    for old, new in ((f"{password}x", fresh), (password, password), (password, "short"), (password, "password123456")):
        with pytest.raises(Invalid):
            change_password(actor=user.actor, user=user, old_password=old, new_password=new)
    change_password(actor=user.actor, user=user, old_password=password, new_password=fresh)
    user.refresh_from_db()
    assert user.check_password(fresh)
    assert not user.must_change_password
    text = str(list(AuditEntry.objects.values()))
    assert password not in text
    assert fresh not in text


def test_the_last_owner_stays(system: Actor, viewer: User) -> None:
    owner = make_user(role="owner")
    for change in ({"role": "viewer"}, {"is_active": False}):
        with pytest.raises(Conflict):
            update_user(actor=system, user_id=owner.id, **change)
    with pytest.raises(Conflict):
        remove_user(actor=system, user_id=owner.id)
    update_user(actor=system, user_id=viewer.id, role="owner")
    assert update_user(actor=system, user_id=owner.id, is_active=False).is_active is False
    remove_user(actor=system, user_id=owner.id)


def test_bootstrap_makes_keeps_and_resets_the_first_operator(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> Any:
        call_command("bootstrap_operator", "first@example.test", "--json", *words)
        return msgspec.json.decode(capsys.readouterr().out)["password"]

    first = run()
    assert User.objects.get().check_password(first)
    assert run() is None
    second = run("--reset")
    assert second != first
    assert User.objects.get().check_password(second)


def test_the_demo_is_laid_down_once(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    def run(**options: str) -> dict[str, Any]:
        call_command("seed_demo", pool="org/model", backend_url=["http://127.0.0.1:3999"], kv_tokens=4_096, **options)
        result: dict[str, Any] = msgspec.json.decode(capsys.readouterr().out)
        return result

    call_command("bootstrap_operator")
    capsys.readouterr()
    first = run()
    held = tmp_path / "held.json"
    held.write_bytes(msgspec.json.encode(first))
    assert run(held=str(held)) == first
    lost = run()
    assert lost["tenant_ids"] == first["tenant_ids"]
    assert lost["router_token"] != first["router_token"]
    assert {k.public_id for k in published().keys} >= {parse_key(k) for k in first["tenants"].values()}
    targets = {t.name: t.ttft_target_s for t in published().tiers}
    assert targets == {"interactive": 2.0, "standard": None, "batch": None}


def test_tiers_are_published_by_rank_and_a_change_reads_every_table_once(
    system: Actor, django_assert_max_num_queries: Any
) -> None:
    for name, rank in (("slow", 9_000), ("fast", 7_000), ("middle", 8_000)):
        make_tier(system, name, rank=rank)
    tenant = make_tenant(system, tiers=["slow", "fast", "middle"], default_tier="middle")
    pool = make_pool(system)
    for tiers in (["slow", "fast"], []):
        make_key(system, tenant, pool, tiers=tiers, default_tier="slow")
    snapshot = published()
    assert [(t.tiers, t.default_tier) for t in snapshot.tenants] == [(["fast", "middle", "slow"], "middle")]
    assert [(k.tiers, k.default_tier) for k in snapshot.keys] == [(["fast", "slow"], "slow"), ([], "slow")]
    assert {k.default_pool for k in snapshot.keys} == {pool.name}
    for _ in range(20):
        make_key(system, make_tenant(system), pool)
    with django_assert_max_num_queries(30):
        update_tenant(actor=system, tenant_id=tenant.id, weight=2.0)


def test_a_tenant_has_a_time_zone(system: Actor) -> None:
    tenant = make_tenant(system, timezone="Asia/Kolkata")
    assert Tenant.objects.get().timezone == "Asia/Kolkata"
    with pytest.raises(Invalid, match="timezone: 'Mars/Base' is no time zone"):
        update_tenant(actor=system, tenant_id=tenant.id, timezone="Mars/Base")
    assert make_tenant(system).timezone == "UTC"
