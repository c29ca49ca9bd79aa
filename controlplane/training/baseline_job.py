"""The run of a baseline job: usage rows in, a versioned artifact out, the pools' predictor set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime, timedelta

import structlog
from django.db import connection

from controlplane.common.actor import system_actor
from controlplane.common.clock import to_us, utc_now
from controlplane.training.actions import SPAN, complete_baseline, fail_job
from controlplane.training.lease import LeaseLost, heartbeat, take_lease
from controlplane.training.models import Dataset
from controlplane.training.queries import body_of_dataset
from router_ext.predict.baseline import Baseline, LengthSample, build_baseline, is_complete

logger = structlog.get_logger(__name__)

_FETCH = 5_000
_BEAT_EVERY = timedelta(seconds=5)


class _Rows:
    """Streams the rows of the span in key order, keeps the lease alive and a digest of which rows were read."""

    def __init__(self, job_id: str, lease: str, from_at: datetime, to_at: datetime) -> None:
        self.n_rows = 0
        self._job_id, self._lease = job_id, lease
        self._from_at, self._to_at = from_at, to_at
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[LengthSample]:
        beaten_at = utc_now()
        last = (self._from_at, "")
        while True:
            # Pages by key instead of one long transaction: it would hold back vacuum, and heartbeats must be seen.
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT arrived_at, event, key, tenant, pool, output_tokens, outcome, finish_reason "
                    "FROM usage_event WHERE (arrived_at, event) > (%s, %s) AND arrived_at < %s "
                    "ORDER BY arrived_at, event LIMIT %s",
                    [*last, self._to_at, _FETCH],
                )
                rows = cursor.fetchall()
            if not rows:
                return
            for arrived_at, event, key, tenant, pool, tokens, outcome, reason in rows:
                self._digest.update(f"{to_us(arrived_at)} {event}\n".encode())
                yield LengthSample(key, tenant, pool, tokens, is_complete(outcome, reason))
            self.n_rows += len(rows)
            last = (rows[-1][0], rows[-1][1])
            if utc_now() - beaten_at > _BEAT_EVERY:
                beaten_at = utc_now()
                done = (last[0] - self._from_at) / (self._to_at - self._from_at)
                heartbeat(self._job_id, self._lease, progress=0.9 * done, line=f"{self.n_rows} rows read")


def run(job_id: str, *, now: datetime | None = None) -> bool:
    """Run the job if its lease can be taken; returns whether an artifact was stored."""
    lease = take_lease(job_id)
    if lease is None:
        logger.info("job.not_taken", job=job_id)
        return False
    actor = system_actor("training")
    built_at = now or utc_now()
    to_at = built_at
    from_at = to_at - SPAN
    try:
        heartbeat(job_id, lease, progress=0.0, line=f"reading usage from {from_at:%Y-%m-%d %H:%M}")
        rows = _Rows(job_id, lease, from_at, to_at)
        body = build_baseline(rows, built_at_us=to_us(built_at))
        # The same rows give the same quantiles: routers need not load them again under another date.
        body = body_of_dataset(rows.digest) or body
        entries = Baseline.from_bytes(body).n_entries
        heartbeat(job_id, lease, progress=0.95, line=f"built from {rows.n_rows} rows: {dict(entries)}")
        complete_baseline(
            actor=actor,
            job_id=job_id,
            lease=lease,
            body=body,
            metrics={"rows": rows.n_rows, **entries},
            dataset=Dataset(from_at=from_at, to_at=to_at, n_rows=rows.n_rows, digest=rows.digest),
        )
    except LeaseLost:
        logger.warning("job.lease_lost", job=job_id)
        return False
    except Exception as error:
        fail_job(actor=actor, job_id=job_id, lease=lease, error=f"{type(error).__name__}: {error}"[:2_000])
        raise
    logger.info("job.succeeded", job=job_id, rows=rows.n_rows)
    return True
