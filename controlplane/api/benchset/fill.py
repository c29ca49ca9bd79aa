"""Fills an empty database with the data set; booking its events is the measurement of ingestion.

    configuration -> events through ``usage.ingest`` in batches -> rollups, totals, statements, reconciliation
                  -> what other pages list: audit entries, hazards, quarantined events, jobs

The database is vacuumed and analysed at the end, as autovacuum would have done in a month.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256

import msgspec
from django.db import connection, transaction

from controlplane.accounts.models import User
from controlplane.api.benchset.configuration import Configured, fill_configuration
from controlplane.api.benchset.events import arrivals, bodies, make_events, with_predictions
from controlplane.audit.chain import COLUMNS, FIRST, next_hash
from controlplane.audit.models import AuditEntry
from controlplane.common.actor import Actor
from controlplane.common.clock import utc_now
from controlplane.common.collector import settle
from controlplane.common.leases import JobState
from controlplane.fleet.models import Hazard
from controlplane.keys.models import ApiKey
from controlplane.tenants.models import Tenant
from controlplane.training import jobs
from controlplane.training.actions import start_job
from controlplane.training.models import Job, JobKind
from controlplane.usage import ingest, models, partitions
from controlplane.usage.reconciliation import reconcile
from controlplane.usage.rollup import roll_up_finished
from controlplane.usage.statements import close_months
from controlplane.usage.totals import fold
from router_ext.wire.controlplane import UsageEvent

BATCH = 5_000
PREDICTED = 0.02
"""Share of events, the last ones, that come with predictions and features; booking them is not measured."""
AUDITED, HAZARDS, QUARANTINED = 0.02, 0.0005, 0.0005
"""Rows of each by event."""
JOBS = 60
STATEMENTS = 2_000
_AHEAD = 8
"""Batches made before they are booked and timed: making them is not ingestion."""
_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What booking took.

    Attributes:
        events: that were sent, those sent twice included, in ``seconds``; the first batches, which connect and plan,
            are left out of both. accepted: rows. copy_events_per_s: bare COPY of the same rows, one session.
    """

    events: int
    seconds: float
    accepted: int
    sessions: int
    copy_events_per_s: float

    @property
    def events_per_s(self) -> float:
        return self.events / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    configured: Configured
    ingested: Ingested


def fill(
    *,
    actor: Actor,
    events: int,
    tenants: int,
    keys: int,
    days: int = 30,
    sessions: int = 1,
    seed: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Filled:
    """The data set, in an empty database with an owner. A few minutes for a million events.

    Args:
        events: rows there will be, over the last ``days`` days. sessions: batches that are booked at once, each by a
            thread, as those of so many routers are. say: is told what is going on.

    Raises:
        Conflict: there are tenants already, or no owner yet.
    """
    settle()
    chance = random.Random(seed)
    now = utc_now()
    say(f"{tenants:,} tenants, {keys:,} keys")
    configured = fill_configuration(actor=actor, tenants=tenants, keys=keys, chance=chance)
    instants = arrivals(events, now - timedelta(days=days), now - timedelta(seconds=30), chance)
    n_predicted = round(events * PREDICTED)
    made = make_events(configured, instants, chance)
    say(f"{events:,} events")
    ingested = _book(itertools.islice(made, events - n_predicted), sessions=sessions, chance=chance, say=say)
    for body in bodies(iter(with_predictions(list(made), chance)), BATCH, chance):
        ingest.ingest(ingest.decode_batch(body))
    say("rollups")
    while roll_up_finished():
        pass
    fold()
    say("statements, reconciliation, audit, jobs")
    close_months(limit=STATEMENTS)
    reconcile()
    _quarantine(configured, now, round(events * QUARANTINED))
    _audit(configured, now, chance, round(events * AUDITED))
    _hazards(configured, now, chance, round(events * HAZARDS))
    _jobs(actor, now)
    partitions.ensure_ahead()
    say("vacuum")
    with connection.cursor() as cursor:
        cursor.execute("VACUUM (ANALYZE)")
    return Filled(configured=configured, ingested=ingested)


def _book(
    events: Iterator[UsageEvent], *, sessions: int, chance: random.Random, say: Callable[[str], None]
) -> Ingested:
    n_events = n_accepted = n_batches = 0
    seconds = 0.0
    kept: list[bytes] = []

    def book(batches: list[bytes]) -> int:
        """What one router sends, one after the other."""
        return sum(ingest.ingest(ingest.decode_batch(body)).accepted for body in batches)

    def book_all(batches: list[bytes]) -> int:
        return sum(routers.map(book, [batches[place::sessions] for place in range(sessions)]))

    made = bodies(events, BATCH, chance, routers=sessions)
    with ThreadPoolExecutor(sessions, thread_name_prefix="router") as routers:
        while ready := list(itertools.islice(made, _AHEAD * sessions)):
            if n_batches < _WARM_UP * sessions:
                # Of each router as many, so that the turns go on.
                n_warm = min(_WARM_UP, len(ready) // 2 // sessions) * sessions
                warm, ready = ready[:n_warm], ready[n_warm:]
                n_accepted += book_all(warm)
                n_batches += len(warm)
                kept = ready[:]
            began = time.perf_counter()
            n_accepted += book_all(ready)
            seconds += time.perf_counter() - began
            # As the worker does beside, every minute.
            fold()
            n_batches += len(ready)
            n_events += sum(map(ingest.n_events, ready))
            if n_batches % (5 * _AHEAD * sessions) == 0:
                say(f"  {n_accepted:,} booked, {n_events / seconds:,.0f} events/s")
        routers.map(lambda _: connection.close(), range(sessions))
    return Ingested(
        events=n_events,
        seconds=max(seconds, 1e-9),
        accepted=n_accepted,
        sessions=sessions,
        copy_events_per_s=ingest.copy_rate(kept) if kept else 0.0,
    )


def _quarantine(configured: Configured, now: datetime, count: int) -> None:
    """Events that cannot be booked, by the way they come: too old, and no events at all."""
    old = round((now - timedelta(days=200)).timestamp() * 1e6)
    refused: list[object] = [
        {
            "event": f"evt_old_{number}", "request": f"req_old_{number}", "router": "router-1",
            "tenant": configured.tenants[number % len(configured.tenants)], "key": "", "pool": "", "model": "",
            "tier": "", "dialect": "chat", "outcome": "completed", "arrived_at_us": old + number, "ended_at_us": old,
        }
        if number % 2
        else {"event": number}
        for number in range(count)
    ]  # fmt: skip
    ingest.ingest(ingest.decode_batch(json.dumps({"router": "router-1", "events": refused}).encode()))


def _audit(configured: Configured, now: datetime, chance: random.Random, count: int) -> None:
    """Entries as changes of weights leave them, chained behind those that the configuration left."""
    with transaction.atomic(), connection.cursor() as cursor:
        previous = AuditEntry.objects.order_by("-id").values_list("hash", flat=True).first() or FIRST
        cursor.execute(
            "SELECT nextval(pg_get_serial_sequence('audit_auditentry', 'id')) FROM generate_series(1, %s)",
            [count],
        )
        rows = []
        for number, (entry_id,) in enumerate(cursor.fetchall()):
            tenant = chance.choice(configured.tenants)
            entry = AuditEntry(
                id=entry_id,
                at=now,
                actor_kind="user",
                actor_id=f"usr_{number % 20:020d}",
                actor_label=f"operator{number % 20}@fairlane.example",
                action="tenant.updated",
                object_type="tenant",
                object_id=tenant,
                tenant=tenant,
                before={"weight": float(number % 7 + 1)},
                after={"weight": float(number % 5 + 1)},
                request_id=f"{number:032x}",
            )
            entry.hash = previous = next_hash(previous, [getattr(entry, name) for name in COLUMNS])
            rows.append(entry)
        AuditEntry.objects.bulk_create(rows, batch_size=2_000)


def _hazards(configured: Configured, now: datetime, chance: random.Random, count: int) -> None:
    pools = list(configured.pools.values())
    backends = list(configured.backends.values())
    Hazard.objects.bulk_create(
        Hazard(
            id=f"hzd_{number:020d}",
            at=now - timedelta(hours=number),
            kind=("death", "freeze", "batch")[number % 3],
            router="router-1",
            pool=pools[number % len(pools)],
            backend=backends[number % len(backends)][0],
            tenant=chance.choice(configured.tenants),
            key=f"{number:012d}",
            request=f"req_{number}",
            digest=sha256(f"hazard {number}".encode()).hexdigest(),
            refused_until=now - timedelta(hours=number - 1),
            resolved_at=now if number % 4 else None,
            resolved_by="operator0@fairlane.example" if number % 4 else "",
        )
        for number in range(count)
    )


def _jobs(actor: Actor, now: datetime) -> None:
    """One baseline job that is run, and many that failed or were cancelled before."""
    Job.objects.bulk_create(
        Job(
            kind=JobKind.BASELINE if number % 2 else JobKind.MIXTURE,
            state=JobState.FAILED if number % 3 else JobState.CANCELLED,
            attempts=1,
            log="read rows\n" * 20,
            error="needed more memory than the 4,096 MB it may have" if number % 3 else "",
            requested_by="schedule",
            started_at=now - timedelta(hours=number + 1),
            finished_at=now - timedelta(hours=number),
        )
        for number in range(JOBS)
    )
    jobs.run(start_job(actor=actor, kind=JobKind.BASELINE).id)


def as_json(filled: Filled) -> str:
    """What the command prints: ``{"ingest_events_per_s", "ingest", "rows", "configured"}``; it holds secrets."""
    counted = (
        Tenant, ApiKey, User, models.UsageEvent, models.UsageExplanation, models.UsageQuarter, models.Statement,
        AuditEntry,
    )  # fmt: skip
    return json.dumps(
        {
            "ingest_events_per_s": filled.ingested.events_per_s,
            "ingest": msgspec.to_builtins(filled.ingested),
            "rows": {str(model._meta.verbose_name_plural): model.objects.count() for model in counted},
            "configured": {
                "tenants": filled.configured.tenants[:100],
                "router_tokens": filled.configured.router_tokens,
                "operator_token": filled.configured.operator_token,
            },
        }
    )
