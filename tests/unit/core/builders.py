"""A scheduler with stated defaults, and events in few words."""

from __future__ import annotations

from typing import Any

from router_ext.core.actions import Action, Dispatch
from router_ext.core.config import PoolConfig, build_pool
from router_ext.core.events import Arrived, BackendChanged, Progressed, RequestSpec
from router_ext.core.ids import BackendId, KeyId, RequestId, TenantId, TierName
from router_ext.core.scheduler import Scheduler

CHAT = {"name": "chat", "rank": 1, "ttft_target_s": 2.0}
BATCH = {"name": "batch", "rank": 10}


def pool(
    *,
    kv: int | list[int] = 1_001,
    tenants: dict[str, float] | None = None,
    tiers: list[dict[str, Any]] | None = None,
    backend: dict[str, Any] | None = None,
    **fields: Any,
) -> PoolConfig:
    sizes = [kv] if isinstance(kv, int) else kv
    return build_pool(
        pool={"name": "p", "stall_ratio": 0.0, **fields},
        backends=[
            {
                "backend": f"bke_{index}",
                "kv_tokens": size,
                "max_input_tokens": 100_000,
                "max_total_tokens": 200_000,
                "prefill_budget_tokens": 100_000,
                "max_sequences": 1,
                **(backend or {}),
            }
            for index, size in enumerate(sizes)
        ],
        tiers=tiers or [CHAT, BATCH],
        tenants=[{"tenant": name, "weight": weight} for name, weight in (tenants or {"a": 1.0, "b": 1.0}).items()],
    )


def started(config: PoolConfig) -> Scheduler:
    scheduler = Scheduler(config)
    for backend in config.backends:
        scheduler.handle(BackendChanged(backend=backend, is_up=True), 0.0)
    return scheduler


def arrival(
    name: str, tenant: str = "a", tier: str = "batch", prompt: int = 100, cap: int = 100, **fields: Any
) -> Arrived:
    return Arrived(
        request=RequestSpec(
            request_id=RequestId(name),
            tenant=TenantId(tenant),
            key=KeyId("key_1"),
            tier=TierName(tier),
            prompt_tokens=prompt,
            max_new_tokens=cap,
            **fields,
        )
    )


def tokens(name: str, count: int = 1) -> Progressed:
    return Progressed(request_id=RequestId(name), output_tokens=count)


def down(backend: str = "bke_0") -> BackendChanged:
    return BackendChanged(backend=BackendId(backend), is_up=False)


def up(backend: str = "bke_0") -> BackendChanged:
    return BackendChanged(backend=BackendId(backend), is_up=True)


def said(scheduler: Scheduler, name: str) -> list[str]:
    """Why a request waited, in sentences."""
    return [reason.text for reason in scheduler.explain(RequestId(name))]


def dispatched(actions: list[Action]) -> list[str]:
    return [str(action.request_id) for action in actions if isinstance(action, Dispatch)]
