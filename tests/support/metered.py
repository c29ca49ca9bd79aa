"""Clients of a running stack that keep what they received, and the comparison of it with rows and reports.

Requests that ended: exact. Streams cut by a killed router: never below what the client got, at most one write above.
Streams their client left: not below what it got, not above what it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from support.stack import Stack, usage_rows

SETTLE_LIMIT_S = 60.0


@dataclass(slots=True)
class Received:
    """What one client got of one request. ``request`` is None if not even the head of an answer came.

    ``has_failed``: an error came instead of the end. ``has_left``: the client closed the connection in mid-stream.
    ``largest_read``: most tokens that came in one piece, hence an upper bound of what one write carries.
    """

    tenant: str
    is_stream: bool
    asked_tokens: int
    request: str | None = None
    status: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    is_complete: bool = False
    has_failed: bool = False
    has_left: bool = False
    largest_read: int = 1


class Load:
    """Clients of both tenants, streaming and not, until stopped; keeps what each of them received."""

    def __init__(self, stack: Stack, seed: int, *, n_clients: int = 12, share_leaving: float = 0.0) -> None:
        """``n_clients``: of each tenant, with one request at a time each. ``share_leaving``: of the streams."""
        self.stack = stack
        self.received: list[Received] = []
        self.rng = random.Random(seed)
        self.is_stopping = False
        self.n_clients = n_clients
        self.share_leaving = share_leaving
        self.changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load during the block; afterwards every request has come to its end."""
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as tasks:
            for tenant in self.stack.keys:
                for number in range(self.n_clients):
                    tasks.create_task(self._client(session, tenant, is_stream=number % 4 != 0))
            try:
                yield
            finally:
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
            one = Received(tenant=tenant, is_stream=is_stream, asked_tokens=self.rng.randint(5, 120))
            self.received.append(one)
            leaves_at = self.rng.randint(1, 60) if self.rng.random() < self.share_leaving else None
            words = " ".join(
                self.rng.choice(("river", "stone", "cloud", "paper")) for _ in range(self.rng.randint(3, 40))
            )
            body = {"inputs": words, "parameters": {"max_new_tokens": one.asked_tokens, "details": True}}
            headers = {"Authorization": f"Bearer {self.stack.keys[tenant]}"}
            path = "/generate_stream" if is_stream else "/generate"
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(self.stack.url + path, json=body, headers=headers) as response:
                    one.status = response.status
                    one.request = response.headers["x-request-id"]
                    if response.status != 200:  # no backend yet, or one that failed before its first token
                        assert response.status in (429, 502, 503), await response.text()
                        await asyncio.sleep(0.1)
                    elif is_stream:
                        await self._read_stream(response, one, leaves_at)
                    else:
                        await self._read_whole(response, one)
            async with self.changed:
                self.changed.notify_all()

    async def _read_whole(self, response: aiohttp.ClientResponse, one: Received) -> None:
        answer = await response.json()
        one.output_tokens = answer["details"]["generated_tokens"]
        one.prompt_tokens = int(response.headers["x-prompt-tokens"])
        one.is_complete = True

    async def _read_stream(self, response: aiohttp.ClientResponse, one: Received, leaves_at: int | None) -> None:
        rest = b""
        async for piece in response.content.iter_any():
            *events, rest = (rest + piece).split(b"\n\n")
            before = one.output_tokens
            for event in events:
                self._read_event(json.loads(event.removeprefix(b"data:")), one)
            one.largest_read = max(one.largest_read, one.output_tokens - before)
            async with self.changed:
                self.changed.notify_all()
            if leaves_at is not None and one.output_tokens >= leaves_at and not one.is_complete:
                one.has_left = True
                response.close()
                return

    def _read_event(self, event: dict[str, Any], one: Received) -> None:
        if "error" in event:
            one.has_failed = True
            return
        one.output_tokens += 1
        if event["details"] is not None:
            assert event["details"]["generated_tokens"] == one.output_tokens
            one.prompt_tokens = event["details"]["input_length"]
            one.is_complete = True


Rows = dict[str, dict[str, Any]]
Report = dict[str, Counter[str]]


async def known_requests(stack: Stack) -> set[str]:
    """Requests that are in the books already."""
    rows = await asyncio.to_thread(usage_rows, stack.postgres.recorded_url())
    return {row["request"] for row in rows}


async def settled_rows(stack: Stack, load: Load, before: set[str]) -> Rows:
    """Rows of this load by request id, once everything the router booked has arrived.

    The router delivers oldest first, so with the request that ended last everything before it is there; then it waits
    until the spool is empty.
    """
    wanted = {one.request for one in load.received if one.request is not None and one.status == 200}
    deadline = time.monotonic() + SETTLE_LIMIT_S
    n_rows = -1
    while True:
        rows = await asyncio.to_thread(usage_rows, stack.postgres.recorded_url())
        missing = wanted - {row["request"] for row in rows}
        if not missing and len(rows) == n_rows:
            break
        n_rows = len(rows)
        assert time.monotonic() < deadline, f"{len(missing)} of {len(wanted)} requests are not in the books: {missing}"
        await asyncio.sleep(0.3)
    counts = Counter(row["request"] for row in rows)
    assert set(counts.values()) == {1}, "one row per request"
    return {row["request"]: row for row in rows if row["request"] not in before}


def check_rows(stack: Stack, load: Load, rows: Rows) -> None:
    """Every request against its row, and rows whose client saw no head of an answer."""
    one_write = max(one.largest_read for one in load.received)
    for one in load.received:
        row = rows.get(one.request or "")
        if one.status != 200:
            # A refusal counts nothing; a request that a backend took and failed has a row, and nothing was handed on.
            assert row is None or (row["outcome"] == "failed" and (row["output_tokens"] == 0 or not one.is_stream))
            continue
        assert row is not None
        assert row["tenant"] == stack.tenant_ids[one.tenant]
        if one.is_complete:
            assert row["outcome"] == "completed"
            assert (row["output_tokens"], row["prompt_tokens"]) == (one.output_tokens, one.prompt_tokens)
        elif one.has_failed:
            assert (row["outcome"], row["output_tokens"]) == ("failed", one.output_tokens)
        elif one.has_left:
            assert row["outcome"] in ("cancelled", "completed", "aborted")
            assert one.output_tokens <= row["output_tokens"] <= one.asked_tokens
        else:
            assert row["outcome"] == "aborted"
            assert one.output_tokens <= row["output_tokens"] <= one.output_tokens + one_write
    # Clients cut before their first byte: a stream has one unseen write at most; a whole answer counts as it comes.
    for row in unmatched(load, rows):
        assert row["outcome"] == "aborted"
        assert row["output_tokens"] <= one_write or row["dialect"] == "generate"


def unmatched(load: Load, rows: Rows) -> list[dict[str, Any]]:
    """Rows of this load whose client saw no head of an answer."""
    seen = {one.request for one in load.received}
    return [row for request, row in rows.items() if request not in seen]


def check_report(stack: Stack, load: Load, rows: Rows, before: Report, after: Report) -> None:
    """What the report says of this load, by tenant, against what the clients counted: 0 lost, 0 doubled."""
    one_write = max(one.largest_read for one in load.received)
    for slug, tenant in stack.tenant_ids.items():
        told = Counter(after.get(tenant, Counter()))
        told.subtract(before.get(tenant, Counter()))
        mine = [one for one in load.received if one.tenant == slug]
        served = [one for one in mine if one.status == 200]
        strangers = [row for row in unmatched(load, rows) if row["tenant"] == tenant]
        failed_before = [rows[one.request or ""] for one in mine if one.status != 200 and (one.request or "") in rows]
        assert told["requests"] == len(served) + len(strangers) + len(failed_before)
        unseen = sum(row["output_tokens"] for row in (*strangers, *failed_before))
        least = most = unseen
        for one in served:
            least += one.output_tokens
            if one.is_complete or one.has_failed:
                most += one.output_tokens
            else:
                most += one.asked_tokens if one.has_left else one.output_tokens + one_write
        assert least <= told["output_tokens"] <= most
        exact = sum(one.prompt_tokens for one in served if one.is_complete)
        others = sum(rows[one.request or ""]["prompt_tokens"] for one in served if not one.is_complete)
        others += sum(row["prompt_tokens"] for row in (*strangers, *failed_before))
        assert told["prompt_tokens"] == exact + others
