"""``fairlane simulate``: policies on a suite, in virtual time, by the router's own scheduler."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from router_ext.core.config import policy_names
from router_ext.errors import SettingsError
from router_ext.sim.metrics import Summary, mean, percentile, summarize, ttfts
from router_ext.sim.models import MODELS
from router_ext.sim.prediction import Predictor
from router_ext.sim.raw import RAW
from router_ext.sim.recording import Recording
from router_ext.sim.runs import ALONE_POLICY, Task, default_jobs, perform_all
from router_ext.sim.suites import Suite, SuiteChoice, suite_names

_DEFAULT_SEEDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command. ``--policy`` and ``--seed`` take several values, or may be repeated."""
    parser.add_argument("suite", choices=suite_names(), metavar="SUITE", help=f"one of {', '.join(suite_names())}")
    parser.add_argument(
        "--policy",
        action="extend",
        nargs="+",
        choices=[*policy_names(), RAW],
        metavar="POLICY",
        help=f"any of {', '.join(policy_names())}, {RAW} (no router); default: all, {RAW} where it says something",
    )
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seeds", type=_positive, metavar="N", help=f"seeds 1 to N (default: {_DEFAULT_SEEDS})")
    seeds.add_argument("--seed", action="extend", nargs="+", type=int, metavar="S", help="these seeds")
    parser.add_argument("--predictor", choices=list(Predictor), default=Predictor.NOISY, help="of output lengths")
    parser.add_argument("--rate", type=_rate, metavar="R", help="agents or requests per second, where a suite has one")
    parser.add_argument("--backends", type=_positive, metavar="N", help="servers (default: the suite's)")
    parser.add_argument("--model", choices=list(MODELS), help="of the servers (default: the suite's)")
    parser.add_argument("--no-chunking", action="store_true", help="servers that prefill without chunking")
    parser.add_argument("--slice-oracle", action="store_true", help="slices from the true lengths, as an upper bound")
    parser.add_argument("--jobs", type=_positive, default=default_jobs(), metavar="N", help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object, progress goes to stderr")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="also write DIR/report.html and its pictures as SVG files"
    )


def run(args: argparse.Namespace) -> int:
    """Run every policy and seed asked for and print the result."""
    choice = SuiteChoice(
        name=args.suite,
        rate=args.rate,
        num_backends=args.backends,
        model=args.model,
        is_chunked=not args.no_chunking,
    )
    suite = choice.build()
    policies = args.policy or [*policy_names(), *([RAW] if suite.has_raw else [])]
    policies = list(dict.fromkeys(policies))
    if args.report is not None:
        _make_directory(args.report)
    seeds = args.seed or list(range(1, (args.seeds or _DEFAULT_SEEDS) + 1))
    options: dict[str, Any] = {
        "choice": choice,
        "predictor": Predictor(args.predictor),
        "is_slice_oracle": args.slice_oracle,
    }
    tasks = [Task(policy=policy, seed=seed, **options) for policy in policies for seed in seeds]
    alone = [client.name for client in suite.clients if client.ttft_target_s is not None] if suite.has_alone else []
    num_main = len(tasks)
    tasks += [Task(policy=ALONE_POLICY, seed=seed, alone=name, **options) for name in alone for seed in seeds]
    recordings = _perform(tasks, jobs=args.jobs)
    by_policy = {
        policy: recordings[index * len(seeds) : (index + 1) * len(seeds)] for index, policy in enumerate(policies)
    }
    alone_p99 = {
        name: [
            percentile(ttfts(recording, 0), 0.99)
            for recording in recordings[num_main + index * len(seeds) : num_main + (index + 1) * len(seeds)]
        ]
        for index, name in enumerate(alone)
    }
    result = {
        "suite": suite.name,
        "seeds": seeds,
        "results": [_result(suite, policy, runs, alone_p99) for policy, runs in by_policy.items()],
    }
    if args.report is not None:
        # Templates and pictures are read by nobody else.
        from router_ext.sim import report

        study = report.Study(
            suite=suite,
            recordings=by_policy,
            result=result,
            settings=_settings(args),
            command=_again(args, policies, seeds),
        )
        Console(stderr=True).print(f"report: {report.write(args.report, study)}", highlight=False, soft_wrap=True)
    if args.json:
        json.dump(result, sys.stdout)
        sys.stdout.write("\n")
    else:
        _print_tables(result)
    return 0


def _make_directory(directory: Path) -> None:
    """Before the runs, which may take long."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--report {directory}: {error.strerror}") from error


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """What was chosen beside suite, policies and seeds, in words."""
    predictors = {
        Predictor.NOISY: "true length x uniform(0.5, 1.5)",
        Predictor.ORACLE: "the true length",
        Predictor.MEAN5: "mean of the tenant's last five outputs",
        Predictor.NONE: "median of the outputs so far",
    }
    slices = "the true lengths" if args.slice_oracle else "quantiles of the outputs so far"
    return {"predicted lengths": predictors[Predictor(args.predictor)], "slices": slices}


def _again(args: argparse.Namespace, policies: Sequence[str], seeds: Sequence[int]) -> str:
    """The command that gives the same report."""
    words = [args.suite, "--policy", *policies, "--seed", *map(str, seeds)]
    if args.predictor != Predictor.NOISY:
        words += ["--predictor", args.predictor]
    for option in ("rate", "backends", "model"):
        if (value := getattr(args, option)) is not None:
            words += [f"--{option}", str(value)]
    for option in ("no_chunking", "slice_oracle"):
        if getattr(args, option):
            words.append(f"--{option.replace('_', '-')}")
    return shlex.join(["fairlane", "simulate", *words, "--report", str(args.report)])


def _perform(tasks: Sequence[Task], *, jobs: int) -> list[Recording]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    recordings: list[Recording] = []
    with progress:
        bar = progress.add_task(tasks[0].choice.name, total=len(tasks))
        for index, recording in perform_all(tasks, jobs=jobs):
            recordings.append(recording)
            following = tasks[min(index + 1, len(tasks) - 1)]
            progress.update(bar, completed=index + 1, description=f"{following.choice.name}, {following.policy}")
    return recordings


def _result(
    suite: Suite, policy: str, recordings: Sequence[Recording], alone_p99: Mapping[str, Sequence[float | None]]
) -> dict[str, Any]:
    """One entry of ``results``: means over the seeds."""
    summaries = [summarize(recording) for recording in recordings]
    metrics: dict[str, Any] = {
        name: mean([summary.metrics[name] for summary in summaries]) for name in summaries[0].metrics
    }
    tenants: dict[str, Any] = {}
    for client in suite.clients:
        tenants[client.name] = tenant = _mean_tenant(summaries, client.name)
        if client.name in alone_p99:
            ratios = [
                None if shared is None or not alone else shared / alone
                for shared, alone in zip(
                    [summary.tenants[client.name]["ttft_s"]["p99"] for summary in summaries],  # type: ignore[index]
                    alone_p99[client.name],
                    strict=True,
                )
            ]
            tenant["ttft_alone_ratio_p99"] = mean(ratios)
    return {"policy": policy, "metrics": metrics, "tenants": tenants}


def _mean_tenant(summaries: Sequence[Summary], name: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, first in summaries[0].tenants[name].items():
        values: list[Any] = [summary.tenants[name][key] for summary in summaries]
        if isinstance(first, dict):
            result[key] = {level: mean([value[level] for value in values]) for level in first}
        else:
            result[key] = mean(values)
    return result


def _print_tables(result: Mapping[str, Any]) -> None:
    console = Console()
    table = Table(title=f"{result['suite']}, mean of seeds {', '.join(map(str, result['seeds']))}")
    for column in ("policy", "tokens/s", "difference", "while waiting", "window", "KV", "running", "recomputed"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for entry in result["results"]:
        m = entry["metrics"]
        table.add_row(
            entry["policy"],
            _text(m["throughput_tokens_per_s"], ".0f"),
            _text(m["accumulated_difference"], ",.0f"),
            _text(m["accumulated_while_waiting"], ",.0f"),
            _text(m["window_difference_mean"], ".1f"),
            _text(m["kv_occupancy"], ".1%"),
            _text(m["mean_running"], ".1f"),
            _text(m["recomputed_ratio"], ".2%"),
        )
    console.print(table)
    table = Table(title="first token, in seconds; share of service")
    for column in ("policy", "tenant", "requests", "p50", "p95", "p99", "x alone", "share"):
        table.add_column(column, justify="left" if column in ("policy", "tenant") else "right", no_wrap=True)
    for entry in result["results"]:
        for name, tenant in entry["tenants"].items():
            ttft = tenant["ttft_s"]
            table.add_row(
                entry["policy"],
                name,
                _text(tenant["requests"], ",.0f"),
                *(_text(ttft[level], ".3g") for level in ("p50", "p95", "p99")),
                _text(tenant.get("ttft_alone_ratio_p99"), ".1f"),
                _text(tenant["share"], ".1%"),
            )
    console.print(table)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1_000.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below 1,000")
    return value
