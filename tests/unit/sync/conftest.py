"""Records and snapshots of a router, and a control plane for it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from support.published import TOKEN, ControlPlane

from router_ext.sync.inflight import FIRST_DISPATCH_US, OUTPUT_TOKENS, PROMPT_TOKENS, RequestStart
from router_ext.sync.ledger import Ledger
from router_ext.sync.session import ControlPlaneSession
from router_ext.wire.controlplane import (
    ConfigSnapshot,
    GroupRecord,
    KeyRecord,
    PoolRecord,
    TenantRecord,
    TierRecord,
    UsageEvent,
    snapshot_digest,
)


@pytest.fixture
async def control_plane() -> AsyncIterator[ControlPlane]:
    plane = ControlPlane()
    await plane.start()
    yield plane
    await plane.stop()


@pytest.fixture
async def session(control_plane: ControlPlane) -> AsyncIterator[ControlPlaneSession]:
    session = ControlPlaneSession(control_plane.url, TOKEN)
    yield session
    await session.close()


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "router", now_us=1)
    yield ledger
    ledger.close()


def make_start(number: int, **fields: object) -> RequestStart:
    values: dict[str, object] = {
        "event": f"evt_{number:08d}",
        "request": f"req_{number:08d}",
        "router": "rtr_test",
        "tenant": f"ten_{number % 3}",
        "key": "key_1",
        "pool": "pool_1",
        "model": "SmolLM2-135M-Instruct",
        "tier": "interactive",
        "dialect": "generate_stream",
        "arrived_at_us": 1_700_000_000_000_000 + number,
    }
    return RequestStart(**(values | fields))  # type: ignore[arg-type]  # fields of a record, by name


@pytest.fixture
def start() -> Callable[..., RequestStart]:
    return make_start


@pytest.fixture
def book(ledger: Ledger) -> Callable[[int, int], UsageEvent]:
    """Begin and finish request ``number`` with so many output tokens."""

    def book(number: int, output_tokens: int) -> UsageEvent:
        slot = ledger.begin(make_start(number))
        slot.words[FIRST_DISPATCH_US] = 1_700_000_000_000_500 + number
        slot.words[PROMPT_TOKENS] = 10
        slot.words[OUTPUT_TOKENS] = output_tokens
        return ledger.finish(
            slot, outcome="completed", ended_at_us=1_700_000_000_900_000 + number, finish_reason="eos_token"
        )

    return book


@pytest.fixture
def make_snapshot() -> Callable[..., ConfigSnapshot]:
    def make(revision: int, *, n_keys: int = 2, pools: list[PoolRecord] | None = None) -> ConfigSnapshot:
        blank = ConfigSnapshot(
            revision=revision,
            published_at_us=1_700_000_000_000_000 + revision,
            pools=pools or [PoolRecord(pool="pool_1", name="model", scheduling={"policy": "fifo", "gamma": 0.5})],
            tiers=[TierRecord(name="interactive", rank=10, ttft_target_s=0.5)],
            tenants=[TenantRecord(tenant=f"ten_{i}", name=f"Tenant {i}", group="research") for i in range(3)],
            groups=[GroupRecord(group="research", weight=2.0)],
            keys=[
                KeyRecord(
                    key=f"key_{i}",
                    public_id=f"{i:012d}",
                    digest=hashlib.sha256(str(i).encode()).hexdigest(),
                    pepper_version=1,
                    tenant=f"ten_{i % 3}",
                    default_pool="model",
                )
                for i in range(n_keys)
            ],
        )
        return msgspec.structs.replace(blank, digest=snapshot_digest(blank))

    return make
