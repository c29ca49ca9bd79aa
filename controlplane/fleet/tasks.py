from __future__ import annotations

from controlplane.common.background import background
from controlplane.common.keeper import Report
from controlplane.fleet import brakes, hazards


@background("fleet-forget-cancelled")
def forget_cancelled(report: Report) -> str:
    """Take cancelled requests out of the configuration after ten minutes."""
    return f"{brakes.forget_cancelled():,} cancellations"


@background("fleet-forget-old-hazards")
def forget_old_hazards(report: Report) -> str:
    """Delete hazards of 90 days ago."""
    return f"{hazards.forget_old_hazards():,} hazards"
