"""The load of one phase: plain streams, plain whole answers, and odd requests at their own pace, all open loop."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from router_ext.devserver.constraint import Effect
from router_ext.ops.hazards.arena import Arena
from router_ext.ops.hazards.odd import Odd

STREAMS_PER_ANSWER = 3.0
"""Streams sent for each whole answer asked for."""

ENDING_S = 90.0
"""How long after the last arrival plain requests may take, before they count as failed."""

_WORDS = "river market engine window signal garden letter harbor copper planet winter bridge ticket valley".split()
_PROMPTS = 64


@dataclass(slots=True)
class Plain:
    """A request of one of the others. ``problem``: why its answer is not complete; None if it is."""

    tenant: str
    prompt: int
    max_new_tokens: int
    sent_s: float = 0.0
    first_token_s: float | None = None
    text: str = ""
    problem: str | None = "no answer"


@dataclass(slots=True)
class Sent:
    """An odd request. ``status``: 0 while it has no answer. ``hits``: dispatches that had a bad end."""

    odd: Odd
    request: str
    status: int = 0
    code: str = ""
    dispatches: int = 0

    @property
    def hits(self) -> int:
        """Backends it was given to that felled, stalled beyond patience, or failed a batch."""
        if self.odd.effect is None:
            return 0
        return self.dispatches - (self.status == 200)


@dataclass(slots=True)
class Traffic:
    """Everything sent in a phase."""

    plain: list[Plain] = field(default_factory=list)
    odd: list[Sent] = field(default_factory=list)


class Load:
    """One phase's load on one arena."""

    def __init__(self, arena: Arena, *, seconds: float, rate: float, seed: int) -> None:
        self.traffic = Traffic()
        self._arena = arena
        self._seconds = seconds
        self._rate = rate
        self._random = random.Random(seed)
        self._odd_tasks: set[asyncio.Task[None]] = set()

    async def run(self, odd: list[Odd]) -> None:
        """Send all of it and wait for the answers; odd requests that have none at the end are given up."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._plain("streams", self._rate))
                tasks.create_task(self._plain("answers", self._rate / STREAMS_PER_ANSWER))
                if odd:
                    tasks.create_task(self._hostile(odd))
            if self._odd_tasks:
                await asyncio.wait(self._odd_tasks, timeout=1.0)
            for sent in self.traffic.odd:
                if not sent.dispatches:
                    await self._count(sent)
        finally:
            for task in self._odd_tasks:
                task.cancel()
            await asyncio.gather(*self._odd_tasks, return_exceptions=True)

    # --- the others -------------------------------------------------------------------------------------------------

    async def _plain(self, tenant: str, rate: float) -> None:
        running: set[asyncio.Task[None]] = set()
        start = time.monotonic()
        at_s = self._random.expovariate(rate)
        while at_s < self._seconds:
            await asyncio.sleep(max(0.0, start + at_s - time.monotonic()))
            number = self._random.randrange(_PROMPTS)
            plain = Plain(tenant, number, 16 + number)
            self.traffic.plain.append(plain)
            task = asyncio.create_task(self._ask(plain))
            running.add(task)
            task.add_done_callback(running.discard)
            at_s += self._random.expovariate(rate)
        if running:
            _, late = await asyncio.wait(set(running), timeout=ENDING_S)
            for task in late:
                task.cancel()

    async def _ask(self, plain: Plain) -> None:
        is_stream = plain.tenant == "streams"
        body = {
            "inputs": prompt_text(plain.prompt),
            "parameters": {"max_new_tokens": plain.max_new_tokens, "details": True},
        }
        path = "/generate_stream" if is_stream else "/generate"
        headers = {"authorization": f"Bearer {self._arena.keys[plain.tenant]}"}
        plain.sent_s = time.monotonic()
        try:
            async with self._arena.session.post(f"{self._arena.url}{path}", json=body, headers=headers) as answer:
                if answer.status != 200:
                    plain.problem = f"{answer.status}: {(await answer.text())[:300]}"
                elif is_stream:
                    await self._read_stream(plain, answer)
                else:
                    whole = await answer.json()
                    self._complete(plain, whole["generated_text"], whole["details"])
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
            plain.problem = f"{type(error).__name__}: {error}"

    async def _read_stream(self, plain: Plain, answer: aiohttp.ClientResponse) -> None:
        plain.problem = "the stream ended without its last event"
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            if plain.first_token_s is None:
                plain.first_token_s = time.monotonic()
            event = json.loads(line[5:])
            if "error" in event:
                plain.problem = f"in the stream: {event['error']}"
                return
            if event["generated_text"] is not None:
                self._complete(plain, event["generated_text"], event["details"])

    @staticmethod
    def _complete(plain: Plain, text: str, details: dict[str, Any]) -> None:
        plain.text = text
        tokens, wanted = details["generated_tokens"], plain.max_new_tokens
        plain.problem = None if tokens == wanted else f"{tokens} tokens instead of {wanted}"

    # --- the hostile tenant -----------------------------------------------------------------------------------------

    async def _hostile(self, odd: list[Odd]) -> None:
        """One a second, whatever becomes of those before; from the second round on each under a new digest."""
        start = time.monotonic()
        for number in range(int(self._seconds)):
            await asyncio.sleep(max(0.0, start + number - time.monotonic()))
            sent = Sent(odd[number % len(odd)], f"odd-{number}")
            self.traffic.odd.append(sent)
            self._spawn(self._send(sent, number // len(odd)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._odd_tasks.add(task)

    async def _send(self, sent: Sent, variation: int) -> None:
        headers = {"authorization": f"Bearer {self._arena.keys['hostile']}", "x-request-id": sent.request}
        url = f"{self._arena.url}{sent.odd.path}"
        try:
            async with self._arena.session.post(url, json=sent.odd.varied(variation), headers=headers) as answer:
                body = await answer.read()
                sent.status = answer.status
                sent.code = error_code(body)
                if sent.code and sent.status == 200:
                    sent.status = 599  # an error inside the stream
        except aiohttp.ClientError as error:
            sent.code = type(error).__name__
        await self._count(sent)

    async def _count(self, sent: Sent) -> None:
        steps = await self._arena.timeline(sent.request)
        sent.dispatches = sum(step["step"] == "dispatched" for step in steps)


def harmful(sent: list[Sent]) -> Iterator[Sent]:
    """Those that reached a backend they can harm."""
    return (each for each in sent if each.odd.effect in (Effect.DIE, Effect.FREEZE, Effect.STALL, Effect.FAIL))


def prompt_text(number: int) -> str:
    """A prompt of some thirty tokens, always the same for a number."""
    words = random.Random(number)
    return f"Tell me about {' '.join(words.choice(_WORDS) for _ in range(28))}."


def error_code(body: bytes) -> str:
    """What an answer calls its error, in either dialect and inside a stream; empty if it has none."""
    for line in body.splitlines():
        try:
            event = json.loads(line.removeprefix(b"data:"))
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("error"):
            error = event["error"]
            return str(error.get("code") or error.get("type") if isinstance(error, dict) else event.get("error_type"))
    return ""
