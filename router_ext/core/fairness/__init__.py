"""Fairness policies: whose turn it is. One file per policy, and the one registry of them.

A new policy is a file here with a class that extends ``base.FairnessPolicy``, its line in ``POLICIES`` and its page in
``docs/policies/``. Configuration, bounds, commands, console and the conformance suite follow from that.
"""

from __future__ import annotations

from router_ext.core.fairness.base import FairnessPolicy
from router_ext.core.fairness.dlpm import Dlpm
from router_ext.core.fairness.drr import Drr
from router_ext.core.fairness.equinox import Equinox
from router_ext.core.fairness.fairserve import FairServe
from router_ext.core.fairness.fifo import Fifo
from router_ext.core.fairness.justitia import Justitia
from router_ext.core.fairness.lcf import Lcf
from router_ext.core.fairness.rpm import Rpm
from router_ext.core.fairness.slo_fair import SloFair
from router_ext.core.fairness.vtc import Vtc
from router_ext.core.fairness.vtc_predict import VtcPredict

POLICIES: dict[str, type[FairnessPolicy]] = {
    "fifo": Fifo,
    "rpm": Rpm,
    "drr": Drr,
    "vtc": Vtc,
    "vtc-predict": VtcPredict,
    "dlpm": Dlpm,
    "fairserve": FairServe,
    "justitia": Justitia,
    "equinox": Equinox,
    "slo-fair": SloFair,
}
"""Policies by the name a pool's configuration gives them."""

TEST_POLICIES: dict[str, type[FairnessPolicy]] = {"lcf": Lcf}
"""Wrong on purpose, so that tests and simulations show what a rule is good for. ``core.config.build_pool`` refuses
these names; who wants one replaces ``PoolConfig.policy`` by hand."""


def policy_class(name: str) -> type[FairnessPolicy]:
    """The policy a ``PoolConfig`` names."""
    return POLICIES.get(name) or TEST_POLICIES[name]
