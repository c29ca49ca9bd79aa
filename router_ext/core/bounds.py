"""How far apart two tenants can get: the fairness bound of a configuration, in service units.

    U'   = the most service one tenant can still be charged for what runs; under linear prices
           w_output * (M + n) + max(0, w_prompt - w_output) * L, under others as ``core.cost`` says
    pass = ratio * U' / weight          ratio: FairnessPolicy.pass_ratio
    counter bound of f      c_f - min c          <= U'/w_f + pass_f          (over backlogged tenants)
    pair bound of f and g   |W_f/w_f - W_g/w_g|  <= U'(1/w_f + 1/w_g) + pass_f + pass_g

``M`` is the number of KV tokens requests can hold together on all backends of the pool, ``L`` the longest prompt, ``n``
the most sequences of one request (``best_of``; 1 without).
The reason: a request is admitted only while its tenant's counter is at most ``pass`` above the floor, and what its
tenant can be charged after that admission is at most one full pool; and ``n`` tokens more than ``M``, because the last
token a sequence produces never takes KV (TGI reserves ``input + new - 1``).

With ``FairnessPolicy.gamma > 0`` the pick may be ahead of the floor by what its rivals have in flight, and the first
term becomes ``max(U'/w_f, gamma * U'/w_g)``.

Source: Sheng et al. (OSDI 2024), lemma 4.3 and theorem 4.4, with the constant corrected for w_prompt > w_output.
"""

from __future__ import annotations

from router_ext.core.config import PoolConfig, TenantConfig
from router_ext.core.cost import build_cost
from router_ext.core.fairness import policy_class


def peak_service(config: PoolConfig) -> float:
    """``U'``: the most service one tenant can still be charged for what runs, in service units."""
    return build_cost(config).peak_service(config)


def pass_service(config: PoolConfig) -> float:
    """Largest pass of any kind, in service units (divide by the tenant's weight)."""
    return policy_class(config.policy).pass_ratio(config) * peak_service(config)


def counter_bound(config: PoolConfig, tenant: TenantConfig) -> float | None:
    """Largest ``c_f - min c`` of a backlogged tenant, in service per weight. None: the policy promises nothing."""
    policy = policy_class(config.policy)
    if not policy.is_bounded:
        return None
    peak = peak_service(config)
    first = peak / tenant.weight
    gamma = policy.gamma(config)
    if gamma > 0.0:
        lightest = min((t.weight for t in config.tenants.values()), default=tenant.weight)
        first = max(first, gamma * peak / lightest)
    return first + pass_service(config) / tenant.weight


def pair_bound(config: PoolConfig, first: TenantConfig, second: TenantConfig) -> float | None:
    """Largest difference of service per weight between two tenants over any interval in which both are backlogged."""
    one, other = counter_bound(config, first), counter_bound(config, second)
    return None if one is None or other is None else one + other


def bound_service(config: PoolConfig) -> float | None:
    """The one number shown for a pool: largest ``(c_f - min c) * w_f``, in service units.

    With ``gamma > 0`` it differs by tenant; this is the largest.
    """
    policy = policy_class(config.policy)
    if not policy.is_bounded:
        return None
    if policy.gamma(config) > 0.0 and config.tenants:
        return max((counter_bound(config, t) or 0.0) * t.weight for t in config.tenants.values())
    return peak_service(config) + pass_service(config)
