"""Every operation of REST answers a token of every scope as ``routes_by_scope.txt`` says; one without a row fails.

Columns: tokens of an owner with one scope of the platform each, and of the tenant's admin with one scope of a tenant
each; no token is issued with scopes that its holder lacks. Words as in ``test_routes_by_role``.
To see what a new operation answers, run this file: the failure prints the rows that are missing or differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.urls import get_resolver

from controlplane.accounts.actions import issue_token
from controlplane.common.actor import Actor, Scope
from controlplane.common.errors import NotAllowed
from tests.integration.controlplane.test_routes_by_role import REST_IDS, UNLISTED, _methods, _routes, _values, _word
from tests.support.console_world import make_world
from tests.support.control_plane import api_client

pytestmark = pytest.mark.django_db
TABLE = Path(__file__).with_name("routes_by_scope.txt")
COLUMNS = (
    ("owner", "admin.read"), ("owner", "admin.write"), ("owner", "admin.members"),
    ("tenant_admin", "tenant.read"), ("tenant_admin", "tenant.write"),
)  # fmt: skip


def test_every_operation_answers_every_scope_as_the_table_says(system: Actor) -> None:
    world = make_world(system)
    ids = {"": world.ids, **{word: {"pk": world.ids[name]} for word, name in REST_IDS.items()}}
    clients = [api_client(world.people[who], scope) for who, scope in COLUMNS]
    actual: dict[str, str] = {}
    for route, pattern in _routes(get_resolver().url_patterns):
        if not route.startswith("/api/v1/") or route in UNLISTED:
            continue
        values = _values(route, ids)
        address = route.format(**values).removeprefix("/api/v1")
        for method in _methods(Client(), route, pattern, values):
            words = []
            for client in clients:
                # Every answer is undone: the next token finds what this one found.
                with transaction.atomic():
                    words.append(_word(client.send(method, address, {})))
                    transaction.set_rollback(True)
            actual[f"{method} {route.removeprefix('/api/v1')}"] = " ".join(words)
    lines = [line.split() for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    expected: dict[str, Any] = {" ".join(words[:2]): " ".join(words[2:]) for words in lines}
    different = [f"{key}  {row}" for key, row in sorted(actual.items()) if expected.get(key) != row]
    assert not different, "\n".join(["missing or different:", *different])
    assert expected.keys() == actual.keys()


def test_every_scope_of_the_program_is_a_column(system: Actor) -> None:
    assert {scope for _, scope in COLUMNS} == {scope.value for scope in Scope}
    people = make_world(system).people
    for who, scope in (("owner", "tenant.write"), ("tenant_admin", "admin.read"), ("viewer", "admin.write")):
        with pytest.raises(NotAllowed):
            issue_token(actor=people[who].actor, user=people[who], name="x", scopes=[scope])


def test_reading_scopes_change_nothing_and_members_are_a_scope_of_their_own() -> None:
    """What the table may never say, whoever edits it."""
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#"):
            method, route, read, _, members, own_read, _ = line.split()
            if method != "GET":
                assert {read, own_read} <= {"403", "404"}, line
                is_about_people = route.startswith(("/members", "/invitations", "/batch"))
                assert is_about_people is (members == "ok"), line
