"""What an operator stops by REST is stopped on a real router, through the real control plane, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from support.modelserver import model_server
from support.stack import KV_TOKENS, MODEL, Stack, running_stack

LIMIT_S = 30.0
"""Of a busy machine; routers have a brake in force within two seconds."""
FLAGS = ("--sim-step-ms", "20", "--sim-mean-tokens", "0", "--max-total-tokens", "4096")
"""Answers never end by themselves."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), *FLAGS) as running:
        yield running


class Stream:
    """A generation whose tokens are read as they come."""

    def __init__(self) -> None:
        self.status = 0
        self.request = ""
        self.text = ""
        self.tokens = 0
        self.is_over = False
        self.changed = asyncio.Condition()

    async def until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(LIMIT_S), self.changed:
                await self.changed.wait_for(condition)
        except TimeoutError:
            raise AssertionError(f"{self.tokens} tokens, status {self.status}: {self.text[-1_000:]}") from None

    async def further_tokens(self) -> None:
        seen = self.tokens
        await self.until(lambda: self.tokens > seen + 5)

    async def end(self) -> str:
        await self.until(lambda: self.is_over)
        return self.text

    async def read(self, response: aiohttp.ClientResponse) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            async with response:
                async for piece in response.content.iter_any():
                    async with self.changed:
                        self.text += piece.decode(errors="replace")
                        self.tokens = self.text.count('"token":')
                        self.changed.notify_all()
        async with self.changed:
            self.is_over = True
            self.changed.notify_all()


class Operator:
    """REST of the control plane and clients of the router, in one task group."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        self.stack, self.session, self.tasks = stack, session, tasks
        self.readers: list[asyncio.Task[None]] = []
        held = json.loads((stack.settings.directory / "credentials.json").read_text())
        self.headers = {"Authorization": f"Bearer {held['operator_token']}"}

    async def rest(self, method: str, path: str, body: Any = None) -> Any:
        url = f"{self.stack.settings.console_url}/api/v1{path}"
        async with self.session.request(method, url, json=body, headers=self.headers) as response:
            answer = await response.json()
            assert response.status in (200, 201), answer
            return answer

    async def ask(self, tenant: str, **parameters: Any) -> Stream:
        """Send a request; its stream once it has a status."""
        stream = Stream()
        body = {"inputs": "a b c", "parameters": {"max_new_tokens": 2_000, **parameters}}
        headers = {"Authorization": f"Bearer {self.stack.keys[tenant]}"}
        response = await self.session.post(f"{self.stack.url}/generate_stream", json=body, headers=headers)
        stream.status, stream.request = response.status, response.headers["x-request-id"]
        self.readers.append(self.tasks.create_task(stream.read(response)))
        return stream

    async def status(self, tenant: str, **parameters: Any) -> int:
        """Status of a request of a few tokens."""
        stream = await self.ask(tenant, **{"max_new_tokens": 3, **parameters})
        await stream.end()
        return stream.status

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait for what other processes do; every look is a request of its own."""
        async with asyncio.timeout(LIMIT_S):
            while not await condition():  # noqa: ASYNC110 - what is waited for happens in other processes
                await asyncio.sleep(0.05)

    async def pool(self) -> dict[str, Any]:
        (pool,) = (await self.rest("GET", "/pools"))["results"]
        assert isinstance(pool, dict)
        return pool


@pytest.fixture
async def operator(stack: Stack) -> AsyncIterator[Operator]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        made = Operator(stack, session, tasks)
        yield made
        for reader in made.readers:
            reader.cancel()


async def test_one_request_is_cancelled_and_the_other_runs_on(operator: Operator) -> None:
    one, other = await operator.ask("chatbot"), await operator.ask("chatbot")
    await one.further_tokens()
    await operator.rest("POST", f"/requests/{one.request}/cancel", {"reason": "it never ends"})
    assert "The operator has cancelled this request." in await one.end()
    await other.further_tokens()
    assert not other.is_over


async def test_a_stopped_tenant_ends_and_goes_on_when_it_is_let(operator: Operator) -> None:
    tenant = operator.stack.tenant_ids["batch"]
    stopped, other = await operator.ask("batch"), await operator.ask("chatbot")
    await stopped.further_tokens()
    await operator.rest("POST", f"/tenants/{tenant}/stop", {"reason": "its loop"})
    assert "stopped all requests of this tenant" in await stopped.end()
    assert await operator.status("batch") == 403
    await other.further_tokens()
    await operator.rest("POST", f"/tenants/{tenant}/resume", {})

    async def is_served() -> bool:
        return await operator.status("batch") == 200

    await operator.until(is_served)


async def test_the_grammars_of_a_pool_are_stopped_and_allowed(operator: Operator) -> None:
    pool = await operator.pool()
    digits = {"type": "regex", "value": "[0-9]{400}"}
    assert await operator.status("chatbot", grammar=digits) == 422, "too expensive for the vocabulary of a large model"
    await operator.rest("PATCH", f"/pools/{pool['id']}", {"vocabulary": 10_000})

    async def is_served() -> bool:
        return await operator.status("chatbot", grammar=digits) == 200

    await operator.until(is_served)
    formed, plain = await operator.ask("chatbot", grammar=digits), await operator.ask("chatbot")
    assert formed.status == 200, await formed.end()
    await formed.further_tokens()
    await operator.rest("POST", f"/pools/{pool['id']}/stop-grammars", {"reason": "they kill it"})
    assert "The operator has stopped grammars" in await formed.end()
    assert await operator.status("chatbot", grammar=digits) >= 400
    assert await operator.status("chatbot") == 200
    await plain.further_tokens()
    await operator.rest("POST", f"/pools/{pool['id']}/allow-grammars", {})

    await operator.until(is_served)


async def test_a_backend_is_drained_and_its_streams_go_on_elsewhere(operator: Operator) -> None:
    pool = await operator.pool()
    with model_server("--max-batch-total-tokens", str(KV_TOKENS), *FLAGS) as further:
        stated = {"pool": MODEL, "name": "further", "url": further.base, "kv_tokens": KV_TOKENS, "block_size": 16}
        await operator.rest("POST", "/backends", stated)
        ids = [b["id"] for b in (await operator.rest("GET", "/backends"))["results"] if b["pool"] == pool["id"]]

        async def running() -> dict[str, Any]:
            return {each: await operator.rest("GET", f"/backends/{each}/running") for each in ids}

        async def both_are_up() -> bool:
            return all(
                r["state"] == "up" for each in (await running()).values() for r in each["routers"] or [{"state": ""}]
            )

        await operator.until(both_are_up)
        streams = [await operator.ask("chatbot") for _ in range(4)]
        for stream in streams:
            await stream.further_tokens()

        async def both_are_busy() -> bool:
            return all(each["running"] for each in (await running()).values())

        await operator.until(both_are_busy)
        (drained, other) = ids
        await operator.rest("POST", f"/backends/{drained}/drain", {"reason": "new disks"})

        async def is_drained() -> bool:
            told = await running()
            assert told[drained]["is_drained"]
            return told[drained]["is_empty"] is True and told[other]["running"] == len(streams)

        await operator.until(is_drained)
        for stream in streams:
            await stream.further_tokens()
            assert not stream.is_over
        await operator.rest("POST", f"/backends/{drained}/uncordon", {})
        await operator.until(both_are_up)
