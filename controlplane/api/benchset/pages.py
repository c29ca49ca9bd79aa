"""Time and queries of every page of the console and of the usage report by REST, on a filled database.

Pages are found in the console's table of addresses, so none can be forgotten: each that answers GET is loaded as the
owner, through the whole stack of middleware, once to warm up and then ``loads`` times. Time is that of the server,
from the request to the last byte of the answer; queries are all there are, those of session and user included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from django.db import connection
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from controlplane.accounts.models import Invitation, OperatorToken, User
from controlplane.accounts.queries import first_operator
from controlplane.common.clock import to_us, utc_now
from controlplane.common.errors import Conflict
from controlplane.fleet.models import Backend, Hazard, Pool, Router
from controlplane.fleet.routers import take_heartbeat
from controlplane.keys.models import ApiKey
from controlplane.rollout.queries import current_number
from controlplane.tenants.models import Group, Tenant
from controlplane.tiers.models import Tier
from controlplane.training.models import Job
from controlplane.usage.models import PriceList, Statement, UsageEvent
from controlplane.usage.rollup import DIMENSIONS
from router_ext.wire.controlplane import BackendState, Heartbeat, LiveRequest, PoolState, TenantState

UNMEASURED = {
    "usage_csv": "an export: its memory is measured",
    "usage_json": "an export: its memory is measured",
    "audit_csv": "an export: its memory is measured",
    "audit_json": "an export: its memory is measured",
    "invitation": "its address holds a secret that only who was invited has",
    "sign_in_code": "exists between two steps of signing in only",
}
"""Addresses that answer GET and are not loaded, and why."""
_ANONYMOUS = frozenset({"sign_in"})
_LIVE_TENANTS = 200
"""Tenants a heartbeat tells of, as the page shows them."""
REPORT_DAYS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Medians of the loads of one page; ``kib`` of the answer."""

    s: float
    queries: int
    kib: float


class _Counter:
    """Counts the statements of one connection."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.n += 1
        return execute(sql, params, many, context)


def _silent(line: str) -> None:
    """Say nothing."""


def measure_pages(*, loads: int = 5, only: Sequence[str] = (), say: Callable[[str], None] = _silent) -> dict[str, Load]:
    """Every page of the console by its name; ``only``: of these names.

    Raises:
        Conflict: a page did not answer 200: what is measured would not be the page.
    """
    owner = first_operator()
    if owner is None:
        raise Conflict("the data set has no owner")
    # Whoever has a one-time password is led to the page that changes it, whatever the address.
    User.objects.filter(pk=owner.pk).update(must_change_password=False)
    client, stranger = _client(), _client()
    client.force_login(owner)
    found: dict[str, Load] = {}
    for name, path in pages(only=only):
        _beat()
        found[name] = _load(stranger if name in _ANONYMOUS else client, name, path, loads)
        say(_line(name, found[name]))
    return found


def pages(*, only: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Name and address of every page, in the order of the table."""
    arguments = _arguments()
    for pattern in _patterns(get_resolver().url_patterns):
        name = str(pattern.name)
        if name in UNMEASURED or (only and name not in only):
            continue
        path = "/" + str(pattern.pattern)
        for argument, value in arguments.items():
            path = path.replace(f"<str:{argument}>", value)
        # Without a row for an argument there is no page: no month may have ended yet.
        if "<" not in path and _answers_get(path):
            yield name, path


def _patterns(entries: Sequence[URLPattern | URLResolver]) -> Iterator[URLPattern]:
    for entry in entries:
        if isinstance(entry, URLResolver) and entry.app_name == "console":
            yield from (each for each in entry.url_patterns if isinstance(each, URLPattern))


def _answers_get(path: str) -> bool:
    """Whether it takes GET: those that do not say so before they look at who asks, or after."""
    owner = first_operator()
    assert owner is not None
    client = _client()
    client.force_login(owner)
    return client.get(path).status_code != HTTPStatus.METHOD_NOT_ALLOWED


def _client(**headers: Any) -> Client:
    return Client(SERVER_NAME="127.0.0.1", raise_request_exception=True, **headers)


def _arguments() -> dict[str, str]:
    """For each argument of an address something there is; of tenants the one with most events of the last hours."""
    newest = UsageEvent.objects.filter(arrived_at__gt=utc_now() - timedelta(days=2)).order_by("tenant")
    tenant = (
        newest.values_list("tenant", flat=True).first() or Tenant.objects.order_by("id").values_list("pk", flat=True)[0]
    )
    pool = Pool.objects.order_by("id")[0]
    rows: Mapping[str, Any] = {
        "tenant_id": tenant,
        "key_id": ApiKey.objects.filter(tenant=tenant, revoked_at=None)
        .order_by("id")
        .values_list("pk", flat=True)
        .first(),
        "group_id": Group.objects.order_by("id").values_list("pk", flat=True).first(),
        "tier_id": Tier.objects.order_by("id").values_list("pk", flat=True).first(),
        "pool_id": pool.pk,
        "backend_id": Backend.objects.filter(pool=pool).order_by("id").values_list("pk", flat=True).first(),
        "hazard_id": Hazard.objects.order_by("id").values_list("pk", flat=True).first(),
        "price_list_id": PriceList.objects.order_by("id").values_list("pk", flat=True).first(),
        "statement_id": Statement.objects.order_by("id").values_list("pk", flat=True).first(),
        "member_id": User.objects.order_by("-id").values_list("pk", flat=True).first(),
        "invitation_id": Invitation.objects.order_by("id").values_list("pk", flat=True).first(),
        "token_id": OperatorToken.objects.order_by("id").values_list("pk", flat=True).first(),
        "job_id": Job.objects.order_by("id").values_list("pk", flat=True).first(),
    }
    return {name: str(value) for name, value in rows.items() if value is not None}


def _load(client: Client, name: str, path: str, loads: int) -> Load:
    seconds, counts, size = [], [], 0
    for number in range(loads + 1):
        counter = _Counter()
        with connection.execute_wrapper(counter):
            began = time.perf_counter()
            answer = client.get(path)
            size = sum(map(len, answer)) if answer.streaming else len(answer.content)
            took = time.perf_counter() - began
        if answer.status_code != HTTPStatus.OK:
            raise Conflict(f"{name} ({path}) answered {answer.status_code}")
        if number:
            seconds.append(took)
            counts.append(counter.n)
    return Load(s=statistics.median(seconds), queries=int(statistics.median(counts)), kib=size / 1024)


def _beat() -> None:
    """Heartbeats of all routers as under load: every pool with ``_LIVE_TENANTS`` tenants. Soft state of seconds."""
    now_us = to_us(utc_now())
    tenants = list(Tenant.objects.order_by("id").values_list("pk", flat=True)[:_LIVE_TENANTS])
    keys = dict(ApiKey.objects.filter(tenant__in=tenants).values_list("tenant", "pk"))
    backends = list(Backend.objects.order_by("id").values_list("pool_id", "pk"))
    states = [
        PoolState(
            pool=pool,
            policy="slo-fair",
            queued_by_tier={"interactive": 12, "standard": 40},
            running=64,
            backends=[
                BackendState(backend=each, state="up", running=32, reserved_tokens=300_000, kv_tokens=400_000)
                for owner, each in backends
                if owner == pool
            ],
            tenants=[
                TenantState(tenant=tenant, queued=n % 7, running=n % 3, counter=n * 10.0, output_tokens_total=n * 1_000)
                for n, tenant in enumerate(tenants)
            ],
            oldest=[
                LiveRequest(
                    request=f"req_{n}", event=f"evt_{n}", tenant=tenant, key=keys.get(tenant, ""), tier="standard",
                    arrived_at_us=now_us - n * 1_000_000,
                )
                for n, tenant in enumerate(tenants[:20])
            ],
        )
        for pool in Pool.objects.order_by("id").values_list("pk", flat=True)
    ]  # fmt: skip
    for router in Router.objects.order_by("id"):
        take_heartbeat(
            router=router,
            heartbeat=Heartbeat(
                router=router.name, version="1", address="http://127.0.0.1:8080", applied_at_us=now_us,
                applied_revision=current_number(), pools=states,
            ),
        )  # fmt: skip


def groupings() -> list[str]:
    """What ``group_by`` may be of the report: nothing, days or hours, by nothing, each dimension, or all of them."""
    return [
        ",".join(filter(None, (step, by)))
        for step in ("", "day", "hour")
        for by in ("", *DIMENSIONS, ",".join(DIMENSIONS))
    ]


def measure_reports(
    *,
    token: str,
    loads: int = 5,
    timezone: str = "UTC",
    only: Sequence[str] = (),
    say: Callable[[str], None] = _silent,
) -> dict[str, Load]:
    """``GET /api/v1/usage/report`` of all tenants over ``REPORT_DAYS``, by grouping; ``only``: by these."""
    client = _client(HTTP_AUTHORIZATION=f"Bearer {token}")
    today = utc_now().date()
    span = {"from": today - timedelta(days=REPORT_DAYS - 1), "to": today, "tz": timezone}
    found = {}
    for grouping in only or groupings():
        path = "/api/v1/usage/report?" + urlencode(span | {"group_by": grouping})
        name = grouping or "nothing"
        found[name] = _load(client, f"report by {name}", path, loads)
        say(_line(f"report by {name}", found[name]))
    return found


def _line(name: str, load: Load) -> str:
    return f"{name:24} {load.s * 1_000:8.1f} ms {load.queries:4} queries {load.kib:8.1f} KiB"
