"""Frozen, validated configuration of one pool, and the builder that control plane and router share.

``build_pool`` takes plain mappings (the builtins of the wire records), so that the same validation runs where a
revision is built and where it is applied. A number, word or switch of a pool is one line of ``PoolConfig``
(``core.knobs``); forms, REST and documentation follow from it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from router_ext.core import knobs
from router_ext.core.ids import BackendId, TenantId, TierName
from router_ext.core.knobs import SECTIONS, ConfigError, Knob, knob, knobs_of

__all__ = [
    "COST_MODELS", "KNOBS", "SECTIONS", "BackendConfig", "ConfigError", "GroupConfig", "Knob", "PolicyPage",
    "PoolConfig", "Shares", "TenantConfig", "TierConfig", "build_backend", "build_group", "build_pool", "build_shares",
    "build_tenant", "build_tier", "policy_names", "policy_pages", "same_but_shares",
]  # fmt: skip


COST_MODELS = ("linear", "uncached", "profiled", "step-time", "kv-token-time")
"""What a pool's service may be counted in (``core.cost``)."""


def policy_names() -> tuple[str, ...]:
    """Policies a pool may choose: those registered in ``core.fairness``."""
    # A policy is made from a PoolConfig, so its module needs this one first.
    from router_ext.core.fairness import POLICIES

    return tuple(POLICIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPage:
    """What a policy says of itself.

    Attributes:
        summary: one sentence. text: rule, guarantee, cost, failure mode and source.
        is_bounded: whether ``core.bounds`` holds under it. document: its page in the repository.
    """

    name: str
    summary: str
    text: str
    is_bounded: bool

    @property
    def document(self) -> str:
        return f"docs/policies/{self.name}.md"


def policy_pages() -> dict[str, PolicyPage]:
    """The policies a pool may choose, by name, as the docstrings of their modules describe them.

    The first line of such a docstring is ````name````, a colon, and the summary; sentences up to the first blank line.
    """
    from router_ext.core.fairness import POLICIES

    pages = {}
    for name in policy_names():
        policy = POLICIES[name]
        text = inspect.cleandoc(_docstring(policy.__module__) or policy.__doc__ or name)
        head, _, rest = text.partition("\n\n")
        summary = " ".join(head.split()).removeprefix(f"``{name}``:").strip()
        summary = summary[:1].upper() + summary[1:]
        pages[name] = PolicyPage(
            name=name, summary=summary, text=rest.strip().replace("``", "`"), is_bounded=policy.is_bounded
        )
    return pages


def _docstring(module: str) -> str | None:
    """What a module of the core says of itself; compiled modules keep no docstring, so theirs is read in the source."""
    kept = sys.modules[module].__doc__
    if kept is not None:
        return kept
    source = Path(__file__).parent.joinpath(*module.split(".")[2:]).with_suffix(".py")
    return ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")), clean=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """An SLO tier. Weight buys share; a tier buys a latency target. Smaller ``rank`` goes first inside a tenant."""

    name: TierName
    rank: int
    ttft_target_s: float | None = None
    max_queue_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Tenants that compete in the pool as one, with this weight, and share what they get by their own weights."""

    group: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A tenant's share in the pool, or in its ``group`` if it has one. ``max_queued`` bounds its waiting requests."""

    tenant: TenantId
    weight: float = 1.0
    max_queued: int = 2_000
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """What the operator states of one TGI server (none of it but the two limits is in ``/info``).

    ``max_sequences``: most sequences of one request (TGI's ``max_best_of``). ``takes_grammars``: it is given requests
    whose answer a grammar, a response format or tools force into a form.

    Units: tokens, except ``block_size`` (tokens per block), ``max_concurrent_requests`` and ``max_sequences``.
    """

    backend: BackendId
    kv_tokens: int
    block_size: int = 1
    prefill_budget_tokens: int = 4_096
    is_chunked: bool = True
    speculate: int = 0
    max_input_tokens: int = 1_024
    max_total_tokens: int = 2_048
    max_concurrent_requests: int = 128
    max_sequences: int = 2
    is_cordoned: bool = False
    takes_grammars: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Everything the scheduler of one pool needs to know; every knob says itself what it does."""

    name: str
    policy: str = "slo-fair"
    tiers: Mapping[TierName, TierConfig] = field(default_factory=dict)
    tenants: Mapping[TenantId, TenantConfig] = field(default_factory=dict)
    backends: Mapping[BackendId, BackendConfig] = field(default_factory=dict)
    groups: Mapping[str, GroupConfig] = field(default_factory=dict)
    cost_model: str = knob(
        "linear", choices=COST_MODELS, section=knobs.PRICES, label="Cost model",
        help="What service costs. linear: tokens at two prices. uncached: the same, without prompt tokens found in a "
        "prefix cache. profiled: milliseconds by a polynomial that was fitted to a profile. step-time: milliseconds "
        "by the server's steps. kv-token-time: KV held over time. A change makes all tenants start even.",
    )  # fmt: skip
    w_prompt: float = knob(
        1.0, low=0, high=1_000, section=knobs.PRICES, label="Price of a prompt token",
        help="Service charged per prompt token, under linear and uncached.",
    )  # fmt: skip
    w_output: float = knob(
        2.0, low=0.001, high=1_000, section=knobs.PRICES, label="Price of an output token",
        help="Service charged per output token, under linear and uncached. Only the ratio of the two decides anything.",
    )  # fmt: skip
    profiled_base: float = knob(
        1.146, low=0, high=1e6, section=knobs.PRICES, label="Profiled: per request",
        help="Milliseconds of h(p, q) = base + prompt p + output q + cross p q + square q q. The defaults are those "
        "of Llama-2-7B on an A10G at full batch.",
    )  # fmt: skip
    profiled_prompt: float = knob(
        0.21, low=0, high=1e6, section=knobs.PRICES, label="Profiled: per prompt token",
        help="Milliseconds per prompt token.",
    )  # fmt: skip
    profiled_output: float = knob(
        0.1008, low=1e-6, high=1e6, section=knobs.PRICES, label="Profiled: per output token",
        help="Milliseconds per output token.",
    )  # fmt: skip
    profiled_cross: float = knob(
        0.003987, low=0, high=1e3, section=knobs.PRICES, label="Profiled: per prompt and output token",
        help="Milliseconds per output token and prompt token: what attention to the prompt costs.",
    )  # fmt: skip
    profiled_square: float = knob(
        0.003247, low=0, high=1e3, section=knobs.PRICES, label="Profiled: per output token squared",
        help="Milliseconds per output token and output token: what attention to the answer costs.",
    )  # fmt: skip
    step_ms: float = knob(
        15.3, low=0, high=1e5, section=knobs.PRICES, label="Step: fixed",
        help="Milliseconds of a decode step apart from its sequences; shared by the batch stated below. The defaults "
        "of these six are those of Llama-2-7B on an A10G.",
    )  # fmt: skip
    step_sequence_ms: float = knob(
        0.253, low=1e-6, high=1e5, section=knobs.PRICES, label="Step: per sequence",
        help="Milliseconds per sequence of a decode step.",
    )  # fmt: skip
    step_context_ms: float = knob(
        0.00216, low=0, high=1e3, section=knobs.PRICES, label="Step: per token of context",
        help="Milliseconds per token of context in a decode step.",
    )  # fmt: skip
    prefill_ms: float = knob(
        35.8, low=0, high=1e5, section=knobs.PRICES, label="Step: per prompt",
        help="Milliseconds of a prompt apart from its length.",
    )  # fmt: skip
    prefill_token_ms: float = knob(
        0.2131, low=0, high=1e5, section=knobs.PRICES, label="Step: per prompt token",
        help="Milliseconds per prompt token.",
    )  # fmt: skip
    step_batch: int = knob(
        16, low=1, high=10_000, section=knobs.PRICES, label="Step: batch",
        help="Sequences that share the fixed part of a step: what usually runs at once on a busy backend.",
    )  # fmt: skip
    burst_ratio: float = knob(
        0.25, low=0, high=10, section=knobs.FAIRNESS, policies=("slo-fair",), label="Urgency pass",
        help="How far above the least served tenant a tenant may be and still have its requests with a first-token "
        "target go first, as a share of U'. Larger: better latency in bursts, a larger bound. 0: never ahead.",
    )  # fmt: skip
    backfill_ratio: float = knob(
        0.02, low=0, high=10, section=knobs.FAIRNESS, policies=("slo-fair",), label="Backfill pass",
        help="The same for other work that starts on another backend, or behind a request in turn that does not fit "
        "yet. 0: nothing starts while the request in turn waits.",
    )  # fmt: skip
    rpm_limit: int = knob(
        60, low=1, high=1_000_000, section=knobs.POLICY, policies=("rpm",), label="Requests per minute",
        help="Requests that a tenant of weight 1 may send in any 60 seconds; others in proportion to their weight, at "
        "least one. More are refused with 429.",
    )  # fmt: skip
    quantum_ratio: float = knob(
        0.025, low=0.001, high=10, section=knobs.POLICY, policies=("drr",), label="Quantum",
        help="Service that one round grants the heaviest tenant, as a share of U'; the others get theirs by weight. "
        "Smaller: closer to vtc. Larger: longer clumps, a larger bound.",
    )  # fmt: skip
    dlpm_quantum_ratio: float = knob(
        0.25, low=0.001, high=10, section=knobs.POLICY, policies=("dlpm",), label="Quantum of locality",
        help="Service that one round grants the heaviest tenant, as a share of U'; the others get theirs by weight. "
        "Within it prompts that are cached go first. Smaller: closer to vtc. Larger: more is found in caches, a "
        "larger bound.",
    )  # fmt: skip
    fairserve_overload: float = knob(
        0.9, low=0, high=1, section=knobs.POLICY, policies=("fairserve",), label="Overload mark",
        help="Share of the KV that must be reserved, while requests wait, before anything is refused. 1: only when all "
        "of it is.",
    )  # fmt: skip
    fairserve_limit: int = knob(
        60, low=1, high=1_000_000, section=knobs.POLICY, policies=("fairserve",), label="Requests per minute, tenant",
        help="Under overload a tenant of weight 1 that has sent so many requests in the last minute cannot begin "
        "another interaction; others in proportion to their weight. What goes on is never refused.",
    )  # fmt: skip
    fairserve_key_limit: int = knob(
        0, low=0, high=1_000_000, section=knobs.POLICY, policies=("fairserve",), label="Requests per minute, key",
        help="The same for each key of a tenant. 0: no limit.",
    )  # fmt: skip
    equinox_alpha: float = knob(
        0.7, low=0, high=1, section=knobs.POLICY, policies=("equinox",), label="Weight of the user counter",
        help="How much the service that users got decides whose turn it is; the rest is decided by what a tenant made "
        "the machine do. 1: service alone.",
    )  # fmt: skip
    equinox_delta: float = knob(
        0.1, low=0, high=10, section=knobs.POLICY, policies=("equinox",), label="Discount for slow answers",
        help="A request that took n times as long as its service alone is charged 1 + n times this less, so a tenant "
        "that had to wait comes sooner. 0: latency does not matter.",
    )  # fmt: skip
    equinox_w_output: float = knob(
        4.0, low=0.001, high=1_000, section=knobs.POLICY, policies=("equinox",), label="Output in the user counter",
        help="What an output token counts there, a prompt token being 1. Books and bound keep the pool's prices.",
    )  # fmt: skip
    stall_ratio: float = knob(
        0.05, low=0, high=10, section=knobs.FAIRNESS, label="Charge for a stall",
        help="Most that a tenant is charged for the tokens others miss while a backend compiles a grammar that is new "
        "to it, as a share of U'. The bound is larger by as much where backends take grammars. 0: not charged.",
    )  # fmt: skip
    gamma: float = knob(
        0.0, low=0, high=1, section=knobs.FAIRNESS, policies=("slo-fair",), label="Weight of work in flight",
        help="How much of the output still expected from running requests counts in whose turn it is. Helps tenants "
        "that come in bursts where lengths are predicted well; enlarges the bound of heavy tenants. 0: off.",
    )  # fmt: skip
    headroom_ratio: float = knob(
        0.01, low=0, high=0.9, section=knobs.LATENCY, policies=("slo-fair",), label="Headroom",
        help="Least share of a backend's KV that other work leaves free while a tier with a first-token target is "
        "active. One typical urgent reservation is left in any case, two when preemption has become too dear.",
    )  # fmt: skip
    max_queued: int = knob(
        20_000, low=1, high=10_000_000, section=knobs.QUEUES, label="Longest queue",
        help="Requests that may wait in the pool; more displace waiting requests of lower tiers, or are refused with "
        "429.",
    )  # fmt: skip
    max_queued_bytes: int = knob(
        268_435_456, low=1_000, high=1_000_000_000_000, section=knobs.QUEUES, label="Memory of the queue",
        help="Bytes of request bodies that may wait in the pool; what exceeds them displaces waiting requests of lower "
        "tiers, or is refused with 429. One request alone may always wait.",
    )  # fmt: skip
    tenant_queued_bytes: int = knob(
        67_108_864, low=1_000, high=1_000_000_000_000, section=knobs.QUEUES, label="Memory per tenant",
        help="The same for each tenant.",
    )  # fmt: skip
    backend_wait_s: float = knob(
        30.0, low=0, high=3_600, section=knobs.QUEUES, label="Wait for a backend",
        help="Seconds that requests wait for a backend when none is up, or none that holds them.",
    )  # fmt: skip
    max_slice_tokens: int = knob(
        1_024, low=1, high=1_024, section=knobs.SLICES, label="Longest slice",
        help="Output tokens asked for at once. TGI reserves at most 1,024, so more buys nothing; fewer make every "
        "request that can be resumed yield after so many tokens, at the price of its prompt.",
    )  # fmt: skip
    min_slice_tokens: int = knob(
        64, low=1, high=1_024, section=knobs.SLICES, label="Shortest slice",
        help="No slice is shrunk below this to squeeze a request in: a slice costs its prompt again.",
    )  # fmt: skip
    aging_s: float = knob(
        30.0, low=0, high=86_400, section=knobs.LATENCY, label="Age of promotion",
        help="Inside one tenant, requests of a lower tier that have waited so many seconds get the share below of "
        "its admissions, oldest first, so that no tier of its own starves another.",
    )  # fmt: skip
    aging_ratio: float = knob(
        0.1, low=0, high=0.5, section=knobs.LATENCY, label="Share of the aged",
        help="That share of a tenant's admissions. 0: no promotion.",
    )  # fmt: skip
    max_preemptions: int = knob(
        1, low=0, high=100, section=knobs.PREEMPTION, policies=("slo-fair",), label="Cuts per request",
        help="How often one running request may be told to stop, so that its KV comes free for others; it goes on "
        "later, at the system's expense. 0: running work is never cut.",
    )  # fmt: skip
    theta_ratio: float = knob(
        0.025, low=0, high=10, section=knobs.PREEMPTION, policies=("slo-fair",), label="Lead that may be cut",
        help="How far above the least served tenant a tenant must be for its running work to be cut for the request "
        "in turn, as a share of U'. Smaller: tenants stay closer together, more is computed again.",
    )  # fmt: skip
    waste_ratio: float = knob(
        0.015, low=0, high=1, section=knobs.PREEMPTION, policies=("slo-fair",), label="Work computed again",
        help="Tokens that may be computed again because of cuts, as a share of the output tokens delivered. Beside "
        "it up to 1,000 tokens may be spent at once. 0: those and no more.",
    )  # fmt: skip


_BY_TENANT = frozenset(("tenants", "groups"))
_STATED = tuple(each.name for each in fields(PoolConfig) if each.name not in _BY_TENANT)


def same_but_shares(config: PoolConfig, other: PoolConfig) -> bool:
    """Whether two configurations differ in tenants and groups only, if at all."""
    return all(getattr(config, name) == getattr(other, name) for name in _STATED)


KNOBS: Mapping[str, Knob] = knobs_of(PoolConfig)
"""What an operator may set of a pool, policy and rows of their own apart, by name of the field."""


def _number(mapping: Mapping[str, Any], key: str, default: float, low: float, high: float, where: str) -> float:
    value = mapping.get(key)
    return knobs.number(key, default if value is None else value, low, high, where)


def _integer(mapping: Mapping[str, Any], key: str, default: int, low: int, high: int, where: str) -> int:
    value = mapping.get(key)
    return int(knobs.number(key, default if value is None else value, low, high, where, is_whole=True))


def _optional(mapping: Mapping[str, Any], key: str, low: float, high: float, where: str) -> float | None:
    if mapping.get(key) is None:
        return None
    return knobs.number(key, mapping[key], low, high, where, is_low_open=True)


def build_tier(mapping: Mapping[str, Any]) -> TierConfig:
    """Validate one tier."""
    where = f"tier {mapping.get('name')!r}"
    return TierConfig(
        name=TierName(str(mapping["name"])),
        rank=_integer(mapping, "rank", 100, 0, 10_000, where),
        ttft_target_s=_optional(mapping, "ttft_target_s", 0, 3_600, where),
        max_queue_wait_s=_optional(mapping, "max_queue_wait_s", 0, 86_400, where),
    )


def build_tenant(mapping: Mapping[str, Any]) -> TenantConfig:
    """Validate one tenant's share. A weight of 0 is refused: "background" is a tier, not a weight."""
    where = f"tenant {mapping.get('tenant')!r}"
    return TenantConfig(
        tenant=TenantId(str(mapping["tenant"])),
        weight=_number(mapping, "weight", 1.0, 0.001, 10_000, where),
        max_queued=_integer(mapping, "max_queued", 2_000, 1, 1_000_000, where),
        group=None if mapping.get("group") is None else str(mapping["group"]),
    )


def build_group(mapping: Mapping[str, Any]) -> GroupConfig:
    """Validate one group of tenants. Its weight has the range of a tenant's."""
    where = f"group {mapping.get('group')!r}"
    return GroupConfig(
        group=str(mapping["group"]),
        weight=_number(mapping, "weight", 1.0, 0.001, 10_000, where),
    )


def build_backend(mapping: Mapping[str, Any]) -> BackendConfig:
    """Validate one backend; the KV must hold at least one block beside the reserved one."""
    where = f"backend {mapping.get('backend')!r}"
    config = BackendConfig(
        backend=BackendId(str(mapping["backend"])),
        kv_tokens=_integer(mapping, "kv_tokens", 0, 2, 1_000_000_000, where),
        block_size=_integer(mapping, "block_size", 1, 1, 1_024, where),
        prefill_budget_tokens=_integer(mapping, "prefill_budget_tokens", 4_096, 1, 10_000_000, where),
        is_chunked=bool(mapping.get("is_chunked", True)),
        speculate=_integer(mapping, "speculate", 0, 0, 64, where),
        max_input_tokens=_integer(mapping, "max_input_tokens", 1_024, 1, 10_000_000, where),
        max_total_tokens=_integer(mapping, "max_total_tokens", 2_048, 2, 10_000_000, where),
        max_concurrent_requests=_integer(mapping, "max_concurrent_requests", 128, 1, 1_000_000, where),
        max_sequences=_integer(mapping, "max_sequences", 2, 1, 128, where),
        is_cordoned=bool(mapping.get("is_cordoned", False)),
        takes_grammars=bool(mapping.get("takes_grammars", True)),
    )
    if config.kv_tokens < 2 * config.block_size:
        raise ConfigError(
            f"{where}: kv_tokens {config.kv_tokens} is less than two blocks of {config.block_size} tokens"
        )
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Validated tenants and groups, the same for all pools: made once, and only read from then on."""

    tenants: Mapping[TenantId, TenantConfig] = field(default_factory=dict)
    groups: Mapping[str, GroupConfig] = field(default_factory=dict)


def build_shares(tenants: Iterable[TenantConfig], groups: Iterable[GroupConfig] = ()) -> Shares:
    """Bring validated tenants and groups together.

    Raises:
        ConfigError: a tenant's group is not among the groups.
    """
    known = {g.group: g for g in groups}
    shares = {}
    for share in tenants:
        shares[share.tenant] = share
        if share.group is not None and share.group not in known:
            raise ConfigError(f"tenant {share.tenant!r}: unknown group {share.group!r}")
    return Shares(tenants=shares, groups=known)


def build_pool(
    *,
    pool: Mapping[str, Any],
    backends: Iterable[Mapping[str, Any]],
    tiers: Iterable[Mapping[str, Any]],
    tenants: Iterable[Mapping[str, Any]] = (),
    groups: Iterable[Mapping[str, Any]] = (),
    shares: Shares | None = None,
) -> PoolConfig:
    """Validate everything that concerns one pool.

    Args:
        pool: fields of ``PoolConfig`` by name; unknown ones are ignored (they belong to the gateway).
        backends: fields of ``BackendConfig`` by name. tiers, tenants, groups: likewise.
        shares: in place of tenants and groups, where they have been validated for all pools.

    Raises:
        ConfigError: naming the field, its value and the accepted range.
    """
    name = str(pool.get("name", ""))
    where = f"pool {name!r}"
    policy = str(pool.get("policy") or "slo-fair")
    if policy not in policy_names():
        raise ConfigError(f"{where}: unknown policy {policy!r} (one of {', '.join(policy_names())})")
    values: dict[str, Any] = {name: stated.check(pool.get(name), where) for name, stated in KNOBS.items()}
    if shares is None:
        shares = build_shares(map(build_tenant, tenants), map(build_group, groups))
    return PoolConfig(
        name=name,
        policy=policy,
        tiers={t.name: t for t in map(build_tier, tiers)},
        tenants=shares.tenants,
        groups=shares.groups,
        backends={b.backend: b for b in map(build_backend, backends)},
        **values,
    )
