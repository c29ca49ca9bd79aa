"""How old the oldest usage event is that the control plane has not taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from router_ext.sync.inflight import RequestStart
from router_ext.sync.ledger import Ledger

S = 1_000_000


def finish(ledger: Ledger, number: int, ended_at_s: int) -> None:
    start = RequestStart(
        event=f"evt_{number}",
        request=f"req_{number}",
        router="rtr_1",
        tenant="ten_1",
        key="key_1",
        pool="pol_1",
        model="main",
        tier="standard",
        dialect="generate",
        arrived_at_us=number,
        max_new_tokens=5,
    )
    ledger.finish(ledger.begin(start), outcome="completed", ended_at_us=ended_at_s * S)


@pytest.mark.parametrize("max_spool_bytes", [1 << 20, 16])
def test_the_oldest_event_counts(tmp_path: Path, max_spool_bytes: int) -> None:
    """Also where it waits in memory, because the spool has no room."""
    ledger = Ledger.open(tmp_path, now_us=0, max_spool_bytes=max_spool_bytes)
    assert ledger.lag_s(100 * S) == 0.0
    finish(ledger, 1, 10)
    finish(ledger, 2, 40)
    assert ledger.lag_s(100 * S) == 90.0
    assert ledger.lag_s(5 * S) == 0.0
    if not ledger.overflow_events:
        batch = ledger.read_batch(max_events=1)
        assert batch is not None
        ledger.ack(batch)
        assert ledger.lag_s(100 * S) == 60.0
        batch = ledger.read_batch()
        assert batch is not None
        ledger.ack(batch)
        assert ledger.lag_s(100 * S) == 0.0
    ledger.close()
