from __future__ import annotations

from controlplane.common.background import background
from controlplane.common.keeper import Report
from controlplane.usage.coarsening import coarsen
from controlplane.usage.partitions import ensure_ahead
from controlplane.usage.reconciliation import reconcile
from controlplane.usage.rollup import roll_up_finished, roll_up_running
from controlplane.usage.samples import count_recent_samples, forget_old
from controlplane.usage.statements import close_months
from controlplane.usage.totals import fold, forget_old_totals


@background("usage-roll-up", reports=True)
def roll_up(report: Report) -> str:
    """Roll up the quarters of an hour whose events changed, and fold the totals that quotas are held against."""
    n_quarters = roll_up_finished(report=report)
    # Where no router asks for totals.
    fold()
    return f"{n_quarters:,} quarters of an hour"


@background("usage-roll-up-minutes")
def roll_up_minutes(report: Report) -> str:
    """Roll up what the Predictor page shows of the running hour."""
    n_minutes = roll_up_running()
    count_recent_samples()
    return f"{n_minutes:,} minutes"


@background("usage-make-partitions")
def make_partitions(report: Report) -> str:
    """Make the tables of the days to come, so that booking at midnight finds them."""
    ensure_ahead()
    return "made where they were missing"


@background("usage-coarsen-old", reports=True)
def coarsen_old(report: Report) -> str:
    """Merge rollups of 90 days ago to hours, and let days and months go that are no longer kept."""
    return f"{coarsen(report=report):,} days"


@background("usage-close-statements", reports=True)
def close_statements(report: Report) -> str:
    """Close the statements of months that have ended."""
    return f"{close_months(report=report):,} statements"


@background("usage-reconcile-books", reports=True)
def reconcile_books(report: Report) -> str:
    """Compare the rollups of the last eight days with their events, by key and model."""
    row = reconcile(report=report)
    return f"{row.n_events:,} events from {row.from_day} to {row.to_day}: {row.differences_text}"


@background("usage-forget-old-samples")
def forget_old_samples(report: Report) -> str:
    """Let old days of events and samples go, thin samples above their number, forget totals of months ago."""
    forget_old()
    return f"{forget_old_totals():,} totals"
