"""``fairlane apply`` and ``fairlane export`` against a control plane as it is deployed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.accounts.actions import issue_token
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import system_actor
from controlplane.tenants.actions import update_tenant
from controlplane.tenants.models import Tenant
from controlplane.tiers.models import Tier
from router_ext import cli
from router_ext.ops.apply.api import Api
from router_ext.ops.apply.kinds import Kind
from tests.support.control_plane import Site, make_tenant, make_user

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
Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def run(running_site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line; gives its status, what it wrote on stdout (as JSON where it is some) and on stderr."""
    _, token = issue_token(
        actor=SYSTEM, user=make_user(role="owner"), name="apply", scopes=["admin.read", "admin.write"]
    )
    monkeypatch.setenv("FAIRLANE_URL", running_site())
    monkeypatch.setenv("FAIRLANE_TOKEN", token)

    def call(*words: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        status = cli.main(list(words))
        said = capsys.readouterr()
        return status, json.loads(said.out) if "--json" in words and said.out else said.out, said.err

    return call


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
    assert AuditEntry.objects.filter(object_type="tenant", actor_kind="token").count() == 3

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
    read = Api.all_of

    async def and_then_changed(self: Api, kind: Kind) -> list[dict[str, Any]]:
        found = await read(self, kind)
        Tenant.objects.filter(slug="chatbot").update(version=99, name="Renamed")
        return found

    with monkeypatch.context() as patched:
        patched.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        patched.setattr(Api, "all_of", and_then_changed)
        status, _, err = run(*words)
    assert (status, "412" in err, f"{path}:2: tenants[0].slug" in err) == (1, True, True)
    assert Tenant.objects.get(slug="chatbot").weight == 2.0

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
    assert "cannot read" in run("apply", "-f", str(tmp_path / "none.yaml"))[2]
