"""The control plane's books equal what clients received, whatever dies meanwhile.

Requests that ended: exact. Streams cut by a killed router: never below what the client got, at most one write above.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from support.stack import Stack, running_stack, usage_rows

OUTAGE_S = 20.0
SETTLE_LIMIT_S = 60.0
N_CLIENTS = 12
"""Clients per tenant, each with one request at a time."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--sim-step-ms", "20", "--sim-mean-tokens", "40", "--max-total-tokens", "512")
    with running_stack(tmp_path_factory.mktemp("stack"), *flags) as running:
        yield running


@dataclass(slots=True)
class Received:
    """What one client got of one request. ``request`` is None if not even the head of an answer came.

    ``largest_read``: most tokens that came in one piece, hence an upper bound of what one write carries.
    """

    tenant: str
    is_stream: bool
    request: str | None = None
    status: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    is_complete: bool = False
    largest_read: int = 1


class Load:
    """Clients of both tenants, streaming and not, until stopped; keeps what each of them received."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self.stack = stack
        self.received: list[Received] = []
        self.rng = random.Random(seed)
        self.is_stopping = False
        self.changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load during the block; afterwards every request has come to its end."""
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as tasks:
            for tenant in self.stack.keys:
                for number in range(N_CLIENTS):
                    tasks.create_task(self._client(session, tenant, is_stream=number % 4 != 0))
            yield
            self.is_stopping = True

    async def wait_for(self, condition: Callable[[], bool], limit_s: float = 40.0) -> None:
        async with asyncio.timeout(limit_s), self.changed:
            await self.changed.wait_for(condition)

    def completed(self) -> int:
        return sum(one.is_complete for one in self.received)

    def streaming(self) -> int:
        return sum(one.is_stream and not one.is_complete and one.output_tokens > 0 for one in self.received)

    async def _client(self, session: aiohttp.ClientSession, tenant: str, *, is_stream: bool) -> None:
        while not self.is_stopping:
            one = Received(tenant=tenant, is_stream=is_stream)
            self.received.append(one)
            words = " ".join(
                self.rng.choice(("river", "stone", "cloud", "paper")) for _ in range(self.rng.randint(3, 40))
            )
            body = {"inputs": words, "parameters": {"max_new_tokens": self.rng.randint(5, 120), "details": True}}
            headers = {"Authorization": f"Bearer {self.stack.keys[tenant]}"}
            path = "/generate_stream" if is_stream else "/generate"
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(self.stack.url + path, json=body, headers=headers) as response:
                    one.status = response.status
                    one.request = response.headers["x-request-id"]
                    if response.status == 503:  # a router that has just started and not met its backend yet
                        await asyncio.sleep(0.1)
                        continue
                    assert response.status == 200, await response.text()
                    await (self._read_stream(response, one) if is_stream else self._read_whole(response, one))
            async with self.changed:
                self.changed.notify_all()

    async def _read_whole(self, response: aiohttp.ClientResponse, one: Received) -> None:
        answer = await response.json()
        one.output_tokens = answer["details"]["generated_tokens"]
        one.prompt_tokens = int(response.headers["x-prompt-tokens"])
        one.is_complete = True

    async def _read_stream(self, response: aiohttp.ClientResponse, one: Received) -> None:
        rest = b""
        async for piece in response.content.iter_any():
            *events, rest = (rest + piece).split(b"\n\n")
            before = one.output_tokens
            for event in events:
                self._read_event(json.loads(event.removeprefix(b"data:")), one)
            one.largest_read = max(one.largest_read, one.output_tokens - before)
            async with self.changed:
                self.changed.notify_all()

    def _read_event(self, event: dict[str, Any], one: Received) -> None:
        assert "error" not in event, event
        one.output_tokens += 1
        if event["details"] is not None:
            assert event["details"]["generated_tokens"] == one.output_tokens
            one.prompt_tokens = event["details"]["input_length"]
            one.is_complete = True


async def settled_rows(stack: Stack, load: Load) -> dict[str, dict[str, Any]]:
    """Rows of this load by request id, once everything the router booked has arrived.

    The router delivers oldest first, so with the request that ended last everything before it is there.
    """
    wanted = {one.request for one in load.received if one.request is not None and one.status == 200}
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while True:
        rows = await asyncio.to_thread(usage_rows, stack.postgres.recorded_url())
        missing = wanted - {row["request"] for row in rows}
        if not missing:
            break
        assert time.monotonic() < deadline, f"{len(missing)} of {len(wanted)} requests are not in the books: {missing}"
        await asyncio.sleep(0.2)
    counts = Counter(row["request"] for row in rows)
    assert set(counts.values()) == {1}, "one row per request"
    return {row["request"]: row for row in rows}


def check_books(stack: Stack, load: Load, rows: dict[str, dict[str, Any]]) -> None:
    """Every request against its row, then the sums per tenant."""
    one_write = max(one.largest_read for one in load.received)
    for one in load.received:
        if one.request is None:
            continue
        if one.status != 200:
            assert one.request not in rows, "a refusal counts nothing"
            continue
        row = rows[one.request]
        assert row["tenant"] == stack.tenant_ids[one.tenant]
        if one.is_complete:
            assert row["outcome"] == "completed"
            assert (row["output_tokens"], row["prompt_tokens"]) == (one.output_tokens, one.prompt_tokens)
        else:
            assert row["outcome"] == "aborted"
            assert one.output_tokens <= row["output_tokens"] <= one.output_tokens + one_write
    for slug, tenant in stack.tenant_ids.items():
        completed = [one for one in load.received if one.tenant == slug and one.is_complete]
        booked = [rows[one.request] for one in completed if one.request is not None]
        assert sum(row["output_tokens"] for row in booked) == sum(one.output_tokens for one in completed)
        assert sum(row["prompt_tokens"] for row in booked) == sum(one.prompt_tokens for one in completed)
        cut_streams = [r for r in rows.values() if r["tenant"] == tenant and r["outcome"] == "aborted"]
        received = sum(one.output_tokens for one in load.received if one.tenant == slug and not one.is_complete)
        assert received <= sum(row["output_tokens"] for row in cut_streams)


def unmatched(load: Load, rows: dict[str, dict[str, Any]], before: set[str]) -> list[dict[str, Any]]:
    """Rows of this load whose client saw no head of an answer."""
    seen = {one.request for one in load.received}
    return [row for request, row in rows.items() if request not in seen and request not in before]


async def known_requests(stack: Stack) -> set[str]:
    rows = await asyncio.to_thread(usage_rows, stack.postgres.recorded_url())
    return {row["request"] for row in rows}


async def test_a_router_killed_under_load_leaves_exact_books(stack: Stack) -> None:
    before = await known_requests(stack)
    load = Load(stack, seed=1)
    async with load.running():
        await load.wait_for(lambda: load.completed() >= 20 and load.streaming() >= 8)
        await asyncio.to_thread(stack.kill_router)
        stack.start_router()
        await asyncio.to_thread(stack.wait_router)
        n_completed = load.completed()
        await load.wait_for(lambda: load.completed() >= n_completed + 20)
    rows = await settled_rows(stack, load)
    check_books(stack, load, rows)
    cut = [one for one in load.received if one.status == 200 and not one.is_complete]
    assert len(cut) >= 8
    # Clients cut before their first byte: a stream has one unseen write at most; a whole answer counts as it comes.
    one_write = max(one.largest_read for one in load.received)
    for row in unmatched(load, rows, before):
        assert row["outcome"] == "aborted"
        assert row["output_tokens"] <= one_write or row["dialect"] == "generate"


async def test_an_outage_of_postgresql_under_load_loses_and_doubles_nothing(stack: Stack) -> None:
    before = await known_requests(stack)
    load = Load(stack, seed=2)
    async with load.running():
        await load.wait_for(lambda: load.completed() >= 10)
        await asyncio.to_thread(stack.postgres.stop)
        n_completed = load.completed()
        await asyncio.sleep(OUTAGE_S)
        assert load.completed() > n_completed + 50, "the router serves on meanwhile"
        stack.postgres.start()
        n_completed = load.completed()
        await load.wait_for(lambda: load.completed() >= n_completed + 20)
    assert all(one.is_complete for one in load.received)
    rows = await settled_rows(stack, load)
    check_books(stack, load, rows)
    assert unmatched(load, rows, before) == []
    totals = dict.fromkeys(stack.tenant_ids.values(), 0)
    for request, row in rows.items():
        if request not in before:
            totals[row["tenant"]] += row["output_tokens"]
    received: Counter[str] = Counter()
    for one in load.received:
        received[stack.tenant_ids[one.tenant]] += one.output_tokens
    assert totals == received


async def test_a_router_killed_during_an_outage_serves_on_and_keeps_its_books(stack: Stack) -> None:
    """It starts again from its saved configuration; what it booked before waits in its spool."""
    load = Load(stack, seed=3)
    async with load.running():
        await load.wait_for(lambda: load.completed() >= 10)
        await asyncio.to_thread(stack.postgres.stop)
        n_completed = load.completed()
        await load.wait_for(lambda: load.completed() >= n_completed + 20 and load.streaming() >= 8)
        await asyncio.to_thread(stack.kill_router)
        stack.start_router()
        await asyncio.to_thread(stack.wait_router)
        n_completed = load.completed()
        await load.wait_for(lambda: load.completed() >= n_completed + 20)
        stack.postgres.start()
    rows = await settled_rows(stack, load)
    check_books(stack, load, rows)
