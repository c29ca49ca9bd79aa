"""``fairlane apply`` and ``fairlane export`` against a control plane as it is deployed."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane.accounts import members_api
from controlplane.accounts.actions import issue_token
from controlplane.accounts.invitations import accept_invitation
from controlplane.accounts.models import Invitation, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import system_actor
from controlplane.common.rest import LimitsSerializer, StrictSerializer
from controlplane.fleet import api as fleet_api
from controlplane.fleet.models import Pool
from controlplane.keys import api as keys_api
from controlplane.keys.models import ApiKey
from controlplane.tenants import api as tenants_api
from controlplane.tenants.actions import update_tenant
from controlplane.tenants.models import Group, Tenant
from controlplane.tiers import api as tiers_api
from controlplane.tiers.models import Tier
from controlplane.usage import prices_api
from router_ext import cli
from router_ext.errors import SettingsError
from router_ext.ops.apply import command, deeds
from router_ext.ops.apply.kinds import KINDS
from router_ext.ops.rest import Rest
from tests.support.control_plane import PASSWORD, Site, empty_all_tables, make_key, make_tenant, make_user

SYSTEM = system_actor("test")
FILE = """
tiers:
  - {name: interactive, rank: 0, ttft_target_s: 2}
  - {name: batch, rank: 50}
groups: [{name: research, weight: 2.5}]
pools: [{name: org/model, policy: fifo, aliases: [m, n], scheduling: {burst_ratio: 0.5}}]
tenants:
  - slug: chatbot
    name: Chatbot
    weight: 2
    tiers: [interactive, batch]
    default_tier: interactive
    group: research
    limits: {concurrent: 3}
  - {slug: old, name: Old, tiers: [batch], default_tier: batch, state: suspended}
"""
EVERY_FIELD = """
managed_by: platform
tiers:
- {name: fast, rank: 3, ttft_target_s: 1.5, max_queue_wait_s: 30.0, grammar_stall_s: 0.5}
- {name: slow, rank: 9}
groups:
- {name: lab, weight: 2.5}
pools:
- name: org/model
  aliases: [m, n]
  policy: fifo
  scheduling: {burst_ratio: 0.5}
  tokenizer_path: /models/tokenizer.json
  is_guarded: false
  vocabulary: 32000
  takes_grammars: false
backends:
- pool: org/model
  name: one
  url: http://10.0.0.1:3000
  kv_tokens: 4096
  block_size: 16
  prefill_budget_tokens: 999
  is_chunked: false
  speculate: 3
  is_cordoned: true
  takes_grammars: false
  api_key_name: second
price_lists:
- name: a-2026
  currency: EUR
  timezone: Asia/Kolkata
  prices:
  - {model: '', valid_from: 2026-01-01, prompt_micro: 150000, output_micro: 600000}
  - {model: org/model, valid_from: 2026-02-01, prompt_micro: 1, output_micro: 2}
tenants:
- slug: chatbot
  name: Chat, "bot"
  weight: 2.5
  state: suspended
  tiers: [fast, slow]
  default_tier: slow
  max_queued: 17
  timezone: Europe/Berlin
  group: lab
  limits: {concurrent: 1, requests_per_minute: 2, tokens_per_minute: 3, soft_tokens_per_day: 4, tokens_per_day: 5,
    soft_tokens_per_month: 6, tokens_per_month: 7}
price_assignments:
- {tenant: chatbot, valid_from: 2026-03-01, price_list: a-2026}
- {tenant: chatbot, valid_from: 2026-04-01, price_list: null}
keys:
- tenant: chatbot
  name: prod
  default_pool: org/model
  tiers: [fast]
  default_tier: fast
  may_choose_tier: true
  expires_at: '2099-01-01T00:00:00Z'
  limits: {concurrent: 1, requests_per_minute: 2, tokens_per_minute: 3, soft_tokens_per_day: 4, tokens_per_day: 5,
    soft_tokens_per_month: 6, tokens_per_month: 7}
members:
- {email: ann@example.test, role: tenant_admin, tenant: chatbot, name: Ann, is_active: false}
"""
SERIALIZERS: dict[str, tuple[type[StrictSerializer], ...]] = {
    "tiers": (tiers_api.NewTierSerializer, tiers_api.TierChangesSerializer),
    "groups": (tenants_api.NewGroupSerializer, tenants_api.GroupChangesSerializer),
    "pools": (fleet_api.NewPoolSerializer, fleet_api.PoolChangesSerializer),
    "backends": (fleet_api.NewBackendSerializer, fleet_api.BackendChangesSerializer),
    "price_lists": (prices_api.NewPriceListSerializer, prices_api.PriceListChangesSerializer),
    "tenants": (tenants_api.NewTenantSerializer, tenants_api.TenantChangesSerializer),
    "price_assignments": (prices_api.NewAssignmentSerializer, prices_api.AssignmentChangesSerializer),
    "keys": (keys_api.NewKeySerializer, keys_api.KeyChangesSerializer),
    "members": (members_api.NewInvitationSerializer, members_api.MemberChangesSerializer),
}
Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def run(running_site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line; gives its status, what it wrote on stdout (as JSON where it is some) and on stderr."""
    monkeypatch.setenv("FAIRLANE_URL", running_site())
    monkeypatch.setenv("FAIRLANE_TOKEN", owners_token())

    def call(*words: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        status = cli.main(list(words))
        said = capsys.readouterr()
        return status, json.loads(said.out) if "--json" in words and said.out else said.out, said.err

    return call


def owners_token() -> str:
    scopes = ["admin.read", "admin.write", "admin.members"]
    return issue_token(actor=SYSTEM, user=make_user(role="owner"), name="apply", scopes=scopes)[1]


def counts(said: dict[str, list[Any]]) -> list[int]:
    return [len(said[name]) for name in ("created", "updated", "deleted", "unchanged", "errors")]


def test_a_file_is_applied_changed_and_taken_back(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE)
    words = ("apply", "-f", str(path), "--json", "--detailed-exitcode")
    by_hand = make_tenant(SYSTEM, slug="by-hand")
    make_tenant(SYSTEM, slug="theirs", managed_by="terraform")

    # A dry run says all of it and does nothing.
    entries = AuditEntry.objects.count()
    status, said, _ = run(*words, "--dry-run")
    assert (status, counts(said)) == (2, [6, 0, 0, 0, 0])
    assert AuditEntry.objects.count() == entries
    assert run("apply", "-f", str(path), "--dry-run")[0] == 0

    status, said, _ = run(*words)
    assert (status, counts(said)) == (2, [6, 0, 0, 0, 0])
    assert said["created"] == [
        "tiers/interactive", "tiers/batch", "groups/research", "pools/org/model", "tenants/chatbot", "tenants/old"
    ]  # fmt: skip
    assert Tenant.objects.get(slug="old").state == "suspended"
    assert AuditEntry.objects.filter(object_type="tenant", actor_kind="token").count() == 2

    # Again: nothing to do.
    entries = AuditEntry.objects.count()
    status, said, _ = run(*words)
    assert (status, counts(said), AuditEntry.objects.count()) == (0, [0, 0, 0, 6, 0], entries)

    # What the file does not state stays as somebody set it; what it states is set back; what it drops goes.
    chatbot = Tenant.objects.get(slug="chatbot")
    update_tenant(actor=SYSTEM, tenant_id=chatbot.id, weight=9.0, max_queued=5, limits={"tokens_per_day": 7})
    path.write_text(FILE.partition("  - {slug: old")[0].replace("concurrent: 3", "concurrent: null"))
    status, out, _ = run("apply", "-f", str(path), "--detailed-exitcode")
    assert status == 2
    assert "~ tenants/chatbot\n    weight: 9.0 -> 2\n" in out
    assert "- tenants/old" in out
    chatbot.refresh_from_db()
    assert (chatbot.weight, chatbot.max_queued, chatbot.concurrent, chatbot.tokens_per_day) == (2.0, 5, None, 7)
    assert Tenant.objects.get(name="Old (deleted)").deleted_at is not None
    assert set(Tenant.objects.filter(deleted_at=None).values_list("slug", flat=True)) == {
        "chatbot", "by-hand", "theirs"
    }  # fmt: skip

    # An export is a file that changes nothing.
    exported = tmp_path / "exported.yaml"
    exported.write_text(run("export", "--managed-by", "fairlane-apply")[1])
    status, said, _ = run("apply", "-f", str(exported), "--json", "--detailed-exitcode")
    assert (status, counts(said)) == (0, [0, 0, 0, 5, 0])
    everything = run("export", "--json")[1]
    assert {t["slug"] for t in everything["tenants"]} == {"chatbot", "by-hand", "theirs"}

    # What nobody manages is taken over on demand only, and what another program manages never is.
    path.write_text(f"tenants:\n- {{slug: {by_hand.slug}, weight: 4}}\n- {{slug: chatbot}}\n- {{slug: theirs}}\n")
    status, said, err = run(*words, "--adopt")
    assert (status, counts(said)) == (1, [0, 0, 0, 0, 1])
    assert f"{path}:4: tenants[2].slug: 'theirs' is managed by 'terraform'" in err
    path.write_text(f"tenants:\n- {{slug: {by_hand.slug}, weight: 4}}\n- {{slug: chatbot}}\n")
    assert run(*words)[0] == 1
    assert run(*words, "--adopt")[1]["updated"] == ["tenants/by-hand"]
    assert run(*words)[0] == 0

    # What the control plane alone can know is told at its line; the rest is done all the same.
    path.write_text(
        "tiers:\n- {name: batch, rank: 51}\ntenants:\n- slug: chatbot\n  group: nobody\n- {slug: by-hand}\n"
    )
    status, said, err = run(*words)
    assert (status, counts(said)) == (1, [0, 1, 0, 1, 2])
    assert f"{path}:5: tenants[0].group: there is no fairness group 'nobody'" in err
    assert f"{path}:1: tiers: 'interactive' cannot be deleted: 409" in err
    assert Tier.objects.get(name="batch").rank == 51

    # Somebody is faster between reading and writing: nothing of his is lost.
    path.write_text("tenants:\n- {slug: chatbot, weight: 3}\n- {slug: by-hand}\n")
    read = command.everything

    async def and_then_changed(rest: Rest, wanted: list[str]) -> dict[str, list[dict[str, Any]]]:
        found = await read(rest, wanted)
        Tenant.objects.filter(slug="chatbot").update(version=99, name="Renamed")
        return found

    with monkeypatch.context() as patched:
        patched.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        patched.setattr(command, "everything", and_then_changed)
        status, _, err = run(*words)
    assert (status, "412" in err, f"{path}:2: tenants[0].slug" in err) == (1, True, True)
    assert Tenant.objects.get(slug="chatbot").weight == 2.0

    # Where the configuration as a whole is refused, each is tried by itself and the culprit is told.
    make_key(SYSTEM, Tenant.objects.get(slug="by-hand"), Pool.objects.get(), tiers=["standard"])
    path.write_text(
        "groups:\n- {name: more}\n- {name: research}\ntenants:\n- {slug: chatbot}\n- slug: by-hand\n"
        "  tiers: [batch]\n  default_tier: batch\n"
    )
    status, said, err = run(*words)
    assert (status, said["created"], counts(said)) == (1, ["groups/more"], [1, 0, 0, 2, 1])
    assert f"{path}:6: tenants[1]: " in err
    assert "standard" in err

    # A wrong token, a wrong address, a file that is not there.
    monkeypatch.setenv("FAIRLANE_TOKEN", "flt_wrong")
    assert run("export")[0] == 1
    monkeypatch.delenv("FAIRLANE_TOKEN")
    secret = tmp_path / "token"
    secret.write_text("flt_wrong\n")
    monkeypatch.setenv("FAIRLANE_TOKEN_FILE", str(secret))
    assert "401" in run("export")[2]
    monkeypatch.setenv("FAIRLANE_URL", "http://127.0.0.1:1")
    assert "does not answer" in run("export")[2]
    assert "does not answer" in run(*words)[1]["errors"][0]["message"]
    assert "cannot read" in run("apply", "-f", str(tmp_path / "none.yaml"))[2]


def test_a_file_knows_every_field_that_rest_takes() -> None:
    """A new field of a serializer, or a new kind, fails here until the file knows it and the round trip states it."""
    given = yaml.safe_load(EVERY_FIELD)
    assert [kind.name for kind in KINDS] == list(SERIALIZERS) == [name for name in given if name != "managed_by"]
    for kind in KINDS:
        taken = {name for serializer in SERIALIZERS[kind.name] for name in serializer().fields}
        assert set(kind.fields) | {"managed_by"} == taken, kind.name
        assert set(given[kind.name][0]) == set(kind.fields), kind.name
    assert set(given["tenants"][0]["limits"]) == set(LimitsSerializer().fields)
    assert set(given["price_lists"][0]["prices"][0]) == set(prices_api.PriceSerializer().fields)


def test_every_kind_and_field_round_trips(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "all.yaml", tmp_path / "keys.jsonl"
    path.write_text(EVERY_FIELD)
    words = ("apply", "-f", str(path), "--json", "--detailed-exitcode")
    status, said, err = run(*words, "--keys-out", str(out))
    assert (status, err, counts(said)) == (2, "", [11, 0, 0, 0, 0])
    assert said["created"][-2:] == ["keys/chatbot/prod", "members/ann@example.test"]
    # Secrets are in the file of its owner and nowhere else.
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    key, link = [json.loads(line) for line in out.read_text().splitlines()]
    assert (key["kind"], key["tenant"], key["name"], key["key"][:4]) == ("keys", "chatbot", "prod", "flk_")
    assert (link["email"], "/invitations/" in link["link"]) == ("ann@example.test", True)
    assert "secrets" not in said
    # Ann is invited; what her account will be stands in the file as well, and changes nothing yet.
    assert counts(run(*words)[1]) == [0, 0, 0, 11, 0]
    accept_invitation(actor=SYSTEM, text=link["link"].split("/")[-2], name="", password=PASSWORD)
    assert run(*words)[1]["updated"] == ["members/ann@example.test"]
    ann = User.objects.get(email="ann@example.test")
    assert (ann.name, ann.is_active, ann.managed_by) == ("Ann", False, "platform")

    # An export says what the file said, field by field, and applying it changes nothing.
    exported = run("export", "--managed-by", "platform", "--json")[1]
    wanted = yaml.load(EVERY_FIELD, Loader=yaml.BaseLoader)
    assert texts(exported) == wanted
    text = run("export", "--managed-by", "platform")[1]
    assert "flk_" not in text
    path.write_text(text)
    status, said, err = run(*words)
    assert (status, err, counts(said)) == (0, "", [0, 0, 0, 11, 0])

    # In an empty control plane it makes the same again; without --keys-out secrets are shown once.
    empty_all_tables()
    monkeypatch.setenv("FAIRLANE_TOKEN", owners_token())
    status, said, err = run(*words)
    assert (status, err, counts(said)) == (2, "", [11, 0, 0, 0, 0])
    assert [each["kind"] for each in said["secrets"]] == ["keys", "members"]
    again = run("export", "--managed-by", "platform", "--json")[1]
    del exported["members"][0]["name"], exported["members"][0]["is_active"]
    assert again == exported

    # What the file drops goes: the key is revoked, the invitation taken back.
    path.write_text("managed_by: platform\nkeys: []\nmembers: []\nprice_assignments: []\nbackends: []\n")
    status, said, err = run(*words)
    assert (status, err, counts(said)) == (2, "", [0, 0, 5, 0, 0])
    assert not ApiKey.objects.filter(revoked_at=None).exists()
    assert not Invitation.objects.filter(revoked_at=None).exists()

    # And nothing holds on to what it was about, revoked keys least of all.
    path.write_text("managed_by: platform\ntiers: []\ngroups: []\npools: []\nprice_lists: []\ntenants: []\n")
    status, said, err = run(*words)
    assert (status, err, counts(said)) == (2, "", [0, 0, 6, 0, 0])
    assert run("export", "--managed-by", "platform", "--json")[1] == {
        "managed_by": "platform", **{kind.name: [] for kind in KINDS}
    }  # fmt: skip

    # Nobody answers any more in the middle of it: what was done is said.
    path.write_text("groups:\n" + "".join(f"- {{name: g{n}}}\n" for n in range(3)))
    asked = []

    async def breaks(self: Rest, operations: list[Any]) -> list[dict[str, Any]]:
        asked.append(len(operations))
        if len(asked) == 2:
            raise SettingsError("http://x does not answer")
        return await batch(self, operations)

    batch = Rest.batch
    monkeypatch.setattr(Rest, "batch", breaks)
    monkeypatch.setattr(deeds, "TOGETHER", 1)
    status, said, err = run(*words)
    assert (status, said["created"], asked) == (1, ["groups/g0"], [1, 1])
    assert "1 were done or refused, the next 1 of 3 may have been done or not, the rest was not: apply again" in err
    monkeypatch.setattr(Rest, "batch", batch)
    assert run(*words)[1]["created"] == ["groups/g1", "groups/g2"]
    # Where secrets cannot be written, nothing is made.
    path.write_text("groups: [{name: never}]")
    assert "cannot write" in run(*words, "--keys-out", str(tmp_path))[2]
    assert not Group.objects.filter(name="never").exists()


def texts(value: Any) -> Any:
    """Everything as YAML without types reads it."""
    match value:
        case dict():
            return {name: texts(each) for name, each in value.items()}
        case list():
            return [texts(each) for each in value]
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case _:
            return str(value)
