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
    groups: dict[str, float] = {}
    inside: dict[str, float] = {}
    total_weight, total_tokens = 0.0, 0
    for claim in claims:
        total_tokens += claim.tokens
        if not claim.is_using:
            continue
        if claim.group is None:
            total_weight += claim.weight
        else:
            groups[claim.group] = claim.group_weight
            inside[claim.group] = inside.get(claim.group, 0.0) + claim.weight
    total_weight += sum(groups.values())
    found = {}
    for claim in claims:
        entitled = 0.0
        if claim.is_using:
            group = claim.group
            part = claim.weight if group is None else groups[group] * claim.weight / inside[group]
            entitled = part / total_weight
        found[claim.tenant] = Share(claim.tokens / total_tokens if total_tokens else 0.0, entitled)
    return found
