"""SLO tiers: which latency targets are active, and so how much room urgent work needs."""

from __future__ import annotations

from collections.abc import Mapping

from router_ext.core.config import TierConfig
from router_ext.core.ids import TierName

ACTIVE_FOR_S = 60.0
"""A tier counts as active for this long after its last traffic: quiet pools pay nothing for headroom."""

_UNKNOWN_RANK = 10_000


class Tiers:
    """The configured tiers and which of those with a target have had traffic lately."""

    __slots__ = ("_active_until", "_next_end_s", "_tiers", "tightest_target_s")

    def __init__(self, tiers: Mapping[TierName, TierConfig]) -> None:
        self._tiers = dict(tiers)
        self._active_until: dict[TierName, float] = {}
        self._next_end_s = float("inf")
        self.tightest_target_s: float | None = None
        """Smallest TTFT target among active tiers, None if none is active. As of the last ``refresh``."""

    def get(self, name: TierName) -> TierConfig:
        """The tier by name. One that was just removed from the configuration still serves, without a target."""
        tier = self._tiers.get(name)
        if tier is None:
            tier = self._tiers[name] = TierConfig(name=name, rank=_UNKNOWN_RANK)
        return tier

    def touch(self, tier: TierConfig, now: float) -> None:
        """Note traffic of a tier."""
        if tier.ttft_target_s is None:
            return
        self._active_until[tier.name] = now + ACTIVE_FOR_S
        if self.tightest_target_s is None or tier.ttft_target_s < self.tightest_target_s:
            self._recompute(now)

    def refresh(self, now: float) -> None:
        """Let tiers without traffic become inactive."""
        if now >= self._next_end_s:
            self._recompute(now)

    def replace(self, tiers: Mapping[TierName, TierConfig], now: float) -> None:
        """Apply a changed configuration."""
        self._tiers = dict(tiers)
        self._active_until = {name: until for name, until in self._active_until.items() if name in tiers}
        self._recompute(now)

    def _recompute(self, now: float) -> None:
        tightest: float | None = None
        next_end = float("inf")
        for name, until in self._active_until.items():
            if until <= now:
                continue
            next_end = min(next_end, until)
            target = self._tiers[name].ttft_target_s
            if target is not None and (tightest is None or target < tightest):
                tightest = target
        self._next_end_s = next_end
        self.tightest_target_s = tightest
