"""What is measured on the running control plane: memory while exports stream, and how fast a change is everywhere."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp

from router_ext.ops.usagebench.installation import UsageBenchFailed

_SAMPLE_S = 0.01
_LOOK_S = 0.02
_FOLLOW_LIMIT_S = 120.0
_LIMIT = aiohttp.ClientTimeout(total=900.0)
_DAYS = 31
_EVERYTHING = "hour,tenant,key,pool,model,tier"
"""The grouping with most rows: hardly two events share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One export. ``peak_mib``: of memory beyond that before the first one."""

    name: str
    mib: float
    s: float
    peak_mib: float


async def measure_exports(url: str, token: str, memory: Callable[[], int]) -> list[Export]:
    """Stream the report with most rows, as CSV and as JSON, and the audit log, one after the other."""
    today = datetime.now(UTC).date()
    span = {"from": str(today - timedelta(days=_DAYS)), "to": str(today)}
    report = span | {"group_by": _EVERYTHING}
    asked: dict[str, tuple[str, Mapping[str, str]]] = {
        "usage, CSV": ("usage/export", report | {"format": "csv"}),
        "usage, JSON": ("usage/export", report | {"format": "json"}),
        "audit, CSV": ("audit", {"format": "csv"}),
        "audit, JSON": ("audit", {"format": "json"}),
    }
    headers = {"Authorization": f"Bearer {token}"}
    found = []
    async with aiohttp.ClientSession(timeout=_LIMIT, headers=headers) as session:
        # What the first answer loads belongs to the idle process: of each kind one of hardly anything.
        none = {"from": "2020-01-01", "to": "2020-01-02"}
        for address, parameters in asked.values():
            await _drain(session, f"{url}/api/v1/{address}", {**parameters, **none})
        idle = memory()
        for name, (address, parameters) in asked.items():
            peak = memory()
            began = time.monotonic()
            export = asyncio.create_task(_drain(session, f"{url}/api/v1/{address}", parameters))
            while not export.done():
                await asyncio.wait([export], timeout=_SAMPLE_S)
                peak = max(peak, memory())
            size = await export
            found.append(
                Export(name=name, mib=size / 2**20, s=time.monotonic() - began, peak_mib=(peak - idle) / 2**20)
            )
    return found


async def _drain(session: aiohttp.ClientSession, url: str, parameters: Mapping[str, str]) -> int:
    size = 0
    async with session.get(url, params=parameters) as answer:
        if answer.status != 200:
            raise UsageBenchFailed(f"{url} answered {answer.status}: {(await answer.text())[:300]}")
        async for piece in answer.content.iter_any():
            size += len(piece)
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Seconds from the request that changes a weight to when the control plane said that every router runs it.

    ``answered``: until the request was answered, publishing included, median; ``first``: all of the configuration, to
    routers that had none.
    """

    worst: float
    median: float
    answered: float
    first: float


async def measure_apply(
    url: str, token: str, tenants: Sequence[str], *, routers: Sequence[str], changes: int = 7
) -> Applied:
    """Change the weight of a tenant again and again; ``routers``: names of the instances that have to follow.

    Raises:
        UsageBenchFailed: a router did not follow.
    """
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(timeout=_LIMIT, headers=headers) as session:

        async def call(method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
            async with session.request(method, f"{url}/api/v1/{path}", json=body) as answer:
                if answer.status >= 400:
                    raise UsageBenchFailed(f"{method} {path} answered {answer.status}: {(await answer.text())[:300]}")
                found: dict[str, Any] = await answer.json()
                return found

        async def followed(began: float) -> float:
            """Until every router applied the newest revision."""
            revision = (await call("GET", "revisions?limit=1"))["results"][0]["number"]
            while time.monotonic() - began < _FOLLOW_LIMIT_S:
                rows = (await call("GET", "routers"))["results"]
                applied = {each["instance"]: each["applied_revision"] for row in rows for each in row["instances"]}
                if all(applied.get(name, 0) >= revision for name in routers):
                    return time.monotonic() - began
                await asyncio.sleep(_LOOK_S)
            raise UsageBenchFailed(f"revision {revision} was not in force on every router within {_FOLLOW_LIMIT_S:g} s")

        first = await followed(time.monotonic())
        answered, everywhere = [], []
        for tenant in tenants[:changes]:
            # Another weight than it has, in a folder that was measured before as well: else nothing is published.
            present = (await call("GET", f"tenants/{tenant}"))["weight"]
            began = time.monotonic()
            await call("PATCH", f"tenants/{tenant}", {"weight": 2.5 if present != 2.5 else 3.5})
            answered.append(time.monotonic() - began)
            everywhere.append(await followed(began))
            await asyncio.sleep(0.5)
    return Applied(
        worst=max(everywhere), median=statistics.median(everywhere), answered=statistics.median(answered), first=first
    )
