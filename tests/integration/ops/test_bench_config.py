"""``fairlane bench config`` with few tenants: a real router follows whole and delta, and does what they say."""

from __future__ import annotations

import asyncio

from router_ext.ops.configbench.bench import measure


def test_a_router_follows_a_large_configuration_by_deltas() -> None:
    result = asyncio.run(measure(300, 1_500))
    assert result.delta.size_bytes < 2_000 < 100_000 < result.base.size_bytes
    shown = result.as_json()
    assert shown["bytes_base"] == result.whole.size_bytes
    assert {
        "base_apply_s", "base_stall_ms", "delta_apply_ms", "delta_stall_ms", "bytes_base", "bytes_delta"
    } <= shown.keys()  # fmt: skip
