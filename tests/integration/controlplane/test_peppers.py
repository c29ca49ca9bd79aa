"""A new version of the pepper: what is under the old one holds, moves when it is used, and can be given up."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from controlplane.accounts import second_factor, totp
from controlplane.accounts.invitations import invite
from controlplane.accounts.models import Invitation, OperatorToken, Role, User
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.fleet.models import Router, RouterStatus
from controlplane.fleet.routers import authenticate_router, create_router, take_heartbeat
from controlplane.keys import peppers
from controlplane.keys.models import ApiKey
from controlplane.rollout.models import Revision
from router_ext.ops.embedded import free_port
from router_ext.wire.controlplane import Heartbeat, MovedKey, key_digest
from tests.conftest import TEST_SETTINGS
from tests.support.control_plane import (
    Site,
    api_client,
    make_key,
    make_pool,
    make_tenant,
    make_user,
    signed_in,
    wait_for,
)
from tests.support.routers import end

OLD, NEW = bytes.fromhex(TEST_SETTINGS["FAIRLANE_KEY_PEPPER"]), b"n" * 32


@pytest.fixture
def rotation(settings: Any) -> Any:
    """Called once what is to be under the old pepper is made: from then on there are both."""

    def begin() -> None:
        settings.KEY_PEPPERS, settings.KEY_PEPPER_VERSION = {1: OLD, 2: NEW}, 2

    return begin


def beat(*moved: MovedKey) -> Heartbeat:
    return Heartbeat(
        router="rtr_1", version="0", address="", applied_revision=0, applied_at_us=1, moved_keys=list(moved)
    )


@pytest.mark.django_db
def test_what_is_shown_here_moves_and_outlives_the_old_pepper(system: Actor, settings: Any, rotation: Any) -> None:
    owner = make_user(role=Role.OWNER)
    rest = api_client(owner, "admin.read")
    _, flr = create_router(actor=system, name="one")
    _, link = invite(actor=system, email="new@example.test", role=Role.VIEWER)
    rotation()
    assert rest.send("GET", "/tiers").status_code == 200
    assert authenticate_router(f"Bearer {flr}") is not None
    assert Client().get(f"/invitations/{link}/").status_code == 200
    for row, column in ((OperatorToken, "digest"), (Router, "token_digest"), (Invitation, "digest")):
        assert row.objects.get().pepper_version == 2
        assert len(getattr(row.objects.get(), column)) == 64
    settings.KEY_PEPPERS = {2: NEW}
    assert rest.send("GET", "/tiers").status_code == 200
    assert authenticate_router(f"Bearer {flr}") is not None
    assert Client().get(f"/invitations/{link}/").status_code == 200


@pytest.mark.django_db
def test_what_was_not_shown_opens_nothing_without_the_old_pepper(system: Actor, settings: Any, rotation: Any) -> None:
    rest = api_client(make_user(role=Role.OWNER), "admin.read")
    rotation()
    settings.KEY_PEPPERS = {2: NEW}
    assert rest.send("GET", "/tiers").status_code == 401
    (error,) = peppers.peppers_are_here(databases=["default"])
    assert (error.id, "1 tokens" in error.msg) == ("fairlane.E001", True)
    settings.KEY_PEPPERS = {1: OLD, 2: NEW}
    assert peppers.peppers_are_here(databases=["default"]) == []


@pytest.mark.django_db
def test_second_factors_are_encrypted_anew_and_recovery_codes_hold(settings: Any, rotation: Any) -> None:
    user = make_user(role=Role.OPERATOR)
    secret = totp.new_secret()
    step = totp.counter()
    codes = second_factor.enrol(actor=user.actor, user=user, secret=secret, code=totp.code(secret, step))
    rotation()
    assert second_factor.give_code(user=user, code=codes[0], address="10.0.0.1")
    said = io.StringIO()
    call_command("rotate_pepper", "--json", stdout=said)
    found = json.loads(said.getvalue())
    assert (found["newest"], found["resealed"], found["retired"]) == (2, 1, None)
    assert found["versions"]["1"]["recovery_codes"] == second_factor.N_RECOVERY_CODES - 1
    assert found["versions"]["2"]["second_factors"] == 1
    call_command("rotate_pepper", "--retire", "1", stdout=said)
    settings.KEY_PEPPERS = {2: NEW}
    user = User.objects.get(pk=user.pk)
    assert totp.opened(user.totp_secret or b"", user.id) == secret
    assert second_factor.give_code(user=user, code=totp.code(secret, step + 1), address="10.0.0.1")
    assert not second_factor.give_code(user=user, code=codes[1], address="10.0.0.1")
    actions = set(AuditEntry.objects.filter(object_type="pepper").values_list("action", flat=True))
    assert actions == {"pepper.resealed", "pepper.retired"}


@pytest.mark.django_db
def test_a_router_moves_keys_and_only_to_the_pepper_of_new_ones(system: Actor, rotation: Any) -> None:
    tenant, pool = make_tenant(system), make_pool(system)
    (key, text), (other, _), (gone, _) = (make_key(system, tenant, pool, name=name) for name in ("a", "b", "c"))
    ApiKey.objects.filter(pk=gone.pk).update(revoked_at=gone.created_at)
    router, _ = create_router(actor=system, name="one")
    rotation()
    before = Revision.objects.count()
    right = MovedKey(key=key.id, pepper_version=2, digest=key_digest(text, NEW))
    for wrong in (
        MovedKey(key=key.id, pepper_version=3, digest="1" * 64),
        MovedKey(key=key.id, pepper_version=1, digest="2" * 64),
        MovedKey(key=key.id, pepper_version=2, digest="x" * 64),
        MovedKey(key=key.id, pepper_version=2, digest=other.digest),  # of another key: digests are unique
        MovedKey(key=gone.id, pepper_version=2, digest="3" * 64),
        MovedKey(key="key_unknown", pepper_version=2, digest="4" * 64),
    ):
        take_heartbeat(router=router, heartbeat=beat(wrong))
    assert (ApiKey.objects.get(pk=key.pk).digest, Revision.objects.count()) == (key.digest, before)
    take_heartbeat(router=router, heartbeat=beat(right, right))
    key.refresh_from_db()
    assert (key.pepper_version, key.digest, Revision.objects.count()) == (2, right.digest, before + 1)
    # Moved is moved: nobody's word changes it again.
    take_heartbeat(router=router, heartbeat=beat(MovedKey(key=key.id, pepper_version=2, digest="5" * 64)))
    assert ApiKey.objects.get(pk=key.pk).digest == right.digest
    entry = AuditEntry.objects.get(action="pepper.keys_moved")
    assert (entry.actor_label, entry.after) == ("router one", {"keys": [key.public_id]})


@pytest.mark.django_db
def test_what_is_left_is_listed_and_given_up(system: Actor, rotation: Any) -> None:
    tenant, pool = make_tenant(system, name="Left behind"), make_pool(system)
    old, _ = make_key(system, tenant, pool, name="old")
    rotation()
    new, _ = make_key(system, tenant, pool, name="new")
    assert (old.pepper_version, new.pepper_version) == (1, 2)
    rest = api_client(make_user(), "admin.read")
    listed = rest.send("GET", "/keys?old_pepper=true").json()["results"]
    assert [(row["id"], row["pepper_version"]) for row in listed] == [(old.id, 1)]
    versions = rest.send("GET", "/peppers").json()["versions"]
    assert [(v["version"], v["keys"], v["is_newest"], v["is_here"]) for v in versions] == [
        (1, 1, False, True), (2, 1, True, True),
    ]  # fmt: skip
    browser = signed_in(Role.VIEWER)
    page = browser.get("/peppers/").content.decode()
    assert old.public_id in page
    assert new.public_id not in page
    assert "pepper 1</span>" in browser.get(f"/tenants/{tenant.id}/").content.decode()
    said = io.StringIO()
    call_command("rotate_pepper", stdout=said)
    assert f"key {old.public_id} of {tenant.slug}, pepper 1, used never" in said.getvalue()
    with pytest.raises(CommandError, match="only an older one"):
        call_command("rotate_pepper", "--retire", "2")
    call_command("rotate_pepper", "--retire", "1", stdout=said)
    old.refresh_from_db()
    new.refresh_from_db()
    assert (old.revoked_at is None, new.revoked_at) == (False, None)
    assert AuditEntry.objects.get(action="pepper.retired").after["keys_revoked"] == [old.public_id]
    assert "keys under pepper 1 revoked" in Revision.objects.latest("number").reason


def ask(port: int, key: str) -> int:
    """Status of a chat; 503 where the key is good, for no backend is up."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_a_rotation_from_one_pepper_to_the_next(running_site: Site, system: Actor, tmp_path: Path) -> None:
    """A router and a control plane as they are deployed: both peppers, then the new one alone."""
    tenant, pool = make_tenant(system), make_pool(system)
    (used, used_text), (_, unused_text) = (make_key(system, tenant, pool, name=name) for name in ("used", "unused"))
    _, token = create_router(actor=system, name="one")
    file, port = tmp_path / "peppers", free_port()
    file.write_text(OLD.hex())
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FAIRLANE_")},
        "FAIRLANE_CORE": "source",
        "FAIRLANE_KEY_PEPPER_FILE": str(file),
        "FAIRLANE_ROUTER_DIR": str(tmp_path / "router"),
        "FAIRLANE_ROUTER_PORT": str(port),
        "FAIRLANE_ROUTER_PREDICTOR": "false",
        "FAIRLANE_ROUTER_TOKEN": token,
    }

    def started(url: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "router_ext.cli", "router"]
        variables = {**environment, "FAIRLANE_CONTROLPLANE_URL": url}
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(command, env=variables, stdout=log, stderr=log)

    def answers(key: str, status: int) -> bool:
        try:
            return ask(port, key) == status
        except urllib.error.URLError:
            return False

    url = running_site(FAIRLANE_KEY_PEPPER=f"{OLD.hex()},2:{NEW.hex()}")
    router = started(url)
    try:
        wait_for(lambda: answers(used_text, 503), what="the router knowing the key")
        # The router has the old pepper alone. A key under the new one makes it look at its file again.
        file.write_text(f"1:{OLD.hex()},2:{NEW.hex()}\n")
        operator = api_client(make_user()).defaults["HTTP_AUTHORIZATION"]
        body = json.dumps({"tenant": tenant.id, "name": "new"}).encode()
        headers = {"authorization": operator, "content-type": "application/json"}
        issue = urllib.request.Request(f"{url}/api/v1/keys", body, headers)
        with urllib.request.urlopen(issue, timeout=10) as created:
            new_text = json.loads(created.read())["key"]
        wait_for(lambda: answers(new_text, 503), what="the router taking a key under the new pepper")
        assert ask(port, used_text) == 503
        wait_for(lambda: ApiKey.objects.get(pk=used.pk).pepper_version == 2, what="the used key having moved")
        newest = Revision.objects.latest("number").number
        applied = RouterStatus.objects.filter(applied_revision=newest)
        wait_for(applied.exists, what="the router having the digest that it told")
        end(router)
        file.write_text(f"2:{NEW.hex()}")
        router = started(url)
        wait_for(lambda: answers(used_text, 503), what="the moved key under the new pepper alone")
        assert ask(port, new_text) == 503
        assert ask(port, unused_text) == 401
        assert b"config.keys_without_pepper" in (tmp_path / "log").read_bytes()
    finally:
        end(router)
