"""``fairlane bench predictor``: what a prediction costs, through the real worker process.

This process takes the router's place: the same client on the same event loop. Three measurements:

* latency, one question at a time, by the length of the prompt: question composed to answer checked;
* load: questions at a fixed open-loop rate, prompts of all lengths in equal parts; the worker's own time and CPU time
  per question, its longest answer, and how much later than asked this process's loop wakes up meanwhile, next to how
  much later it does without any questions;
* memory of the worker beyond that of a bare Python process (with torch, if the worker has loaded it).

Before, the worker's memories and histories are filled, and it saves them every ``_SAVE_S``, so that what a router of
some weeks costs is in the figures. CPU time tells less than wall time of what else the machine does.

Without ``--model`` the worker answers as in a router without a length model: features, history and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from router_ext.errors import ArtifactRefused
from router_ext.obs import logs
from router_ext.ops.measures import cpu_seconds, percentile, resident_bytes
from router_ext.ops.predictor.inspect import read_model
from router_ext.predict.client import PredictionClient, worker_command
from router_ext.predict.memory import CAPACITY
from router_ext.predict.messages import Answer, Ask, Assigned, Ended, plausible
from router_ext.predict.prompts import bounded

LENGTHS = (50, 200, 500, 1_000, 2_000, 4_000, 8_000)
"""Prompt tokens."""

_CHARACTERS_PER_TOKEN = 4.5
_POOL, _BARE_POOL = "pol_bench", "pol_without"
"""With the model, if there is one, and without."""
_TICK_S = 0.001
_SAVE_S = 5.0
"""Six times as often as a router's, so that the load sees it."""
_FILL_TOKENS, _FILL_AT_ONCE = 20, 8

TARGETS = {"p50_ms": 1.0, "p99_ms": 3.0, "worker_ms_per_request": 0.3, "memory_mib": 50.0}
"""What is asked of the worker: at one question at a time, at 300 questions a second, and beyond torch's own memory."""

_WORDS = (
    "the a of to in is that it for on with as was be by at from this have or an not are but they which one you had "
    "write list explain compare summarise translate function class return value please describe history river data "
    "model short long story code python table numbers proof theorem equation answer question between because example "
    "steps reasons people world city music school science energy market law health food house water light"
).split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="artifact of a length model")
    parser.add_argument("--questions", type=int, default=300, help="questions per prompt length, one at a time")
    parser.add_argument("--rate", type=float, default=300.0, help="questions per second of the load")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the load")
    parser.add_argument("--limit-ms", type=float, default=5.0, help="how long the router waits for a prediction")
    parser.add_argument("--remembered", type=int, default=CAPACITY, help="prompts that are remembered before")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")


class Watch:
    """Listens to the client."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, float]] = []
        self.outcome: asyncio.Future[Assigned] = asyncio.get_running_loop().create_future()

    def answered(self, seconds: float) -> None:
        """Measured here, from before the question is composed."""

    def batch_answered(self, count: int, seconds: float) -> None:
        self.batches.append((count, seconds))

    def model_assigned(self, outcome: Assigned) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def worker_ended(self) -> None:
        raise RuntimeError("the worker ended")


def prompts(tokens: int, count: int) -> list[str]:
    """Texts of about so many tokens, no two alike; the same in every run."""
    rng = random.Random(tokens)
    characters = int(tokens * _CHARACTERS_PER_TOKEN)
    texts = []
    for number in range(count):
        words = [f"{number}."]
        size = 0
        while size < characters:
            word = rng.choice(_WORDS)
            words.append(word)
            size += len(word) + 1
        texts.append(" ".join(words)[:characters])
    return texts


def ask(
    client: PredictionClient, text: str, number: int, *, pool: str = _POOL, key: str = ""
) -> asyncio.Future[Answer | None] | None:
    """Ask as the router does."""
    tenant = f"ten_{number % 20}"
    return client.ask(
        Ask(
            id=client.next_id(),
            pool=pool,
            model="bench",
            tenant=tenant,
            key=key or f"key_{number % 100}",
            prompt=bounded(text, ()),
            is_chat=False,
            max_new_tokens=1_024,
            temperature=0.7,
            top_p=0.95,
            is_greedy=False,
            has_stop=False,
            base=(20, 40, 100, 200, 400, 700, 900),
        )
    )


def check(answer: Answer | None) -> Answer:
    """As the router does.

    Raises:
        RuntimeError: no answer, or one that no router would use.
    """
    if answer is None or (answer.quantiles is not None and plausible(answer.quantiles) is None):
        raise RuntimeError(f"the worker answered {answer}")
    return answer


async def latency(client: PredictionClient, tokens: int, count: int) -> dict[str, Any]:
    """One question at a time; the first tenth warms up."""
    times = []
    warm_up = count // 10
    for number, text in enumerate(prompts(tokens, count + warm_up)):
        started = time.perf_counter()
        asked = ask(client, text, number)
        answer = check(None if asked is None else await asked)
        if number >= warm_up:
            times.append((time.perf_counter() - started) * 1_000)
        client.ended(Ended(answer.id, 1 + number % 700, number % 10 != 0))
    return {"prompt_tokens": tokens, "p50_ms": percentile(times, 0.5), "p99_ms": percentile(times, 0.99)}


async def fill(client: PredictionClient, pools: Sequence[str], count: int) -> None:
    """So many prompts remembered, and as many names of tenants and keys, as the worker has room for."""
    texts = iter(enumerate(prompts(_FILL_TOKENS, count)))

    async def some() -> None:
        for number, text in texts:
            for pool in pools:
                asked = ask(client, text, number, pool=pool, key=f"key_{number}")
                if asked is not None:
                    client.ended(Ended(check(await asked).id, 1 + number % 700, True))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_FILL_AT_ONCE):
            tasks.create_task(some())


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """Milliseconds by which the loop was late, every millisecond."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            late.append(max(0.0, time.perf_counter() - due) * 1_000)

    ticker = asyncio.create_task(tick())
    try:
        yield late
    finally:
        ticker.cancel()


async def load(
    client: PredictionClient, watch: Watch, *, rate: float, seconds: float, limit_ms: float
) -> dict[str, Any]:
    """Questions at their own times, whatever the answers do."""
    count = int(rate * seconds)
    by_length = [prompts(tokens, -(-count // len(LENGTHS))) for tokens in LENGTHS]
    texts = [text for same in zip(*by_length, strict=True) for text in same][:count]
    random.Random(1).shuffle(texts)
    times: list[float] = []
    missed = 0

    async def one(text: str, number: int) -> None:
        nonlocal missed
        started = time.perf_counter()
        asked = ask(client, text, number)
        if asked is None:
            missed += 1
            return
        answer = check(await asked)
        times.append((time.perf_counter() - started) * 1_000)
        client.ended(Ended(answer.id, 1 + number % 700, number % 10 != 0))

    async with ticking() as idle:
        await asyncio.sleep(min(seconds, 3.0))
    watch.batches.clear()
    assert client.pid is not None
    cpu_s = cpu_seconds(client.pid)
    async with ticking() as busy, asyncio.TaskGroup() as tasks:
        start = time.perf_counter() + 0.05
        for number, text in enumerate(texts):
            delay = start + number / rate - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.create_task(one(text, number))
    cpu_s = cpu_seconds(client.pid) - cpu_s
    answered = sum(size for size, _ in watch.batches)
    return {
        "rate": rate,
        "questions": count,
        "not_asked": missed,
        "late": sum(spent > limit_ms for spent in times),
        "p50_ms": percentile(times, 0.5),
        "p99_ms": percentile(times, 0.99),
        "max_ms": max(times, default=0.0),
        "worker_ms_per_request": sum(spent for _, spent in watch.batches) * 1_000 / max(1, answered),
        "worker_cpu_ms_per_request": cpu_s * 1_000 / max(1, answered),
        "mean_batch": answered / max(1, len(watch.batches)),
        "loop_late_ms": {
            name: {"p50": percentile(late, 0.5), "p99": percentile(late, 0.99), "max": max(late, default=0.0)}
            for name, late in (("idle", idle), ("load", busy))
        },
    }


def bare_bytes(*, has_torch: bool) -> int:
    """Memory of a Python process that has done nothing but import torch, or nothing at all."""
    code = "import torch; torch.set_num_threads(1); torch.ones(8, 8) @ torch.ones(8, 8)" if has_torch else "pass"
    command = [sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        size = resident_bytes(process.pid)
        process.kill()
    return size


def has_mapped(pid: int, name: str) -> bool:
    """Whether a process has loaded a library of this name."""
    return name in Path(f"/proc/{pid}/maps").read_text()


async def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything, in order.

    Raises:
        ArtifactRefused: the model cannot be read, or the worker does not take it.
    """
    data = None if args.model is None else read_model(args.model)
    try:
        return await _measure(args, data, console)
    except ExceptionGroup as group:
        if isinstance(group.exceptions[0], ArtifactRefused):
            raise group.exceptions[0] from None
        raise


async def _measure(args: argparse.Namespace, data: bytes | None, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as folder:
        watch = Watch()
        command = worker_command(
            directory=Path(folder), log_level="error", router="rtr_bench", limit_s=args.limit_ms / 1_000, save_s=_SAVE_S
        )
        client = PredictionClient(command, watch, limit_s=args.limit_ms / 1_000)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(client.run())
            started = time.perf_counter()
            while not client.is_up:  # noqa: ASYNC110 - the client has no event for it
                await asyncio.sleep(0.005)
            ready_s = time.perf_counter() - started
            load_s = digest = None
            if data is not None:
                digest = hashlib.sha256(data).hexdigest()
                console.print(f"loading {digest[:12]} ({len(data) / 2**20:.1f} MiB)")
                started = time.perf_counter()
                client.assign(_POOL, digest, str(args.model.absolute()))
                outcome = await watch.outcome
                if outcome.refused is not None:
                    raise ArtifactRefused(outcome.refused)
                load_s = time.perf_counter() - started
            console.print(f"filling memories and histories with {args.remembered:,} prompts")
            await fill(client, (_POOL, _BARE_POOL), args.remembered)
            rows = []
            for tokens in LENGTHS:
                console.print(f"{args.questions} questions of {tokens} tokens, one at a time")
                rows.append(await latency(client, tokens, args.questions))
            console.print(f"{args.rate:g} questions per second for {args.seconds:g} s")
            under_load = await load(client, watch, rate=args.rate, seconds=args.seconds, limit_ms=args.limit_ms)
            assert client.pid is not None
            worker = resident_bytes(client.pid)
            has_torch = has_mapped(client.pid, "libtorch")
            running.cancel()
    bare = await asyncio.to_thread(bare_bytes, has_torch=has_torch)
    return {
        "model": digest,
        "ready_s": ready_s,
        "load_s": load_s,
        "latency": rows,
        "load": under_load,
        "memory_mib": {
            "worker": worker / 2**20,
            "bare": bare / 2**20,
            "bare_is": "python with torch" if has_torch else "python",
            "beyond": (worker - bare) / 2**20,
        },
        "targets": TARGETS,
    }


def run(args: argparse.Namespace) -> int:
    logs.configure(level="error", router="rtr_bench")
    console = Console(stderr=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(measure(args, console))
    if args.json:
        print(json.dumps(result))
        return 0
    _show(result)
    return 0


def _show(result: dict[str, Any]) -> None:
    table = Table(title="one question at a time", title_justify="left")
    for name in ("prompt tokens", "p50 ms (<= 1)", "p99 ms (<= 3)"):
        table.add_column(name, justify="right")
    for row in result["latency"]:
        table.add_row(f"{row['prompt_tokens']:,}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}")
    Console().print(table)
    load, memory = result["load"], result["memory_mib"]
    late = load["loop_late_ms"]
    print(f"at {load['rate']:g} questions/s   p50 {load['p50_ms']:.2f} ms   p99 {load['p99_ms']:.2f} ms   "
          f"longest {load['max_ms']:.1f} ms   "
          f"worker {load['worker_ms_per_request']:.3f} ms per question (<= 0.3), "
          f"{load['worker_cpu_ms_per_request']:.3f} ms of CPU, {load['mean_batch']:.2f} per batch, "
          f"of {load['questions']} {load['not_asked']} not asked and {load['late']} late")  # fmt: skip
    print(f"this loop was late   p99 {late['load']['p99']:.2f} ms, at most {late['load']['max']:.1f} ms; "
          f"without questions {late['idle']['p99']:.2f} and {late['idle']['max']:.1f} ms")  # fmt: skip
    beyond = f"{memory['beyond']:.0f} MiB beyond {memory['bare_is']} (<= 50)"
    print(f"worker memory        {memory['worker']:.0f} MiB, {beyond}")
    load_s = "" if result["load_s"] is None else f", model loaded in {result['load_s']:.2f} s"
    print(f"worker ready         in {result['ready_s']:.2f} s{load_s}")
