"""``fairlane bench scheduler``: how long one scheduling decision takes.

A decision is one ``handle`` call that ends in at least one dispatch. The pool is saturated: every tenant is backlogged,
half of them in a tier with a TTFT target, four backends are full. Time is virtual: every step each running request
gets a token, some finish or come to the end of their slice, and each dispatch is followed by a new arrival of the
same tenant, so that queue length and number of backlogged tenants stay as asked. Whatever the router would do
between two events is not in the time; garbage collection caused by the scheduler is, with the settings of a router
(``obs.collector``).

With ``--core source compiled`` every combination is measured under both, each in a process of its own, one directly
after the other; without it, in this process with the core it runs (``compiled``).

``decision_us`` is wall time, which on a busy machine contains the turns of other processes; ``decision_cpu_us`` is the
CPU time of the same calls.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from router_ext import compiled
from router_ext.core.actions import Dispatch
from router_ext.core.config import PoolConfig, build_pool, policy_names
from router_ext.core.events import Arrived, BackendChanged, Event, Finished, Progressed, RequestSpec, SliceEnded
from router_ext.core.ids import KeyId, RequestId, TenantId, TierName
from router_ext.core.scheduler import Scheduler
from router_ext.errors import FairlaneError
from router_ext.obs import collector

_STEP_S = 0.03
"""One iteration of the modelled servers; a 7B model on a mid-range GPU at a good batch."""

_BACKENDS = 4
_KV_TOKENS = 65_536
_WARM_UP_DECISIONS = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command. ``--policy``, ``--tenants`` and ``--queued`` take several values, or may be repeated."""
    parser.add_argument("--policy", action="extend", nargs="+", choices=policy_names(), help="default: all of them")
    parser.add_argument("--tenants", action="extend", nargs="+", type=_positive, metavar="N", help="default: 1000")
    parser.add_argument("--queued", action="extend", nargs="+", type=_positive, metavar="N", help="default: 10000")
    parser.add_argument("--decisions", type=_positive, default=10_000, metavar="N", help="decisions to time per run")
    parser.add_argument("--seed", type=int, default=1, help="of the random sizes")
    parser.add_argument(
        "--core",
        action="extend",
        nargs="+",
        choices=("source", "compiled"),
        help=f"form of the core, or both to compare them; default: {compiled.CORE_VARIABLE}, else what there is",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, progress goes to stderr")


def run(args: argparse.Namespace) -> int:
    """Measure every combination asked for and print the result."""
    combinations = [
        (policy, tenants, queued)
        for tenants in args.tenants or [1_000]
        for queued in args.queued or [10_000]
        for policy in args.policy or policy_names()
    ]
    if args.core:
        return _show(args, [_in_process(args, core, *each) for each in combinations for core in args.core])
    if why := compiled.why_source(os.environ):
        print(f"the core runs interpreted: {why}", file=sys.stderr)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    results = []
    with progress, collector.tuned():
        for policy, tenants, queued in combinations:
            task = progress.add_task(f"{policy}, {tenants} tenants, {queued} queued", total=args.decisions)
            load = Saturated(policy=policy, tenants=tenants, queued=max(queued, tenants), seed=args.seed)
            while len(load.decisions_ns) < args.decisions:
                load.step()
                progress.update(task, completed=min(len(load.decisions_ns), args.decisions))
            results.append(load.result())
    return _show(args, results)


def _in_process(args: argparse.Namespace, core: str, policy: str, tenants: int, queued: int) -> dict[str, Any]:
    """One combination in a process that runs this core; its progress goes where ours does."""
    words = ["--policy", policy, "--tenants", tenants, "--queued", queued]
    words += ["--decisions", args.decisions, "--seed", args.seed, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "router_ext.cli", "bench", "scheduler", *map(str, words)],
        env={**os.environ, compiled.CORE_VARIABLE: core},
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        raise FairlaneError(f"the {core} core could not be measured (exit status {done.returncode})")
    [found] = json.loads(done.stdout)["results"]
    return dict(found)


def _show(args: argparse.Namespace, results: list[dict[str, Any]]) -> int:
    if args.json:
        json.dump({"results": results}, sys.stdout)
        sys.stdout.write("\n")
    else:
        _print_table(results)
    return 0


@dataclass
class Saturated:
    """One pool under more load than it can serve."""

    policy: str
    tenants: int
    queued: int
    seed: int
    decisions_ns: list[int] = field(default_factory=list)
    decisions_cpu_ns: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    mix: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._now = 0.0
        self._lengths: dict[RequestId, int] = {}
        self._specs: dict[RequestId, RequestSpec] = {}
        self._running: dict[RequestId, list[int]] = {}
        self._touched: dict[TenantId, None] = {}
        self._next = 0
        self._waiting: Counter[TenantId] = Counter()
        config = self._config()
        self._scheduler = Scheduler(config)
        for backend in config.backends:
            self._send(BackendChanged(backend=backend, is_up=True))
        self._quota = {
            tenant: self.queued // self.tenants + (index < self.queued % self.tenants)
            for index, tenant in enumerate(config.tenants)
        }
        for _ in range(max(self._quota.values())):
            for tenant in config.tenants:
                self._touched[tenant] = None
            self._refill(at_most=1)
        self._touched.update(dict.fromkeys(config.tenants))
        self._refill()
        while len(self.decisions_ns) < _WARM_UP_DECISIONS:
            self.step()
        self.decisions_ns.clear()
        self.decisions_cpu_ns.clear()
        self.token_ns.clear()
        self.mix.clear()
        self.reasons.clear()
        gc.collect()

    def _config(self) -> PoolConfig:
        return build_pool(
            pool={"name": "bench", "policy": self.policy, "max_queued": 10_000_000},
            backends=[
                {
                    "backend": f"bke_{index}",
                    "kv_tokens": _KV_TOKENS,
                    "block_size": 16,
                    "max_input_tokens": 16_384,
                    "max_total_tokens": 20_480,
                }
                for index in range(_BACKENDS)
            ],
            tiers=[{"name": "chat", "rank": 1, "ttft_target_s": 2.0}, {"name": "batch", "rank": 10}],
            tenants=[
                {"tenant": f"ten_{index:05d}", "weight": 1.0 + index % 3, "max_queued": 1_000_000}
                for index in range(self.tenants)
            ],
        )

    def step(self) -> None:
        """One iteration of all servers."""
        self._now += _STEP_S
        for request_id in list(self._running):
            progress = self._running[request_id]
            progress[0] += 1
            self._send(Progressed(request_id=request_id, output_tokens=1))
            self._lengths[request_id] -= 1
            if self._lengths[request_id] == 0:
                del self._running[request_id], self._lengths[request_id], self._specs[request_id]
                self._send(Finished(request_id=request_id))
            elif progress[0] >= progress[1]:
                del self._running[request_id]
                prompt = self._specs[request_id].prompt_tokens + progress[2] + progress[0]
                self._send(SliceEnded(request_id=request_id, dropped_tokens=0, next_prompt_tokens=prompt))
        self._refill()

    def _refill(self, at_most: int = 1_000_000) -> None:
        """New arrivals for whoever was served, until every tenant waits with its quota again."""
        while self._touched:
            tenant, _ = self._touched.popitem()
            for _ in range(at_most):
                if self._waiting[tenant] >= self._quota[tenant]:
                    break
                self._arrive(tenant)
            if at_most == 1:
                self._touched.pop(tenant, None)

    def _arrive(self, tenant: TenantId) -> None:
        rng = self._rng
        self._next += 1
        request_id = RequestId(f"req_{self._next:012d}")
        length = min(2_000, int(rng.lognormvariate(5.2, 0.9)) + 1)
        spec = RequestSpec(
            request_id=request_id,
            tenant=tenant,
            key=KeyId("key_bench"),
            tier=TierName("chat" if int(tenant[4:]) % 2 else "batch"),
            prompt_tokens=min(8_000, int(rng.lognormvariate(6.0, 1.0)) + 1),
            max_new_tokens=2_000,
            predicted_output_tokens=max(1, int(length * rng.uniform(0.5, 2.0))),
            slice_tokens=900,
        )
        self._lengths[request_id] = length
        self._specs[request_id] = spec
        self._send(Arrived(request=spec))

    def _send(self, event: Event) -> None:
        # Reading the CPU clock is a system call; tokens, which are many and cheap, go without.
        is_token = type(event) is Progressed
        cpu_before = 0 if is_token else time.thread_time_ns()
        before = time.perf_counter_ns()
        actions = self._scheduler.handle(event, self._now)
        elapsed = time.perf_counter_ns() - before
        cpu = elapsed if is_token else time.thread_time_ns() - cpu_before
        dispatches = [action for action in actions if isinstance(action, Dispatch)]
        name = type(event).__name__
        if isinstance(event, Arrived):
            self._waiting[event.request.tenant] += 1
        elif isinstance(event, SliceEnded):
            self._waiting[self._specs[event.request_id].tenant] += 1
        if dispatches:
            self.decisions_ns.append(elapsed)
            self.decisions_cpu_ns.append(cpu)
            self.mix[name] += 1
            for action in dispatches:
                self.reasons[action.reason.partition(":")[0]] += 1
        elif is_token:
            self.token_ns.append(elapsed)
        for action in dispatches:
            done = self._running.get(action.request_id, [0, 0, 0])
            self._running[action.request_id] = [0, action.slice_tokens, done[0] + done[2]]
            tenant = self._specs[action.request_id].tenant
            self._waiting[tenant] -= 1
            self._touched[tenant] = None

    def result(self) -> dict[str, Any]:
        """One entry of ``results``; times in microseconds."""
        return {
            "policy": self.policy,
            "core": compiled.running(),
            "tenants": self.tenants,
            "queued": self.queued,
            "decision_us": _percentiles(self.decisions_ns),
            "decision_cpu_us": _percentiles(self.decisions_cpu_ns),
            "token_us": _percentiles(self.token_ns),
            "decisions": len(self.decisions_ns),
            "events": dict(self.mix.most_common()),
            "dispatches": dict(self.reasons.most_common()),
            "running": len(self._running),
        }


def _percentiles(values_ns: list[int]) -> dict[str, float]:
    """p50 and p99 in microseconds, as the smallest value that many do not exceed."""
    count = len(values_ns)
    largest = heapq.nlargest(max(1, count - count // 2), values_ns)
    return {
        "p50": round(largest[-1] / 1_000, 2) if values_ns else 0.0,
        "p99": round(largest[count // 100] / 1_000, 2) if values_ns else 0.0,
    }


def _print_table(results: list[dict[str, Any]]) -> None:
    table = Table(title="one scheduling decision, in microseconds")
    words = ("policy", "core")
    for column in (*words, "tenants", "queued", "p50", "p99", "CPU p50", "CPU p99", "a token, p50"):
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result["policy"],
            result["core"],
            f"{result['tenants']:,}",
            f"{result['queued']:,}",
            *(f"{result[key][p]:.1f}" for key in ("decision_us", "decision_cpu_us") for p in ("p50", "p99")),
            f"{result['token_us']['p50']:.1f}",
        )
    # A file or a pipe is as wide as need be.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    mixes = {(each["policy"], each["tenants"], each["queued"]): each for each in results}
    for result in mixes.values():
        for title in ("events", "dispatches"):
            mix = ", ".join(f"{name} {count:,}" for name, count in result[title].items())
            console.print(f"{result['policy']}, {result['tenants']:,} tenants: {title}: {mix}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value
