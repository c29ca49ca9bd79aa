from __future__ import annotations

from controlplane.common.background import background
from controlplane.common.keeper import Report
from controlplane.rollout import actions


@background("rollout-trim-revisions")
def trim_revisions(report: Report) -> str:
    """Delete old revisions of the configuration; the newest stay, for routers that were away."""
    return f"{actions.trim_revisions():,} revisions"
