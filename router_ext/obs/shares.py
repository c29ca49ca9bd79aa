"""What part of a pool each tenant got, and what part it may claim among those who use it.

Between units (a group of tenants, or a tenant without one) and inside a group weights decide, as they do in the
scheduler; a tenant that has used nothing and wants nothing claims nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Claim(NamedTuple):
    """One tenant of one pool. ``group_weight``: of its group, if it is in one. ``tokens``: what it got."""

    tenant: str
    weight: float
    group: str | None
    group_weight: float
    tokens: int
    is_using: bool


class Share(NamedTuple):
    """Parts of 1. Both are 0 where nobody uses the pool."""

    delivered: float
    entitled: float


def shares(claims: Iterable[Claim]) -> dict[str, Share]:
    """By tenant. Delivered parts sum to 1, entitled ones too, unless nobody got or uses anything."""
    claims = list(claims)
    units: dict[str, float] = {}
    inside: dict[str, float] = {}
    for claim in claims:
        if claim.is_using:
            unit = _unit(claim)
            units[unit] = claim.weight if claim.group is None else claim.group_weight
            inside[unit] = inside.get(unit, 0.0) + claim.weight
    total_weight, total_tokens = sum(units.values()), sum(claim.tokens for claim in claims)
    found = {}
    for claim in claims:
        unit = _unit(claim)
        entitled = units[unit] / total_weight * claim.weight / inside[unit] if claim.is_using else 0.0
        found[claim.tenant] = Share(claim.tokens / total_tokens if total_tokens else 0.0, entitled)
    return found


def _unit(claim: Claim) -> str:
    return f"t:{claim.tenant}" if claim.group is None else f"g:{claim.group}"
