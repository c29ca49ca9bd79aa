from __future__ import annotations

from router_ext.obs.metrics import Metrics, Readings


def test_what_the_books_could_not_keep_is_on_the_metrics_page() -> None:
    metrics = Metrics(
        lambda: Readings(ledger_overflow_events=3, ledger_damaged_bytes=40, ledger_set_aside_events=5, spool_events=6)
    )
    page = metrics.page().decode()
    for line in (
        "fairlane_ledger_overflow_events 3.0",
        "fairlane_ledger_damaged_bytes 40.0",
        "fairlane_ledger_set_aside_events 5.0",
        "fairlane_ledger_pending_events 6.0",
    ):
        assert line in page.splitlines()
