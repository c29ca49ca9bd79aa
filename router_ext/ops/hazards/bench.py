"""``fairlane bench hazards``: a hostile tenant sends what fells a TGI, beside the plain load of two others.

Three phases with the same plain load, each with four model servers and a router of its own: without the hostile tenant
(baseline), with it (guarded), and with it while the pool's guard is switched off (unguarded), as if the cause of the
deaths were unknown. The servers do what a TGI would (``--sim-hazards``); nothing is compiled there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from router_ext.ops.hazards.arena import Arena, Loss, arena
from router_ext.ops.hazards.load import Load, Plain, Traffic
from router_ext.ops.hazards.odd import Odd, odd_requests
from router_ext.ops.measures import percentile

BASELINE, GUARDED, UNGUARDED = "baseline", "guarded", "unguarded"
MIN_FIRST_TOKENS = 1_000
"""Of a phase, for its 99th percentile to mean something."""

_WARM_S = 3.0


@dataclass(slots=True)
class Phase:
    """What one phase has shown."""

    name: str
    traffic: Traffic = field(default_factory=Traffic)
    losses: list[Loss] = field(default_factory=list)
    wall_s: float = 0.0
    load_average: float = 0.0

    @property
    def failed(self) -> list[Plain]:
        """Requests of the others without a complete answer."""
        return [plain for plain in self.traffic.plain if plain.problem is not None]

    @property
    def ttft_s(self) -> list[float]:
        """Times to the first token of the others' streams."""
        return [p.first_token_s - p.sent_s for p in self.traffic.plain if p.first_token_s is not None]

    @property
    def hits_per_culprit(self) -> int:
        """The most backends that one odd request was given to with a bad end."""
        return max((sent.hits for sent in self.traffic.odd), default=0)

    def summary(self) -> dict[str, Any]:
        """Its figures."""
        ttft = self.ttft_s
        return {
            "requests": len(self.traffic.odd),
            "backends_lost": len(self.losses),
            "lost": dict(Counter(loss.kind for loss in self.losses)),
            "others": len(self.traffic.plain),
            "others_failed": len(self.failed),
            "problems": [f"{plain.tenant}: {plain.problem}" for plain in self.failed[:20]],
            "first_tokens": len(ttft),
            "ttft_ms": {f"p{q}": round(percentile(ttft, q / 100) * 1_000, 1) for q in (50, 99)},
            "backends_hit_per_culprit": self.hits_per_culprit,
            "odd_answers": dict(Counter(_outcome(s.status, s.code) for s in self.traffic.odd).most_common()),
            "wall_s": round(self.wall_s, 1),
            "load_average": round(self.load_average, 1),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--seconds", type=float, default=90.0, help="length of each phase, and odd requests in it")
    parser.add_argument("--rate", type=float, default=14.0, help="plain streams a second; whole answers: a third of it")
    parser.add_argument("--phase", action="append", choices=(BASELINE, GUARDED, UNGUARDED), help="only this one")
    parser.add_argument("--seed", type=int, default=1, help="seed of the arrivals")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="copy the logs of routers and servers there")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")


def run(args: argparse.Namespace) -> int:
    """Play the phases, then print."""
    console = Console(stderr=True)

    async def main() -> dict[str, Phase]:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await measure(args, console)

    try:
        phases = asyncio.run(main())
    except asyncio.CancelledError:
        return 130
    result = summarise(phases)
    if args.json:
        print(json.dumps(result))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(table(phases), verdict(result), sep="\n")
    return 0


async def measure(args: argparse.Namespace, console: Console) -> dict[str, Phase]:
    """All phases, in order."""
    odd = odd_requests()
    phases: dict[str, Phase] = {}
    with tempfile.TemporaryDirectory(prefix="fairlane-hazards-") as folder:
        for name in (BASELINE, GUARDED, UNGUARDED):
            if args.phase and name not in args.phase:
                continue
            phase = phases[name] = Phase(name)
            try:
                async with arena(Path(folder) / name, is_guarded=name != UNGUARDED) as made:
                    await _play(phase, made, [] if name == BASELINE else odd, args, console)
            finally:
                if args.keep_logs:
                    _keep(Path(folder) / name, args.keep_logs / name)
    return phases


async def _play(phase: Phase, made: Arena, odd: list[Odd], args: argparse.Namespace, console: Console) -> None:
    warm = Load(made, seconds=min(_WARM_S, args.seconds), rate=args.rate, seed=args.seed + 1)
    await warm.run([])
    load = Load(made, seconds=args.seconds, rate=args.rate, seed=args.seed)
    phase.traffic = load.traffic
    phase.losses = made.orchestrator.losses
    begun = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[seen]}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"{phase.name:>9}", total=args.seconds, seen="")

        async def show() -> None:
            while True:
                seen = (
                    f"{len(phase.traffic.plain)} of others, {len(phase.traffic.odd)} odd, {len(phase.losses)} servers "
                    "lost"
                )
                progress.update(bar, completed=min(time.monotonic() - begun, args.seconds), seen=seen)
                await asyncio.sleep(0.5)

        showing = asyncio.create_task(show())
        try:
            await load.run(odd)
        finally:
            showing.cancel()
    phase.wall_s = time.monotonic() - begun
    phase.load_average = os.getloadavg()[0]


def summarise(phases: dict[str, Phase]) -> dict[str, Any]:
    """The figures asked for, and those of every phase beside them; None where a phase was left out."""
    guarded, unguarded = phases.get(GUARDED), phases.get(UNGUARDED)
    baseline = phases.get(BASELINE)
    ratio = None
    if baseline and guarded and baseline.ttft_s and guarded.ttft_s:
        ratio = round(percentile(guarded.ttft_s, 0.99) / percentile(baseline.ttft_s, 0.99), 3)
    return {
        "requests": None if guarded is None else len(guarded.traffic.odd),
        "backends_lost": None if guarded is None else len(guarded.losses),
        "others_failed": None if guarded is None else len(guarded.failed),
        "ttft_p99_ratio": ratio,
        "unguarded": {
            "backends_hit_per_culprit": None if unguarded is None else unguarded.hits_per_culprit,
            "others_failed": None if unguarded is None else len(unguarded.failed),
        },
        "others_changed": _changed(phases),
        "phases": {name: phase.summary() for name, phase in phases.items()},
    }


def _changed(phases: dict[str, Phase]) -> int:
    """Complete answers whose text is another than the first one to the same prompt: the model is deterministic."""
    first: dict[int, str] = {}
    answers = [plain for phase in phases.values() for plain in phase.traffic.plain if plain.problem is None]
    return sum(first.setdefault(plain.prompt, plain.text) != plain.text for plain in answers)


def table(phases: dict[str, Phase]) -> Table:
    """The phases side by side."""
    grid = Table(title="odd requests beside plain load; 4 servers")
    grid.add_column("")
    for name in phases:
        grid.add_column(name, justify="right")
    rows = [phase.summary() for phase in phases.values()]

    def row(head: str, *keys: str) -> None:
        values: list[Any] = rows
        for key in keys:
            values = [value[key] for value in values]
        grid.add_row(head, *(f"{value:,}" if isinstance(value, int) else str(value) for value in values))

    row("odd requests", "requests")
    row("servers lost", "backends_lost")
    row("requests of others", "others")
    row("failed", "others_failed")
    row("first tokens", "first_tokens")
    row("TTFT p50, ms", "ttft_ms", "p50")
    row("TTFT p99, ms", "ttft_ms", "p99")
    row("backends hit per culprit", "backends_hit_per_culprit")
    row("wall time, s", "wall_s")
    row("load average", "load_average")
    for outcome in sorted({each for phase in rows for each in phase["odd_answers"]}):
        grid.add_row(f"odd: {outcome}", *(str(phase["odd_answers"].get(outcome, 0)) for phase in rows))
    return grid


def verdict(result: dict[str, Any]) -> str:
    """The bars, in words."""
    few = [name for name, phase in result["phases"].items() if phase["first_tokens"] < MIN_FIRST_TOKENS]
    lines = [
        f"guarded: {result['backends_lost']} servers lost, {result['others_failed']} of others failed, "
        f"TTFT p99 {result['ttft_p99_ratio']} times the baseline's (at most 0, 0, 1.5)",
        f"unguarded: at most {result['unguarded']['backends_hit_per_culprit']} backends per culprit, "
        f"{result['unguarded']['others_failed']} of others failed (at most 2, 0)",
    ]
    if few:
        lines.append(f"fewer than {MIN_FIRST_TOKENS:,} first tokens in {', '.join(few)}: the ratio says little")
    return "\n".join(lines)


def _outcome(status: int, code: str) -> str:
    if not status:
        return code or "no answer at the end"
    return f"{status} {code}".strip()


def _keep(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for log in source.glob("*.log"):
        (target / log.name).write_bytes(log.read_bytes())
