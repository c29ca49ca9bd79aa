"""Fairness policies: whose turn it is. One file per policy, and the one registry of them.

A new policy is a file here with a class that meets ``base.FairnessPolicy``, and its line in ``POLICIES``.
Configuration, bounds, commands and console follow from that.
"""

from __future__ import annotations

from router_ext.core.fairness.base import FairnessPolicy
from router_ext.core.fairness.fifo import Fifo
from router_ext.core.fairness.justitia import Justitia
from router_ext.core.fairness.slo_fair import SloFair

POLICIES: dict[str, type[FairnessPolicy]] = {
    "fifo": Fifo,
    "justitia": Justitia,
    "slo-fair": SloFair,
}
"""Policies by the name a pool's configuration gives them."""
