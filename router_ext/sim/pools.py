"""The pool of a suite, as an operator would state it."""

from __future__ import annotations

from dataclasses import replace

from router_ext.core.config import PoolConfig, build_pool, policy_names
from router_ext.core.fairness import TEST_POLICIES
from router_ext.core.ids import TierName
from router_ext.sim.suites import Suite

_NO_LIMIT = 10_000_000


def pool_config(suite: Suite, policy: str) -> PoolConfig:
    """Servers, tenants, and a tier per target; no limit on queues. Without a router the policy says nothing."""
    model = suite.model
    targets = sorted({client.ttft_target_s for client in suite.clients if client.ttft_target_s is not None})
    config = build_pool(
        pool={
            "name": suite.name,
            "policy": policy if policy in policy_names() else "fifo",
            "max_queued": _NO_LIMIT,
            **suite.pool,
        },
        backends=[
            {
                "backend": f"server{index}",
                "kv_tokens": model.kv_tokens,
                "prefill_budget_tokens": model.prefill_budget_tokens,
                "is_chunked": model.is_chunked,
                "max_input_tokens": model.longest_input_tokens,
                "max_total_tokens": 2 * model.kv_tokens,
                "max_concurrent_requests": 1_000_000,
            }
            for index in range(suite.num_backends)
        ],
        tiers=[
            *({"name": tier_name(target), "rank": 1, "ttft_target_s": target} for target in targets),
            {"name": tier_name(None), "rank": 10},
        ],
        tenants=[{"tenant": client.name, "weight": client.weight, "max_queued": 1_000_000} for client in suite.clients],
    )
    return replace(config, policy=policy) if policy in TEST_POLICIES else config


def tier_name(target_s: float | None) -> TierName:
    """The tier of requests with that target."""
    return TierName("batch" if target_s is None else f"within_{target_s:g}s")
