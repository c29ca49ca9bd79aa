"""``fairlane demo incident``: a flood of long batch prompts beside a chatbot, under one policy after another.

Against the running stack and through its own front doors: the policy is switched by the control plane's REST API,
the requests go to the router with the demo tenants' keys through the ``text-generation`` client. Arrivals are open
loop and the same under every policy. The policy that was in force is restored on every exit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from text_generation import AsyncClient

from router_ext.core.config import policy_names
from router_ext.errors import SettingsError
from router_ext.ops.credentials import Credentials, read_credentials
from router_ext.ops.rest import Rest
from router_ext.ops.stoppable import run_stoppable

CHATBOT, BATCH = "chatbot", "batch"
POLICIES = ("fifo", "slo-fair")
CLIENT_TIMEOUT_S = 600
TABLE_WIDTH = 96

_WORDS = (
    "river market engine window signal garden letter harbor copper planet winter bridge ticket valley "
    "record factory sample border doctor silver pattern island museum forest camera number summer village "
    "library meeting kitchen network machine morning station history traffic science mountain account"
).split()
_QUESTIONS = (
    "What is a good name for a small blue boat?",
    "Give me one tip for better sleep.",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Name three fruits that are red.",
    "What does a librarian do?",
    "How far away is the moon?",
    "Write one line about the sea.",
)
_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""The demo model's chat markup, so that the chatbot gets answers instead of continued questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of the plan: when (s from the start), whose, and what."""

    at_s: float
    tenant: str
    prompt: str
    max_new_tokens: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one arrival. Instants in seconds from the start of the run."""

    arrival: Arrival
    prompt_tokens: int
    sent_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_s is None else (self.first_token_s - self.sent_s) * 1_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        action="append",
        choices=policy_names(),
        help=f"policy to run; may be repeated (default: {', then '.join(POLICIES)})",
    )
    parser.add_argument("--batch-requests", type=int, default=36, help="long prompts in the flood")
    parser.add_argument("--chat-interval", type=float, default=2.5, help="mean seconds between two chat requests")
    parser.add_argument("--seed", type=int, default=1, help="seed of arrivals and prompts")
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("FAIRLANE_DIR", ".fairlane")), help="state")
    parser.add_argument("--output", type=Path, default=Path("incident.png"), help="where the picture is written")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")


def percentile(values: Sequence[float], q: float) -> float | None:
    """Linear interpolation between closest ranks; None where there is nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


async def count_tokens(session: aiohttp.ClientSession, url: str, key: str, text: str) -> list[dict[str, Any]]:
    """The model's own tokens of a text, by ``/tokenize``."""
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{url}/tokenize", json={"inputs": text}, headers=headers) as answer:
        answer.raise_for_status()
        tokens: list[dict[str, Any]] = await answer.json()
        return tokens


async def plan(credentials: Credentials, args: argparse.Namespace) -> list[tuple[Arrival, int]]:
    """Arrivals in time order with their prompt lengths in tokens: the same for every policy.

    The flood comes within the first eight seconds; its prompts are cut to 500 to 700 tokens by the model's own
    tokenizer. The chatbot asks at exponential intervals until the flood would be over under any policy.
    """
    generator = random.Random(args.seed)
    arrivals: list[tuple[Arrival, int]] = []
    async with aiohttp.ClientSession() as session:
        for number in range(args.batch_requests):
            want = generator.randint(500, 700)
            words = " ".join(generator.choice(_WORDS) for _ in range(want))
            text = f"Summarise record {number}: {words}"
            tokens = await count_tokens(session, credentials.router_url, credentials.tenant_key(BATCH), text)
            text = text.encode()[: tokens[min(want, len(tokens)) - 1]["stop"]].decode()
            arrival = Arrival(
                at_s=8.0 * number / max(1, args.batch_requests), tenant=BATCH, prompt=text, max_new_tokens=48
            )
            arrivals.append((arrival, min(want, len(tokens))))
        at_s = 4.0
        end_s = 4.0 + 2.0 * args.batch_requests
        while at_s < end_s:
            text = _CHAT.format(generator.choice(_QUESTIONS))
            tokens = await count_tokens(session, credentials.router_url, credentials.tenant_key(CHATBOT), text)
            arrivals.append((Arrival(at_s=at_s, tenant=CHATBOT, prompt=text, max_new_tokens=16), len(tokens)))
            at_s += generator.expovariate(1 / args.chat_interval)
    return sorted(arrivals, key=lambda pair: pair[0].at_s)


async def send(client: AsyncClient, outcome: Outcome, start: float) -> None:
    """One request through the client library; the outcome is filled in as tokens come."""
    outcome.sent_s = time.monotonic() - start
    try:
        stream = client.generate_stream(outcome.arrival.prompt, max_new_tokens=outcome.arrival.max_new_tokens)
        async for _ in stream:
            now = time.monotonic() - start
            if outcome.first_token_s is None:
                outcome.first_token_s = now
            outcome.last_token_s = now
            outcome.output_tokens += 1
    except Exception as problem:  # the library raises its own, aiohttp's and the json module's errors
        outcome.error = f"{type(problem).__name__}: {problem}"


async def run_policy(
    arrivals: list[tuple[Arrival, int]], credentials: Credentials, policy: str, progress: Progress
) -> list[Outcome]:
    """Play the plan once and wait until everything is answered."""
    clients = {
        name: AsyncClient(
            credentials.router_url,
            headers={"Authorization": f"Bearer {credentials.tenant_key(name)}"},
            timeout=CLIENT_TIMEOUT_S,
        )
        for name in (CHATBOT, BATCH)
    }
    bar = progress.add_task(policy, total=len(arrivals))
    outcomes: list[Outcome] = []
    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for arrival, prompt_tokens in arrivals:
            await asyncio.sleep(max(0.0, start + arrival.at_s - time.monotonic()))
            outcome = Outcome(arrival=arrival, prompt_tokens=prompt_tokens)
            outcomes.append(outcome)
            task = group.create_task(send(clients[arrival.tenant], outcome, start))
            task.add_done_callback(lambda _: progress.advance(bar))
    return outcomes


class PolicySwitch:
    """The pool's policy by the control plane's REST API, with an operator's token."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials) -> None:
        self._rest = Rest(credentials.console_url, credentials.operator_token, session)
        self._pool_name = credentials.pool

    async def pool(self) -> dict[str, Any]:
        """The demo pool as the API shows it."""
        pool = await self._rest.pool(self._pool_name)
        if pool is None:
            raise SettingsError(f"no pool named {self._pool_name!r} in the control plane")
        return pool

    async def set(self, policy: str) -> float:
        """Choose ``policy`` and wait until every live router runs it; returns the seconds it took."""
        begun = time.monotonic()
        pool = await self.pool()
        if pool["policy"] != policy:
            await self._rest.call("PATCH", f"/pools/{pool['id']}", {"policy": policy})
        await self._rest.applied()
        return time.monotonic() - begun


@contextlib.asynccontextmanager
async def policy_restored(switch: PolicySwitch, console: Console) -> AsyncIterator[None]:
    """Whatever happens inside, the policy that was in force before is in force again."""
    before = str((await switch.pool())["policy"])
    try:
        yield
    finally:
        await asyncio.shield(switch.set(before))
        console.print(f"policy [bold]{before}[/] restored")


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Per tenant: requests, TTFT, output tokens per second, and share of the service delivered.

    tokens/s = output tokens over the time from the tenant's first arrival to its last token. Service = prompt
    tokens (once a first token has come) + 2 x output tokens.
    """
    service = {
        name: sum(
            (o.prompt_tokens if o.first_token_s is not None else 0) + 2 * o.output_tokens
            for o in outcomes
            if o.arrival.tenant == name
        )
        for name in (CHATBOT, BATCH)
    }
    tenants: dict[str, Any] = {}
    for name in (CHATBOT, BATCH):
        mine = [o for o in outcomes if o.arrival.tenant == name]
        ttft = [t for o in mine if (t := o.ttft_ms) is not None]
        ends = [o.last_token_s for o in mine if o.last_token_s is not None]
        span = max(ends, default=0.0) - min((o.sent_s for o in mine), default=0.0)
        tokens = sum(o.output_tokens for o in mine)
        tenants[name] = {
            "requests": len(mine),
            "failed": sum(o.error is not None for o in mine),
            "ttft_ms": {f"p{q}": percentile(ttft, q / 100) for q in (50, 95, 99)},
            "output_tokens": tokens,
            "tokens_per_s": tokens / span if span > 0 else 0.0,
            "share": service[name] / max(1, sum(service.values())),
        }
    return {"tenants": tenants}


def table(results: dict[str, Any]) -> Table:
    grid = Table(title="incident: a batch flood beside a chatbot with a TTFT target of 2 s")
    for head in ("policy", "tenant", "requests", "failed", "TTFT p50 s", "p95 s", "p99 s", "tokens/s", "share"):
        grid.add_column(head, justify="left" if head in ("policy", "tenant") else "right")

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value / 1_000:.2f}"

    for policy, result in results.items():
        for name, row in result["tenants"].items():
            ttft = row["ttft_ms"]
            grid.add_row(
                policy, name, str(row["requests"]), str(row["failed"]), seconds(ttft["p50"]), seconds(ttft["p95"]),
                seconds(ttft["p99"]), f"{row['tokens_per_s']:.1f}", f"{row['share']:.1%}",
            )  # fmt: skip
    return grid


def draw(runs: dict[str, list[Outcome]], path: Path) -> None:
    """TTFT over time of arrival, one panel per policy on a common logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(6 * len(runs), 4.2), sharey=True, squeeze=False)
    for axis, (policy, outcomes) in zip(axes[0], runs.items(), strict=True):
        for name, colour, mark in ((BATCH, "#b0b6bf", "s"), (CHATBOT, "#d1495b", "o")):
            points = [
                (o.sent_s, t / 1_000) for o in outcomes if o.arrival.tenant == name and (t := o.ttft_ms) is not None
            ]
            if points:
                axis.scatter(*zip(*points, strict=True), s=22, c=colour, marker=mark, label=name, zorder=3)
        axis.axhline(2.0, color="#30638e", linewidth=1, linestyle="--", label="chatbot's target")
        axis.set(title=f"policy {policy}", xlabel="arrival, s", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.25)
    axes[0][0].set_ylabel("time to first token, s")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


async def measure(args: argparse.Namespace, console: Console) -> dict[str, list[Outcome]]:
    """Play the plan under every policy."""
    credentials = read_credentials(args.dir / "credentials.json")
    runs: dict[str, list[Outcome]] = {}
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        switch = PolicySwitch(session, credentials)
        async with policy_restored(switch, console):
            arrivals = await plan(credentials, args)
            columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=console) as progress:
                for policy in args.policy or POLICIES:
                    took = await switch.set(policy)
                    progress.console.print(f"policy [bold]{policy}[/] in force after {took:.1f} s")
                    runs[policy] = await run_policy(arrivals, credentials, policy, progress)
    return runs


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True)

    try:
        runs = run_stoppable(lambda: measure(args, console), console, "stopping; the policy is restored first")
    except asyncio.CancelledError:
        return 130
    except aiohttp.ClientError as problem:
        raise SettingsError(f"the stack does not answer: {problem}") from None
    results = {policy: summarise(outcomes) for policy, outcomes in runs.items()}
    draw(runs, args.output)
    if args.json:
        print(json.dumps({"policies": results}))
    else:
        output = Console()
        # Piped into a file the table keeps its width instead of cutting words.
        Console(width=max(output.width, TABLE_WIDTH)).print(table(results))
    for policy, outcomes in runs.items():
        for problem_text in sorted({o.error for o in outcomes if o.error is not None}):
            print(f"{policy}: {problem_text}", file=sys.stderr)
    console.print(f"picture: {args.output}")
    return 0
