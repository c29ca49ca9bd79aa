"""The work of a baseline job: usage rows in, empirical quantiles out, which become the fallback of all pools."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime

from django.db import connection

from controlplane.common.clock import to_us
from controlplane.common.keeper import Keeper
from controlplane.training.actions import SPAN
from controlplane.training.models import Dataset
from controlplane.training.outcome import Built
from controlplane.training.queries import body_of_dataset
from router_ext.predict.baseline import Baseline, LengthSample, build_baseline, is_complete

_FETCH = 5_000
_READ = 0.9
"""Progress after reading."""


class _Rows:
    """Streams the rows of the span in key order, and keeps a digest of which rows were read."""

    def __init__(self, keeper: Keeper, from_at: datetime, to_at: datetime) -> None:
        self.n_rows = 0
        self._keeper, self._from_at, self._to_at = keeper, from_at, to_at
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[LengthSample]:
        last = (self._from_at, "")
        while True:
            # Pages by key instead of one long transaction, which would hold back vacuum.
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
            self._keeper.check()
            self._keeper.tell(_READ * ((last[0] - self._from_at) / (self._to_at - self._from_at)))


def build(keeper: Keeper, *, now: datetime) -> Built:
    """Empirical quantiles of the last ``SPAN``."""
    from_at = now - SPAN
    keeper.tell(0.0, f"reading usage from {from_at:%Y-%m-%d %H:%M}")
    rows = _Rows(keeper, from_at, now)
    body = build_baseline(rows, built_at_us=to_us(now))
    # The same rows give the same quantiles: routers need not load them again under another date.
    body = body_of_dataset(rows.digest) or body
    entries = Baseline.from_bytes(body).n_entries
    keeper.tell(0.95, f"built from {rows.n_rows} rows: {dict(entries)}")
    return Built(
        body=body,
        metrics={"rows": rows.n_rows, **entries},
        dataset=Dataset(from_at=from_at, to_at=now, n_rows=rows.n_rows, digest=rows.digest),
    )
