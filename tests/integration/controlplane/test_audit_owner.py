"""The role the program runs as appends to the audit log and can do nothing else to it."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from django.db import DatabaseError, connection, transaction

from controlplane.audit.actions import log_head
from controlplane.audit.checks import audit_is_owned_apart
from controlplane.audit.models import AuditEntry
from controlplane.audit.ownership import separate
from controlplane.audit.queries import verify
from controlplane.common.actor import Actor
from controlplane.usage.partitions import EVENTS, ensure_days
from tests.support.control_plane import book, database_environment, make_tenant, usage_event

pytestmark = pytest.mark.django_db


@pytest.fixture
def program() -> str:
    """The test acts as the program's role; all of it is rolled back, the roles as well."""
    name = f"{connection.settings_dict['NAME']}_app"[-63:]
    with connection.cursor() as cursor:
        for _ in range(2):  # again changes nothing
            separate(cursor, application=name, owner=f"{name}_audit"[-63:])
        cursor.execute("DISCARD TEMP")  # what an earlier test of this session made is the former role's
        cursor.execute(f'SET LOCAL ROLE "{name}"')
    return name


def test_the_program_does_all_its_work_as_its_own_role(program: str, system: Actor) -> None:
    make_tenant(system)
    log_head()
    assert verify(actor=system).is_whole
    ensure_days([datetime(2031, 5, 6, tzinfo=UTC).date()], EVENTS)
    assert book(usage_event()).accepted == 1
    assert audit_is_owned_apart() == []
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_has_role(%s, 'MEMBER')", [f"{program}_audit"[-63:]])
        assert cursor.fetchone() == (False,)


@pytest.mark.parametrize(
    "attempt",
    [
        "UPDATE audit_auditentry SET actor_label = 'x'",
        "DELETE FROM audit_auditentry",
        "TRUNCATE audit_auditentry",
        "DELETE FROM audit_audithead",
        "ALTER TABLE audit_auditentry DISABLE TRIGGER audit_append_only_rows",
        "DROP TRIGGER audit_append_only_rows ON audit_auditentry",
        "DROP TABLE audit_auditentry",
        "ALTER TABLE audit_auditentry RENAME TO gone",
        "CREATE OR REPLACE FUNCTION audit_refuse_change() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "SET session_replication_role = replica",
    ],
)
def test_the_program_cannot_tamper_with_the_log(attempt: str, program: str, system: Actor) -> None:
    make_tenant(system)
    entries = AuditEntry.objects.count()
    with pytest.raises(DatabaseError, match=r"permission denied|must be owner"), transaction.atomic():
        connection.cursor().execute(attempt)
    assert AuditEntry.objects.count() == entries


def test_the_deployment_check_finds_nothing_else_with_production_settings() -> None:
    """A process of its own: settings are read once. Under the right role: ``ops/test_deployed_roles.py``."""
    environment = {**database_environment(), "FAIRLANE_INSECURE_HTTP": "false"}
    command = [sys.executable, "-m", "django", "check", "--deploy", "--fail-level", "WARNING"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert re.findall(r"\((\w+\.[EWC]\d+)\)", ended.stderr) == ["fairlane.W001"], ended.stderr
    environment["FAIRLANE_INSECURE_HTTP"] = "true"
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert {"security.W012", "security.W016"} <= set(re.findall(r"\((\w+\.W\d+)\)", ended.stderr))


def test_a_role_that_could_is_named_by_the_deployment_check() -> None:
    (warning,) = audit_is_owned_apart()
    assert (warning.id, "is a superuser" in warning.msg) == ("fairlane.W001", True)
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE fairlane_test_owner")
        cursor.execute("GRANT CREATE ON SCHEMA public TO fairlane_test_owner")
        cursor.execute("ALTER TABLE audit_auditentry OWNER TO fairlane_test_owner")
        cursor.execute("SET LOCAL ROLE fairlane_test_owner")
    (warning,) = audit_is_owned_apart()
    assert "owns the table audit_auditentry" in warning.msg
