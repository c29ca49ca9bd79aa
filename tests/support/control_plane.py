"""Builders and processes for tests of the control plane."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from itertools import count
from typing import Any
from urllib.parse import urlencode

import msgspec
from django.conf import settings
from django.db import connection
from django.test import Client
from django.urls import reverse

from controlplane.accounts import actions as account_actions
from controlplane.accounts.actions import issue_token
from controlplane.accounts.models import Role, User
from controlplane.common.actor import Actor, system_actor
from controlplane.common.clock import to_us, utc_now
from controlplane.common.leases import JobState
from controlplane.fleet.actions import create_backend, create_pool
from controlplane.fleet.models import Backend, Hazard, Pool, Router
from controlplane.fleet.routers import create_router, take_heartbeat
from controlplane.keys.actions import issue_key
from controlplane.keys.models import ApiKey
from controlplane.tenants.actions import create_group, create_tenant
from controlplane.tenants.models import Group, Tenant
from controlplane.tiers.actions import create_tier
from controlplane.tiers.models import Tier
from controlplane.training.models import Artifact, Evaluation, Job
from controlplane.usage.ingest import decode_batch, ingest
from controlplane.usage.rollup import roll_up_finished, roll_up_running
from controlplane.usage.samples import count_recent_samples
from router_ext.ops.embedded import free_port
from router_ext.predict.versions import FEATURE_VERSION
from router_ext.wire.controlplane import (
    HazardRecord,
    Heartbeat,
    PoolState,
    PredictionRecord,
    UsageAck,
    UsageBatch,
    UsageEvent,
)

_numbers = count(1)
_ranks = count(1)  # tiers are few; a rank has an upper limit
PASSWORD = "correct horse battery staple"


def make_user(
    *,
    role: str = Role.OPERATOR,
    email: str | None = None,
    password: str | None = None,
    tenant: str | None = None,
    **fields: Any,
) -> User:
    email = email or f"person{next(_numbers)}@example.test"
    return User.objects.create_user(email, password, role=role, tenant_id=tenant, **fields)


def signed_in(role: str, tenant: str | None = None) -> Client:
    """A client with a session of a person who has chosen a password."""
    user, one_time = account_actions.create_user(
        actor=system_actor("test"), email=f"{role}@example.org", role=role, tenant=tenant
    )
    account_actions.change_password(actor=user.actor, user=user, old_password=one_time, new_password=PASSWORD)
    client = Client()
    answer = client.post(reverse("console:sign_in"), {"email": user.email, "password": PASSWORD})
    assert answer.status_code == 302, answer.content
    return client


def make_tier(actor: Actor, name: str, **fields: Any) -> Tier:
    return Tier.objects.filter(name=name).first() or create_tier(
        actor=actor, name=name, **{"rank": next(_ranks), **fields}
    )


def make_tenant(actor: Actor, **fields: Any) -> Tenant:
    number = next(_numbers)
    given = {"name": f"Tenant {number}", "slug": f"tenant-{number}", "tiers": ["standard"], "default_tier": "standard"}
    for name in {*given["tiers"], *fields.get("tiers", ())}:
        make_tier(actor, name)
    return create_tenant(actor=actor, **{**given, **fields})


def make_group(actor: Actor, **fields: Any) -> Group:
    return create_group(actor=actor, **{"name": f"group-{next(_numbers)}", **fields})


def make_pool(actor: Actor, **fields: Any) -> Pool:
    return create_pool(actor=actor, **{"name": f"model-{next(_numbers)}", **fields})


def make_backend(actor: Actor, pool: Pool, **fields: Any) -> Backend:
    number = next(_numbers)
    given = {"name": f"backend-{number}", "url": f"http://10.0.0.1:{3000 + number}", "kv_tokens": 4_096}
    return create_backend(actor=actor, pool=pool.id, **{**given, **fields})


def make_key(actor: Actor, tenant: Tenant, pool: Pool, **fields: Any) -> tuple[ApiKey, str]:
    return issue_key(actor=actor, tenant_id=tenant.id, default_pool=pool.id, **{"name": "a key", **fields})


def hazard_record(**fields: Any) -> HazardRecord:
    """A death of a minute ago."""
    at = fields.pop("at_us", to_us(utc_now()) - 60_000_000)
    given = {
        "hazard": f"evt_{at:014x}{next(_numbers):016x}", "at_us": at, "kind": "death", "backend": "bkd_gone",
        "tenant": "ten_a", "key": "abcdefghijkl", "request": "req_odd", "digest": "ab" * 32,
        "refused_until_us": at + 600_000_000,
    }  # fmt: skip
    return HazardRecord(**{**given, **fields})


def tell(*told: HazardRecord, pools: Sequence[PoolState] = (), router: str = "rtr_host") -> None:
    """A heartbeat of a router, under a credential of its own."""
    row = Router.objects.first() or create_router(actor=system_actor("test"), name="test-router")[0]
    beat = Heartbeat(
        router=router, version="0", address="", applied_revision=1, applied_at_us=to_us(utc_now()),
        hazards=list(told), pools=list(pools),
    )  # fmt: skip
    take_heartbeat(router=row, heartbeat=beat)


def make_hazard(**fields: Any) -> Hazard:
    told = hazard_record(**fields)
    tell(told)
    return Hazard.objects.get(pk=told.hazard)


def make_length_model(word: str, **fields: Any) -> Artifact:
    """An artifact of kind mixture, whose bytes nobody reads."""
    body = word.encode()
    given = {"kind": "mixture", "digest": hashlib.sha256(body).hexdigest(), "body": body, "n_bytes": len(body)}
    return Artifact.objects.create(**{**given, **fields})


def make_evaluation(artifact: Artifact, pool: Pool, *, is_passed: bool = True, **fields: Any) -> Evaluation:
    job = Job.objects.create(kind="mixture", state=JobState.SUCCEEDED, requested_by="test", artifact=artifact)
    contenders = {"candidate": {"pinball": 0.25, "rank": 0.7}, "fallback": {"pinball": 0.3, "rank": 0.2}}
    given = {"n_rows": 500, "contenders": contenders, "reason": "said so", "is_passed": is_passed}
    return Evaluation.objects.create(job=job, artifact=artifact, pool=pool.id, **{**given, **fields})


def roll_up() -> None:
    """What the schedule does once a minute: pages and REST show what was rolled up."""
    roll_up_finished()
    roll_up_running()
    count_recent_samples()


def predicted_event(**fields: Any) -> UsageEvent:
    """A request with a prediction of a trained model and features; fields of ``PredictionRecord`` or of the event."""
    record = {
        "quantiles": [10, 20, 50, 100, 200, 300, 400],
        "source": "model",
        "fallback": [5, 10, 20, 40, 80, 160, 320],
        "runaway": 0.01,
        "length_model": "d" * 64,
        "features": b"\x01features",
        "feature_version": FEATURE_VERSION,
    }
    record |= {name: fields.pop(name) for name in PredictionRecord.__struct_fields__ if name in fields}
    return usage_event(**{"prediction": PredictionRecord(**record), **fields})


def usage_event(**fields: Any) -> UsageEvent:
    """A completed request of a minute ago: 10 prompt tokens, 20 output tokens, TTFT 250 ms."""
    arrived = fields.pop("arrived_at_us", to_us(utc_now()) - 60_000_000)
    given = {
        "event": f"evt_{next(_numbers):08d}",
        "request": "req_1",
        "router": "rtr_1",
        "tenant": "ten_a",
        "key": "key_a",
        "pool": "pool_a",
        "model": "model",
        "tier": "standard",
        "dialect": "tgi",
        "outcome": "completed",
        "arrived_at_us": arrived,
        "ended_at_us": arrived + 2_000_000,
        "first_dispatch_us": arrived + 50_000,
        "first_token_us": arrived + 250_000,
        "prompt_tokens": 10,
        "output_tokens": 20,
        "finish_reason": "eos_token",
    }
    return UsageEvent(**{**given, **fields})


def usage_body(*events: UsageEvent, router: str = "rtr_1") -> bytes:
    return msgspec.json.encode(UsageBatch(router=router, events=list(events)))


def book(*events: UsageEvent) -> UsageAck:
    """Book events as one batch."""
    return ingest(decode_batch(usage_body(*events)))


def undated(ack: UsageAck) -> UsageAck:
    """An acknowledgement without its instant."""
    assert abs(ack.booked_at_us - to_us(utc_now())) < 600_000_000
    return msgspec.structs.replace(ack, booked_at_us=0)


def is_test_database() -> bool:
    """Whether Django has turned from the database of ``DATABASE_URL`` to the one made for the tests."""
    return bool(connection.settings_dict["NAME"] != settings.ENVIRONMENT.database()["NAME"])


def empty_all_tables() -> None:
    """Take away what committing tests left; the audit log's triggers refuse that to everybody but a replica."""
    if not is_test_database():
        raise RuntimeError("refusing to empty a database that was not made for the tests")
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'django_migrations'"
        )
        names = ", ".join(f'"{name}"' for (name,) in cursor.fetchall())
        cursor.execute("SET session_replication_role = replica")
        cursor.execute(f"TRUNCATE {names}")
        cursor.execute("SET session_replication_role = DEFAULT")


def wait_for(condition: Any, *, limit_s: float = 20.0, what: str = "the condition") -> Any:
    """The first true value of ``condition``, looked at every 20 ms."""
    deadline = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not hold within {limit_s} s")
        time.sleep(0.02)


def database_environment() -> dict[str, str]:
    """Environment of a process that works on the database of this test session."""
    given = connection.settings_dict
    names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password"}
    options = urlencode({word: given[name] for name, word in names.items() if given[name]})
    return {**os.environ, "DATABASE_URL": f"postgresql:///{given['NAME']}?{options}"}


class Site:
    """The control plane under gunicorn, as it is deployed, on the database of this test session."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, **variables: str) -> str:
        """Start it with further variables and wait until it is ready; returns its address."""
        port = free_port()
        environment = {**database_environment(), "FAIRLANE_CONSOLE_PORT": str(port), **variables}
        command = ["gunicorn", "--config", "python:controlplane.gunicorn_conf", "controlplane.wsgi"]
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._process = process
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"gunicorn ended with {process.returncode}")
            try:
                with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        wait_for(is_ready, limit_s=60, what="the control plane being ready")
        return url

    def stop(self) -> None:
        """Ask it to stop and wait for that."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


class ApiClient(Client):
    """Django's client for ``/api/v1``: a bearer token, JSON bodies."""

    def __init__(self, token: str | None) -> None:
        super().__init__(headers={"authorization": f"Bearer {token}"} if token else {})

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Headers are named by keyword: ``if_match='"1"'``."""
        data = b"" if body is None else msgspec.json.encode(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.generic(method, f"/api/v1{path}", data, content_type="application/json", headers=named)


def api_client(user: User, *scopes: str) -> ApiClient:
    """REST under a fresh token of this user; both scopes if none are named."""
    given = list(scopes or ("admin.read", "admin.write"))
    return ApiClient(issue_token(actor=system_actor("test"), user=user, name="test", scopes=given)[1])
