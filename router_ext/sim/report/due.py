"""What is due to every tenant: the service that was delivered, dealt out by weight among those who want it.

The yardstick of the pictures. From one sample to the next, the service delivered meanwhile, to whomever, is dealt to
the tenants whose requests have arrived and, in this account, are not yet paid for: in proportion to weight, and to none
more than it wants. Nobody is owed anything for time in which it wanted nothing.

Cost: O(samples x tenants who want something x log).
Source: generalized processor sharing (Parekh and Gallager, 1993), at the pace of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router_ext.sim.recording import Recording


@dataclass(frozen=True, slots=True)
class Due:
    """Units: service units.

    Attributes:
        by_tenant: by tenant and sample: service due so far.
        level: by sample: service per weight due so far to a tenant that always wants more.
    """

    by_tenant: list[list[float]]
    level: list[float]


def due(run: Recording) -> Due:
    """The account of one run."""
    num = len(run.tenants)
    weights = [info.weight for info in run.tenants]
    wanted = _wanted(run)
    backlog = [0.0] * num
    paid = [0.0] * num
    by_tenant: list[list[float]] = [[] for _ in range(num)]
    level = 0.0
    levels: list[float] = []
    dealt = 0.0
    for index in range(len(run.samples.at_s)):
        for tenant, amount in wanted[index]:
            backlog[tenant] += amount
        delivered = sum(run.service(tenant, index) for tenant in range(num))
        # What nobody wants in this account, which deals out at once what a server delivers late, is dealt later.
        shares, step = deal(max(0.0, delivered - dealt), backlog, weights)
        level += step
        levels.append(level)
        for tenant, share in enumerate(shares):
            backlog[tenant] -= share
            paid[tenant] += share
            dealt += share
            by_tenant[tenant].append(paid[tenant])
    return Due(by_tenant, levels)


def deal(amount: float, wanted: Sequence[float], weights: Sequence[float]) -> tuple[list[float], float]:
    """An amount dealt by weight, to nobody more than wanted.

    Returns:
        The shares, and what the one who got most got per weight.

    Invariants: the shares add up to the smaller of the amount and all that is wanted; who got less per weight than
    the most got all it wanted.
    """
    shares = [0.0] * len(wanted)
    order = sorted(
        (want / weight, tenant) for tenant, (want, weight) in enumerate(zip(wanted, weights, strict=True)) if want > 0.0
    )
    weight_left = sum(weights[tenant] for _, tenant in order)
    level = 0.0
    for per_weight, tenant in order:
        level = min(per_weight, amount / weight_left)
        shares[tenant] = level * weights[tenant]
        amount -= shares[tenant]
        weight_left -= weights[tenant]
    return shares, level


def _wanted(run: Recording) -> list[list[tuple[int, float]]]:
    """By sample: (tenant, service) of the requests that have arrived since the one before."""
    at_s = run.samples.at_s
    result: list[list[tuple[int, float]]] = [[] for _ in at_s]
    requests = run.requests
    index = 0
    for tenant, arrival, inputs, outputs in sorted(
        zip(requests.tenant, requests.arrival_s, requests.input_tokens, requests.wanted_tokens, strict=True),
        key=lambda row: row[1],
    ):
        while index < len(at_s) and at_s[index] < arrival:
            index += 1
        if index == len(at_s):
            break
        result[index].append((tenant, run.w_prompt * inputs + run.w_output * outputs))
    return result
