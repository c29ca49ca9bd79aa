"""How far apart two tenants can get: the fairness bound of a configuration, in service units.

    U'   = the most service one tenant can still be charged for what runs; under linear prices
           w_output * (M + n) + max(0, w_prompt - w_output) * L, under others as ``core.cost`` says
    pass = the largest ratio of FairnessPolicy.passes * U' / weight
    counter bound of f      c_f - min c          <= U'/w_f + pass_f          (over backlogged tenants)
    pair bound of f and g   |W_f/w_f - W_g/w_g|  <= U'(1/w_f + 1/w_g) + pass_f + pass_g

``M`` is the number of KV tokens requests can hold together on all backends of the pool, ``L`` the longest prompt, ``n``
the most sequences of one request (``best_of``; 1 without).
The reason: a request is admitted only while its tenant's counter is at most ``pass`` above the floor, and what its
tenant can be charged after that admission is at most one full pool; and ``n`` tokens more than ``M``, because the last
token a sequence produces never takes KV (TGI reserves ``input + new - 1``).

Where backends take grammars the first term is ``U' + S``: the tokens that others miss while a grammar is compiled are
charged to its tenant at the dispatch, at most ``S = stall_ratio * U'`` (``core.exposure``).

With ``FairnessPolicy.gamma > 0`` the pick may be ahead of the floor by what its rivals have in flight, and the first
term becomes ``max(U'/w_f, gamma * U'/w_g)``.

In seconds of GPU time a service is what one busy backend needs for it while somebody waits, at the measured rate.

What competes for the pool is a tenant alone or a *group* of tenants; the bounds above are between those, with the
weight of the group. Members of one group compete with each other for what it gets, under the same two bounds with
their own weights (without gamma: inside a group the counter itself decides); between tenants of different groups only
the bound of their groups applies. Keys of one tenant and tier: the same with weight 1 and no pass (``core.lanes``).

Source: Sheng et al. (OSDI 2024), lemma 4.3 and theorem 4.4, with the constant corrected for w_prompt > w_output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router_ext.core.config import GroupConfig, PoolConfig, TenantConfig
from router_ext.core.cost import build_cost, longest_prompt, pool_tokens
from router_ext.core.fairness import policy_class


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a bound is made of. Service units, not divided by weight.

    Attributes:
        peak_service: ``U'``. pool_tokens, longest_prompt: ``M`` and ``L``, from which it follows.
        passes: how far ahead of the floor somebody may be and still be served, by the way of going ahead.
        stall_service: ``S``, 0 where no backend takes grammars.
        gamma: how much of the predicted service in flight counts in whose turn it is.
        lightest_weight, heaviest_weight: of what competes for the pool, tenants alone and groups (1 if there is none).
    """

    peak_service: float
    pool_tokens: int
    longest_prompt: int
    stall_service: float = 0.0
    passes: Mapping[str, float] = field(default_factory=dict)
    gamma: float = 0.0
    lightest_weight: float = 1.0
    heaviest_weight: float = 1.0

    @property
    def pass_service(self) -> float:
        """The largest pass."""
        return max(self.passes.values(), default=0.0)

    def counter_bound(self, weight: float) -> float:
        """Largest ``c_f - min c`` of a backlogged tenant of this weight, in service per weight."""
        lightest = min(self.lightest_weight, weight)
        first = max(self.peak_service / weight, self.gamma * self.peak_service / lightest)
        return first + (self.stall_service + self.pass_service) / weight

    def inside_bound(self, weight: float) -> float:
        """The same of a member of a group of this weight, against the other members."""
        return (self.peak_service + self.stall_service + self.pass_service) / weight

    def pair_bound(self, weight: float, other: float) -> float:
        """Largest difference of service per weight between two tenants over any interval in which both are
        backlogged."""
        return self.counter_bound(weight) + self.counter_bound(other)

    @property
    def bound_service(self) -> float:
        """The one number shown for a pool: largest ``(c_f - min c) * w_f``. It is that of the heaviest tenant."""
        first = max(1.0, self.gamma * self.heaviest_weight / self.lightest_weight) * self.peak_service
        return first + self.stall_service + self.pass_service


def terms(config: PoolConfig) -> Terms | None:
    """What the configured bound is made of; None: the policy promises nothing."""
    policy = policy_class(config.policy)
    if not policy.is_bounded:
        return None
    peak = peak_service(config)
    weights = [tenant.weight for tenant in config.tenants.values() if tenant.group is None]
    weights += [group.weight for group in config.groups.values()]
    return Terms(
        peak_service=peak,
        pool_tokens=pool_tokens(config),
        longest_prompt=longest_prompt(config),
        stall_service=stall_service(config),
        passes={name: ratio * peak for name, ratio in policy.passes(config).items()},
        gamma=policy.gamma(config),
        lightest_weight=min(weights, default=1.0),
        heaviest_weight=max(weights, default=1.0),
    )


def peak_service(config: PoolConfig) -> float:
    """``U'``: the most service one tenant can still be charged for what runs, in service units."""
    return build_cost(config).peak_service(config)


def stall_service(config: PoolConfig) -> float:
    """``S``: the most that one new grammar is charged for the tokens others miss meanwhile, in service units."""
    if not any(backend.takes_grammars for backend in config.backends.values()):
        return 0.0
    return config.stall_ratio * peak_service(config)


def pass_service(config: PoolConfig) -> float:
    """Largest pass of any kind, in service units (divide by the tenant's weight)."""
    stated = terms(config)
    return 0.0 if stated is None else stated.pass_service


def competitor(config: PoolConfig, tenant: TenantConfig) -> TenantConfig | GroupConfig:
    """What competes for the pool in the place of a tenant: itself, or its group."""
    return tenant if tenant.group is None else config.groups[tenant.group]


def counter_bound(config: PoolConfig, tenant: TenantConfig | GroupConfig) -> float | None:
    """Largest ``c_f - min c`` of a backlogged tenant (or group) against those it competes with, in service per weight.

    A tenant with a group competes with the other members. None: the policy promises nothing.
    """
    stated = terms(config)
    if stated is None:
        return None
    is_inside = isinstance(tenant, TenantConfig) and tenant.group is not None
    return stated.inside_bound(tenant.weight) if is_inside else stated.counter_bound(tenant.weight)


def pair_bound(config: PoolConfig, first: TenantConfig, second: TenantConfig) -> float | None:
    """Largest difference of service per weight between two over any interval in which both are backlogged.

    Of the tenants themselves if they compete with each other, else of what competes in their place.
    """
    one: TenantConfig | GroupConfig = first
    other: TenantConfig | GroupConfig = second
    if first.group != second.group:
        one, other = competitor(config, first), competitor(config, second)
    bounds = counter_bound(config, one), counter_bound(config, other)
    return None if bounds[0] is None or bounds[1] is None else bounds[0] + bounds[1]


def bound_service(config: PoolConfig) -> float | None:
    """The one number shown for a pool: largest ``(c_f - min c) * w_f``, in service units."""
    stated = terms(config)
    return None if stated is None else stated.bound_service


def gpu_seconds(service: float | None, service_per_gpu_s: float | None) -> float | None:
    """A service as seconds of one busy backend; None while either is unknown."""
    return None if service is None or not service_per_gpu_s else service / service_per_gpu_s
