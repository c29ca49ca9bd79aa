"""``fairlane demo predictor``: traffic whose lengths can be learnt, and a model that learns them, on the running stack.

A second model server, whose answers are about as long as the prompts ask for, serves a pool of its own; three tenants
with different habits ask it through the router with keys of their own. Then *Retrain* is pressed by REST, its progress
followed, and some more is asked so that the page shows what the new model told. At the end, however it comes, the model
server and the keys go; the pool, its tenants and what was learnt stay to be looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from router_ext.errors import FairlaneError, SettingsError
from router_ext.ops import process
from router_ext.ops.credentials import Credentials, read_credentials
from router_ext.ops.embedded import free_port
from router_ext.ops.rest import Rest
from router_ext.ops.stoppable import run_stoppable

POOL = "demo-lengths"
MAX_TOKENS = 1_000
AT_ONCE = 24
"""Requests in flight: enough to keep the scheduler busy, few enough to leave the machine usable."""
FIRST = 400
SPARE = 100
AFTER = 300
"""Requests before anything is predicted, those beyond the samples that training needs, and after the promotion."""
BOOKED_LIMIT_S = 60.0
JOB_LIMIT_S = 900.0
ACTIVE = ("queued", "running")
_STEP_MS = "4"

_TOPICS = (
    "river market engine window signal garden letter harbor copper planet winter bridge ticket valley record factory "
    "border doctor silver pattern island museum forest camera summer village library meeting kitchen network machine "
    "morning station history traffic science mountain orchestra volcano lantern compass bakery glacier tunnel"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """A tenant: how it asks, and for how many words at least and at most."""

    slug: str
    name: str
    shortest: int
    longest: int
    asks: tuple[str, ...]


HABITS = (
    Habit(
        slug="demo-notes",
        name="Demo: notes",
        shortest=4,
        longest=24,
        asks=(
            "In {n} words: what is {topic}?",
            "A title of {n} words for a note on {topic}.",
            "Tag {topic}, {n} words.",
        ),
    ),
    Habit(
        slug="demo-support",
        name="Demo: support",
        shortest=15,
        longest=80,
        asks=(
            "A customer asks about {topic}. Reply in {n} words.",
            "Explain {topic} to a beginner in about {n} words.",
            "Summarise what went wrong with {topic} in {n} words, friendly.",
        ),
    ),
    Habit(
        slug="demo-writers",
        name="Demo: writers",
        shortest=40,
        longest=250,
        asks=(
            "Write {n} words about {topic}.",
            "Write a story of {n} words in which {topic} matter. Step by step, with a surprise.",
            "An essay on {topic}, {n} words, with an example.",
        ),
    ),
)


class DemoFailed(FairlaneError):
    """Something on the way did not happen; the message says what, and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, help="before training (default: the samples it needs, and some)")
    parser.add_argument("--seed", type=int, default=1, help="seed of prompts")
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("FAIRLANE_DIR", ".fairlane")), help="state")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")


def prompts(seed: int) -> Iterator[tuple[str, str]]:
    """Slug of a tenant and what it asks, for ever."""
    draw = random.Random(seed)
    while True:
        habit = draw.choice(HABITS)
        topic = " and ".join(draw.sample(_TOPICS, 4))
        # Spread evenly over orders of magnitude, as lengths are in the field.
        n = round(habit.shortest * (habit.longest / habit.shortest) ** draw.random())
        yield habit.slug, draw.choice(habit.asks).format(n=n, topic=topic)


class Demo:
    """One run. Everything it makes that must not stay is undone by ``undoing``."""

    def __init__(self, args: argparse.Namespace, session: aiohttp.ClientSession, console: Console) -> None:
        self._args, self._session, self._console = args, session, console
        self._credentials: Credentials = read_credentials(args.dir / "credentials.json")
        self._rest = Rest(self._credentials.console_url, self._credentials.operator_token, session)
        self._keys: dict[str, str] = {}
        self._prompts = prompts(args.seed)
        self._pool = ""

    @property
    def page(self) -> str:
        return f"{self._credentials.console_url}/predictor/?pool={self._pool}"

    async def play(self) -> dict[str, Any]:
        """The whole of it; returns what is printed."""
        async with contextlib.AsyncExitStack() as undo:
            pool = await self._rest.pool(POOL) or await self._rest.call("POST", "/pools", {"name": POOL})
            self._pool = str(pool["id"])
            await undo.enter_async_context(self._model_server())
            for habit in HABITS:
                await undo.enter_async_context(self._tenant(habit))
            await self._rest.applied()
            samples = (await self._rest.call("GET", "/predictor/samples"))["pools"]
            needed = max((int(each["needed"]) for each in samples), default=2_000)
            asked = self._args.requests or needed + SPARE
            before = await self._booked()
            # Until there are empirical quantiles nothing is predicted at all, and the model would beat nobody.
            await self._ask(FIRST, "asking first")
            await self._until_booked(before + FIRST)
            await self._job(undo, {"kind": "baseline"}, "quantiles")
            await self._rest.applied()
            await self._ask(asked, "asking")
            await self._until_booked(before + FIRST + asked)
            job = await self._job(undo, {"kind": "mixture", "pools": [self._pool]}, "training")
            verdict = next((e for e in job["evaluations"] if e["pool"] == self._pool), None)
            is_promoted = verdict is not None and verdict["is_passed"]
            if is_promoted:
                took = await self._until_served(str(job["artifact"]["digest"]))
                self._console.print(f"routers run it after {took:.1f} s")
                await self._ask(AFTER, "asking again")
                await self._until_booked(before + FIRST + asked + AFTER)
        return {
            "job": job["id"],
            "artifact": (job["artifact"] or {}).get("digest"),
            "is_promoted": is_promoted,
            "verdict": verdict["reason"] if verdict is not None else "no answer of the pool was held out",
            "contenders": verdict["contenders"] if verdict is not None else {},
            "page": self.page,
        }

    @contextlib.asynccontextmanager
    async def _model_server(self) -> AsyncIterator[None]:
        """A model server with a backend row in the demo's pool; both go afterwards."""
        port = free_port()
        command = [
            *(sys.executable, "-m", "router_ext.cli", "devserver", "--engine", "model", "--model-id", POOL),
            *("--sim-tokenizer", "toy", "--sim-lengths", "asked", "--sim-step-ms", _STEP_MS, "--port", str(port)),
            *("--max-total-tokens", "4096", "--max-batch-total-tokens", "65536"),
        ]
        log = self._args.dir / "logs" / "demo-lengths.log"
        server = process.spawn(command, log=log)
        try:
            url = f"http://127.0.0.1:{port}"
            await self._until_healthy(url, server.poll, log)
            body = {"pool": self._pool, "name": f"demo-{secrets.token_hex(3)}", "url": url, "kv_tokens": 65_536}
            backend = await self._rest.call("POST", "/backends", {**body, "block_size": 16})
            try:
                yield
            finally:
                await asyncio.shield(self._rest.call("DELETE", f"/backends/{backend['id']}"))
        finally:
            await asyncio.to_thread(process.stop, server)

    async def _until_healthy(self, url: str, ended: Any, log: Path) -> None:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            if ended() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"the demo's model server did not start:\n{process.tail(log)}")
            await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def _tenant(self, habit: Habit) -> AsyncIterator[None]:
        """The tenant, found or made, with a key that is revoked afterwards."""
        known = (await self._rest.call("GET", "/tenants?limit=1000"))["results"]
        tenant = next((each for each in known if each["slug"] == habit.slug), None)
        if tenant is None:
            tier = (await self._rest.call("GET", "/tiers"))["results"][0]["name"]
            body = {"name": habit.name, "slug": habit.slug, "tiers": [tier], "default_tier": tier}
            tenant = await self._rest.call("POST", "/tenants", body)
        key = await self._rest.call(
            "POST", "/keys", {"name": "demo predictor", "tenant": tenant["id"], "default_pool": self._pool}
        )
        self._keys[habit.slug] = str(key["key"])
        try:
            yield
        finally:
            await asyncio.shield(self._rest.call("POST", f"/keys/{key['id']}/revoke"))

    async def _ask(self, n: int, what: str) -> None:
        """Send so many requests, ``AT_ONCE`` at a time.

        Raises:
            DemoFailed: one in twenty or more was refused.
        """
        faults: list[str] = []
        todo = itertools.islice(self._prompts, n)
        columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task(what, total=n)

            async def one_after_another() -> None:
                for slug, prompt in todo:
                    fault = await self._send(slug, prompt)
                    if fault is not None:
                        faults.append(fault)
                        if len(faults) > n // 20:
                            raise DemoFailed(f"{len(faults)} of {n} requests failed, the last with: {fault}")
                    progress.advance(bar)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(AT_ONCE):
                        group.create_task(one_after_another())
            except* DemoFailed as failed:
                raise failed.exceptions[0] from None
        if faults:
            self._console.print(f"{len(faults)} requests failed: {faults[-1]}")

    async def _send(self, slug: str, prompt: str) -> str | None:
        """One request; what was wrong with it, None if nothing."""
        body = {"model": POOL, "messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS}
        headers = {"Authorization": f"Bearer {self._keys[slug]}"}
        url = f"{self._credentials.router_url}/v1/chat/completions"
        # The first one may come before the router has heard of the server or the key.
        for attempt in range(20):
            try:
                async with self._session.post(url, json=body, headers=headers) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        return None
                    fault = f"{answer.status} {text[:200]}"
                    if answer.status not in (429, 503):
                        return fault
            except aiohttp.ClientError as error:
                fault = f"{type(error).__name__}: {error}"
            await asyncio.sleep(0.25 * min(4, 1 + attempt))
        return fault

    async def _booked(self) -> int:
        """Requests of the demo's tenants in the books."""
        report = await self._rest.call("GET", "/usage/report")
        names = {habit.name for habit in HABITS}
        return sum(int(row["requests"]) for row in report["rows"] if row["tenant_name"] in names)

    async def _until_booked(self, n: int) -> None:
        """Routers send usage in batches, within seconds. What failed is not booked, so a few may be missing."""
        deadline = time.monotonic() + BOOKED_LIMIT_S
        seen, seen_at = -1, time.monotonic()
        while True:
            booked = await self._booked()
            if booked != seen:
                seen, seen_at = booked, time.monotonic()
            if booked >= n or (booked > 0 and time.monotonic() - seen_at > 10):
                return
            if time.monotonic() > deadline:
                raise DemoFailed(f"only {booked:,} of {n:,} requests were booked within {BOOKED_LIMIT_S:g} s")
            await asyncio.sleep(0.5)

    async def _job(self, undo: contextlib.AsyncExitStack, body: dict[str, Any], what: str) -> dict[str, Any]:
        """Start a job and follow it to its end; whoever leaves earlier cancels it. One that runs already will do.

        Raises:
            DemoFailed: it failed or was cancelled.
        """
        jobs = (await self._rest.call("GET", "/training-jobs?limit=20"))["results"]
        running = [each for each in jobs if each["kind"] == body["kind"] and each["state"] in ACTIVE]
        job = running[0] if running else await self._rest.call("POST", "/training-jobs", body)
        address = f"/training-jobs/{job['id']}"

        async def cancel() -> None:
            if job["state"] in ACTIVE and not running:
                await asyncio.shield(self._rest.call("POST", f"{address}/cancel"))
                self._console.print(f"job {job['id']} cancelled")

        undo.push_async_callback(cancel)
        deadline = time.monotonic() + JOB_LIMIT_S
        columns = (TextColumn("{task.description:>14}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task(what, total=1.0)
            said = ""
            while True:
                job = await self._rest.call("GET", address)
                log = str(job["log"])
                for line in (log[len(said) :] if log.startswith(said) else log).splitlines():
                    progress.console.print(f"[dim]{line}[/]", soft_wrap=True, highlight=False)
                said = log
                progress.update(bar, completed=float(job["progress"]))
                if job["state"] not in ACTIVE:
                    break
                if time.monotonic() > deadline:
                    raise DemoFailed(f"job {job['id']} did not end within {JOB_LIMIT_S:g} s")
                await asyncio.sleep(1.0)
        if job["state"] != "succeeded":
            raise DemoFailed(f"job {job['id']} {job['state']}: {job['error'] or 'by somebody else'}")
        return job

    async def _until_served(self, digest: str) -> float:
        """Seconds until every live router says that it runs this model."""
        begun = time.monotonic()
        while True:
            routers = (await self._rest.call("GET", "/predictor/routers"))["routers"]
            mine = [each for each in routers if each["pool"] == self._pool]
            if mine and all(each["length_model"] == digest for each in mine):
                return time.monotonic() - begun
            if time.monotonic() - begun > 30:
                raise DemoFailed(f"no router runs {digest[:12]} after 30 s: {mine}")
            await asyncio.sleep(0.1)


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True)

    async def play() -> dict[str, Any]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            return await Demo(args, session, console).play()

    try:
        result = run_stoppable(play, console, "stopping; what must not stay is removed first")
    except asyncio.CancelledError:
        return 130
    except aiohttp.ClientError as problem:
        raise SettingsError(f"the stack does not answer: {problem}") from None
    if args.json:
        print(json.dumps(result))
        return 0
    print("promoted" if result["is_promoted"] else "not promoted", "-", result["verdict"])
    for name, figures in result["contenders"].items():
        print(
            f"  {name:<13} pinball {figures['pinball']:.3f}  rank {figures['rank']:5.2f}  MAE {figures['mae']:6.1f}  "
            f"median error {figures['median_relative_error']:.2f}  in the 90% interval {figures['coverage_90']:.0%}"
        )
    print(f"page (figures are counted once a minute): {result['page']}")
    return 0
