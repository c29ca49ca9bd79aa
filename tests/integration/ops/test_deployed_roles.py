"""The database roles of docker/compose.yaml on a PostgreSQL of its own, and the deployment check as such a program.

Passwords are asked for, as the image does. Slow: a cluster, all migrations.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import yaml

from router_ext.ops.embedded import EmbeddedPostgres

ROOT = Path(__file__).resolve().parents[3]
TAMPERING = (
    "UPDATE audit_auditentry SET action = 'x'",
    "DELETE FROM audit_auditentry",
    "DELETE FROM audit_audithead",
    "TRUNCATE audit_auditentry",
    "ALTER TABLE audit_auditentry DISABLE TRIGGER ALL",
    "ALTER TABLE audit_auditentry OWNER TO fairlane_app",
    "DROP TABLE audit_auditentry",
    "DROP FUNCTION audit_refuse_change CASCADE",
    "SET session_replication_role = replica",
    "SET ROLE fairlane_audit",
)


class Deployment:
    """Programs with the variables and secrets that the compose file gives each, on ``server``."""

    def __init__(self, folder: Path, server: EmbeddedPostgres) -> None:
        shutil.copy(ROOT / "docker" / "make-secrets.sh", folder)
        subprocess.run([folder / "make-secrets.sh"], check=True, capture_output=True)
        self.secrets = folder / "secrets"
        for name in ("database_url", "program_database_url"):
            file = self.secrets / name
            # Only the place differs: a socket in place of the service's name.
            file.write_text(
                file.read_text().replace("@postgres:5432/fairlane", f"@/fairlane?{server.url.split('?')[1]}")
            )
        (self.secrets / "redis_url").write_text("redis://127.0.0.1:1/0")
        self.services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]

    def django(self, service: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        given = {
            name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value).replace("/run/secrets", str(self.secrets))
            for name, value in self.services[service]["environment"].items()
        }
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            **given,
            **variables,
        }
        command = [sys.executable, "-m", "django", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    def url(self, name: str) -> str:
        return (self.secrets / name).read_text()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(tmp_path / "postgres", parameters={"fsync": "off"})
    with server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_programs_of_the_compose_file_cannot_tamper_with_the_audit_log(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    deployed = Deployment(tmp_path, server)
    done = deployed.django("migrate", "migrate", "--noinput")
    assert done.returncode == 0, done.stderr
    done = deployed.django("migrate", "bootstrap_operator", "someone@example.test")
    assert done.returncode == 0, done.stderr
    # From here on the program's role needs its password.
    hba = server.data / "pg_hba.conf"
    hba.write_text("local all fairlane_app scram-sha-256\n" + hba.read_text())
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("SELECT pg_reload_conf()")
        hashed = connection.execute("SELECT rolpassword FROM pg_authid WHERE rolname = 'fairlane_app'").fetchone()
        assert hashed is not None
        assert hashed[0].startswith("SCRAM-SHA-256$")
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(server.url_of("fairlane_app"))
    with psycopg.connect(deployed.url("program_database_url"), autocommit=True) as connection:
        before = connection.execute("SELECT count(*) FROM audit_auditentry").fetchone()
        assert before != (0,)
        for attempt in TAMPERING:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(attempt)
        assert connection.execute("SELECT count(*) FROM audit_auditentry").fetchone() == before
    # It works all the same, and the log it writes is whole.
    done = deployed.django("controlplane", "create_router", "main")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("flr_")
    assert deployed.django("controlplane", "verify_audit").returncode == 0
    # A pepper that is taken away while something hangs on it is missed before anything starts.
    pepper = deployed.secrets / "key_pepper"
    kept = pepper.read_text()
    pepper.write_text("2:" + "0f" * 32)
    done = deployed.django("migrate", "migrate", "--noinput")
    assert (done.returncode, "fairlane.E001" in done.stderr, "1 routers" in done.stderr) == (1, True, True)
    pepper.write_text(f"{kept},2:{'0f' * 32}")
    # Production settings: a proxy with TLS in front, as docker/README.md says.
    production = {"FAIRLANE_INSECURE_HTTP": "false", "FAIRLANE_TRUSTED_ORIGINS": "https://fairlane.example.test"}
    done = deployed.django("controlplane", "check", "--deploy", "--fail-level", "WARNING", **production)
    assert (done.returncode, "no issues" in done.stdout) == (0, True), done.stderr
    # And it is a check: without TLS, or as the superuser, it finds something.
    done = deployed.django("controlplane", "check", "--deploy", "--fail-level", "WARNING")
    assert (done.returncode, "security.W" in done.stderr) == (1, True)
    done = deployed.django("migrate", "check", "--deploy", "--fail-level", "WARNING", **production)
    assert (done.returncode, "fairlane.W001" in done.stderr) == (1, True)
    # Migrating again gives a new password, and leaves the rest.
    (deployed.secrets / "program_password").write_text("another")
    assert deployed.django("migrate", "migrate", "--noinput").returncode == 0
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(deployed.url("program_database_url"))
