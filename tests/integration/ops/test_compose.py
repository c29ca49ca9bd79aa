"""docker/: the compose file against its schema and against what the programs read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from router_ext.settings import load_router_settings

DOCKER = Path(__file__).resolve().parents[3] / "docker"
SCHEMA = Path(__file__).parent / "compose_schema" / "compose-spec.json"


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def _substituted(node):
    """The document with ``${NAME:-default}`` replaced by the default and required names by a word."""
    match node:
        case dict():
            return {key: _substituted(value) for key, value in node.items()}
        case list():
            return [_substituted(value) for value in node]
        case str():
            text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", node)
            return re.sub(r"\$\{\w+:\?[^}]*\}", "given", text).replace("$$", "$")
    return node


def test_compose_file_is_valid_by_the_specification(compose: dict) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator(schema).validate(_substituted(compose))


def test_schema_refuses_a_misspelt_key(compose: dict) -> None:
    wrong = _substituted(compose)
    wrong["services"]["router"]["healtcheck"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(wrong)


def test_every_service_has_a_healthcheck_or_runs_to_its_end(compose: dict) -> None:
    without = {name for name, service in compose["services"].items() if "healthcheck" not in service}
    assert without == {"migrate"}
    assert compose["services"]["migrate"]["restart"] == "no"


def test_tgi_image_is_required_and_every_other_one_has_a_version(compose: dict) -> None:
    images = {name: service["image"] for name, service in compose["services"].items()}
    assert images.pop("tgi").startswith("${TGI_IMAGE:?")
    assert all(re.search(r":v?\d+\.\d+", image) for image in images.values()), images


def test_secrets_are_files_that_the_script_makes(compose: dict, tmp_path: Path) -> None:
    shutil.copy(DOCKER / "make-secrets.sh", tmp_path)
    subprocess.run([tmp_path / "make-secrets.sh"], check=True, capture_output=True)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert {f"./secrets/{name}" for name in made} == {secret["file"] for secret in compose["secrets"].values()}
    assert made["postgres_password"] in made["database_url"]
    assert made["program_password"] in made["program_database_url"]
    assert made["valkey_password"] in made["redis_url"]
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0
    subprocess.run([tmp_path / "make-secrets.sh"], check=True, capture_output=True)
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made


def test_each_service_mounts_exactly_the_secrets_it_names(compose: dict) -> None:
    for name, service in compose["services"].items():
        text = json.dumps(service)
        if name == "prometheus":
            text += (DOCKER / "prometheus" / "prometheus.yml").read_text()
        named = set(re.findall(r"/run/secrets/(\w+)", text))
        assert named == set(service.get("secrets", [])), name


def test_router_accepts_its_variables(compose: dict, tmp_path: Path) -> None:
    """The router refuses unknown variables, so a misspelt one in the file would stop it."""
    environment = _substituted(compose["services"]["router"]["environment"])
    secrets = {"router_token": "flr_x", "key_pepper": "0f" * 32, "redis_url": "redis://:x@valkey/0", "admin_token": "x"}
    for secret, text in secrets.items():
        (tmp_path / secret).write_text(text)
    environment = {name: value.replace("/run/secrets", str(tmp_path)) for name, value in environment.items()}
    settings, _ = load_router_settings(environment)
    assert (settings.host, settings.port, settings.drain_limit_s) == ("0.0.0.0", 8080, 60)


@pytest.mark.parametrize("service", ["migrate", "controlplane", "worker", "trainer", "beat"])
def test_control_plane_reads_its_secrets_from_files(service: str, compose: dict, tmp_path: Path) -> None:
    environment = _substituted(compose["services"][service]["environment"])
    shutil.copy(DOCKER / "make-secrets.sh", tmp_path)
    subprocess.run([tmp_path / "make-secrets.sh"], check=True, capture_output=True)
    environment = {
        name: value.replace("/run/secrets", str(tmp_path / "secrets")) for name, value in environment.items()
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from controlplane.environment import read_environment\n"
            "found = read_environment()\n"
            "print(found.database()['HOST'], found.database()['USER'], found.db_application_role,"
            " bool(found.application_password()), found.hosts())",
        ],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Migrations alone run as the superuser, and make the role of all others.
    role = "fairlane fairlane_app True" if service == "migrate" else "fairlane_app  False"
    assert done.stdout.startswith(f"postgres {role} ")
    assert "'controlplane'" in done.stdout


def test_dockerfile_runs_as_its_own_user_and_copies_no_secrets() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert re.findall(r"(?m)^USER (.*)$", dockerfile) == ["10001:10001"]
    assert all(re.search(r"python:\d+\.\d+\.\d+", line) for line in re.findall(r"(?m)^FROM .*$", dockerfile))
    copied = {word for line in re.findall(r"(?m)^COPY (?!--)(.*) \S+$", dockerfile) for word in line.split()}
    allowed = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert copied == allowed
