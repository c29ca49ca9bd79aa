"""``fairlane simulate``: policies on a suite, in virtual time, by the router's own scheduler."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from router_ext import compiled
from router_ext.core.config import policy_names
from router_ext.core.fairness import TEST_POLICIES
from router_ext.errors import SettingsError, SimulationError
from router_ext.predict.answer_files import OUTPUTS, PROMPTS
from router_ext.sim.capacity import capacity
from router_ext.sim.foresight import Foresight, read_model
from router_ext.sim.learning import train_on_others
from router_ext.sim.loads import over_load
from router_ext.sim.models import MODELS
from router_ext.sim.prediction import Predictor
from router_ext.sim.raw import RAW
from router_ext.sim.recording import Recording
from router_ext.sim.results import Outcomes, Variant, labels, result
from router_ext.sim.runs import ALONE_POLICY, Task, Workers, default_jobs
from router_ext.sim.suites import RATED, TRACE, Suite, SuiteChoice, suite_names
from router_ext.sim.tables import print_load, print_tables
from router_ext.sim.traces import MAX_SPAN_S

_DEFAULT_SEEDS = 3

_DEFAULT_PREDICTOR = Predictor.NOISY

_PREDICTORS = {
    Predictor.NONE: "nothing predicted",
    Predictor.MEAN5: "mean of the tenant's last five outputs",
    Predictor.TRIVIAL: "quantiles of the outputs so far",
    Predictor.MODEL: "a trained length model with history and memory",
    Predictor.NOISY: "true length x uniform(0.5, 1.5)",
    Predictor.ORACLE: "the true length",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command. ``--policy`` and ``--seed`` take several values, or may be repeated."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _suites_text()
    parser.add_argument("suite", choices=suite_names(), metavar="SUITE", help="one of those below")
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help=f"for `{TRACE}`: .csv or .csv.gz with the columns t_s, input_tokens, output_tokens and, if it has "
        "several clients, client",
    )
    parser.add_argument(
        "--policy",
        action="extend",
        nargs="+",
        choices=[*policy_names(), RAW, *TEST_POLICIES],
        metavar="POLICY",
        help=f"any of {', '.join(policy_names())}, {RAW} (no router), {', '.join(TEST_POLICIES)} (wrong on purpose); "
        f"default: all that a pool may choose, and {RAW} where it says something",
    )
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument(
        "--seeds", type=_positive, metavar="N", help=f"seeds 1 to N (default: {_DEFAULT_SEEDS}; 1 of `{TRACE}`)"
    )
    seeds.add_argument("--seed", action="extend", nargs="+", type=int, metavar="S", help="these seeds")
    parser.add_argument(
        "--predictor",
        action="extend",
        nargs="+",
        choices=list(Predictor),
        help="of output lengths, several to compare them: "
        + "; ".join(f"{predictor}, {words}" for predictor, words in _PREDICTORS.items())
        + f" (default: {_DEFAULT_PREDICTOR})",
    )
    parser.add_argument(
        "--rate",
        action="extend",
        nargs="+",
        type=_rate,
        metavar="R",
        help=f"requests or agents per second ({', '.join(RATED)}), several for a curve over the load; `tiers` "
        "looks for its capacity without it",
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="DIR",
        help=f"for `{TRACE}`: real answers ({PROMPTS}, {OUTPUTS}); each client sends prompts of one source and gets "
        "answers of one model, whatever lengths the trace has",
    )
    parser.add_argument(
        "--length-model",
        type=Path,
        metavar="FILE",
        help=f"for `--predictor {Predictor.MODEL}`: an artifact of `fairlane predictor train`; if there is no such "
        "file, a model is trained on those prompts of --lengths that are not sent, and kept there",
    )
    parser.add_argument(
        "--speed", type=_rate, default=1.0, metavar="X", help=f"for `{TRACE}`: arrivals X times as fast as recorded"
    )
    parser.add_argument("--span", type=_span, metavar="S", help=f"for `{TRACE}`: the first S seconds as sent")
    parser.add_argument("--backends", type=_positive, metavar="N", help="servers (default: the suite's)")
    parser.add_argument("--model", choices=list(MODELS), help="of the servers (default: the suite's)")
    parser.add_argument("--no-chunking", action="store_true", help="servers that prefill without chunking")
    parser.add_argument(
        "--jobs", type=_positive, default=default_jobs(), metavar="N", help="processes (default: one per processor)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, progress goes to stderr")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="also write DIR/report.html and its pictures as SVG files"
    )


def _suites_text() -> str:
    """What there is to choose from, for ``--help``."""
    lines = ["suites:"]
    for name in suite_names():
        about = "recorded arrivals of a file" if name == TRACE else SuiteChoice(name=name).build().about
        lines.append(f"  {name:<24} {about}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Run every policy and seed asked for and print the result."""
    rates: list[float | None] = sorted(set(args.rate)) if args.rate else [None]
    choices = [
        SuiteChoice(
            name=args.suite,
            file=args.file,
            lengths=args.lengths,
            speed=args.speed,
            span_s=args.span,
            rate=rate,
            num_backends=args.backends,
            model=args.model,
            is_chunked=not args.no_chunking,
        )
        for rate in rates
    ]
    choices[0].build()
    if args.report is not None:
        _make_directory(args.report)
    if why := compiled.why_source(os.environ):
        print(f"the core runs interpreted, which takes longer: {why}", file=sys.stderr)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress, Workers(args.jobs) as workers, tempfile.TemporaryDirectory() as scratch:
        model = _length_model(args, progress, Path(scratch)) if Predictor.MODEL in _predictors(args) else None
        results = [_result(args, choice, model, progress, workers, is_alone=len(choices) == 1) for choice in choices]
    if len(choices) > 1:
        _show_load(args, over_load([rate for rate in rates if rate is not None], results))
    elif args.json:
        _print_json(results[0])
    else:
        print_tables(results[0])
    return 0


def _length_model(args: argparse.Namespace, progress: Progress, scratch: Path) -> Path:
    """The file of the length model, trained now if there is none yet."""
    stated: Path | None = args.length_model
    if stated is not None and (stated.exists() or args.lengths is None):
        Foresight(read_model(stated))
        return stated
    if args.lengths is None:
        raise SimulationError(
            f"predictor {Predictor.MODEL} needs --length-model FILE, or --lengths DIR to train one from"
        )
    path = stated or scratch / "length-model"
    bar = progress.add_task("length model", total=1.0)

    def tell(share: float, line: str) -> None:
        progress.update(bar, completed=share, description=f"length model: {line}" if line else None)

    artifact = train_on_others(args.lengths, on_progress=tell)
    progress.remove_task(bar)
    try:
        path.write_bytes(artifact)
    except OSError as error:
        raise SettingsError(f"--length-model {path}: {error.strerror}") from error
    return path


def _show_load(args: argparse.Namespace, printed: dict[str, Any]) -> None:
    """Print and draw how every policy bears the load."""
    from router_ext.sim import report

    rated = RATED[args.suite]
    if args.report is not None:
        report.write_load(args.report, printed, rated.judged_by, rated.unit)
    if args.json:
        _print_json(printed)
    else:
        measure = report.MEASURES[rated.judged_by]
        print_load(printed, rated.judged_by, f"{measure.label}, by {rated.unit}", measure.text)


def _print_json(printed: dict[str, Any]) -> None:
    json.dump(printed, sys.stdout)
    sys.stdout.write("\n")


def _result(
    args: argparse.Namespace,
    choice: SuiteChoice,
    model: Path | None,
    progress: Progress,
    workers: Workers,
    *,
    is_alone: bool,
) -> dict[str, Any]:
    """Run one suite at one load, and write its report: into a directory by its rate if there are others."""
    suite = choice.build()
    policies = list(dict.fromkeys(args.policy or [*policy_names(), *([RAW] if suite.has_raw else [])]))
    num_seeds = args.seeds or (1 if args.suite == TRACE else _DEFAULT_SEEDS)
    seeds = list(dict.fromkeys(args.seed or range(1, num_seeds + 1)))
    variants = [Variant(policy, predictor) for policy in policies for predictor in _predictors(args)]
    outcomes = _outcomes(choice, suite, variants, seeds, model, progress, workers)
    printed = result(outcomes)
    if args.report is not None:
        # Templates and pictures are read by nobody else.
        from router_ext.sim import report

        directory = args.report if is_alone else args.report / f"{choice.rate:g}"
        study = report.Study(
            suite=suite,
            recordings={
                label: [replace(recording, policy=label) for recording in recordings]
                for label, recordings in zip(labels(printed["results"]), outcomes.by_variant.values(), strict=True)
            },
            result=printed,
            settings=_settings(args),
            command=_again(args, choice, policies, seeds, directory),
        )
        path = report.write(directory, study)
        progress.console.print(f"report: {path}", highlight=False, soft_wrap=True)
    return printed


def _outcomes(
    choice: SuiteChoice,
    suite: Suite,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    model: Path | None,
    progress: Progress,
    workers: Workers,
) -> Outcomes:
    """Run everything, with progress."""

    def perform(tasks: Sequence[Task], title: str) -> list[Recording]:
        bar = progress.add_task(title, total=len(tasks))
        recordings = []
        for index, recording in enumerate(workers.perform(tasks), 1):
            recordings.append(recording)
            progress.update(bar, completed=index)
        progress.remove_task(bar)
        return recordings

    tasks = [
        Task(choice=choice, policy=policy, predictor=predictor, seed=seed, model=model)
        for policy, predictor in variants
        for seed in seeds
    ]
    alone = [client.name for client in suite.clients] if suite.has_alone else []
    # Nobody else is there to whom it matters what is expected: one predictor's runs serve for all.
    tasks += [
        Task(choice=choice, policy=ALONE_POLICY, predictor=variants[0].predictor, seed=seed, alone=name, model=model)
        for name in alone
        for seed in seeds
    ]
    recordings = perform(tasks, f"{suite.name}: {', '.join(dict.fromkeys(variant.policy for variant in variants))}")
    each = [recordings[start : start + len(seeds)] for start in range(0, len(recordings), len(seeds))]
    capacities: dict[Variant, float] = {}
    if suite.has_capacity and choice.rate is None:
        for variant in variants:
            task = Task(choice=choice, policy=variant.policy, predictor=variant.predictor, seed=seeds[0], model=model)
            capacities[variant] = capacity(task, perform=perform)
    return Outcomes(
        suite=suite.name,
        seeds=seeds,
        by_variant=dict(zip(variants, each, strict=False)),
        alone=dict(zip(alone, each[len(variants) :], strict=True)),
        capacity_rps=capacities,
    )


def _make_directory(directory: Path) -> None:
    """Before the runs, which may take long."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--report {directory}: {error.strerror}") from error


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """What was chosen beside suite, policies and seeds, in words."""
    words = {predictor: _PREDICTORS[predictor] for predictor in _predictors(args)}
    if len(words) == 1:
        return {"predicted lengths": words.popitem()[1]}
    return {"predicted lengths": "; ".join(f"{predictor}: {text}" for predictor, text in words.items())}


def _predictors(args: argparse.Namespace) -> list[Predictor]:
    return list(dict.fromkeys(map(Predictor, args.predictor or [_DEFAULT_PREDICTOR])))


def _again(
    args: argparse.Namespace, choice: SuiteChoice, policies: Sequence[str], seeds: Sequence[int], directory: Path
) -> str:
    """The command that gives the same report."""
    words = [args.suite, *([str(args.file)] if args.file else []), "--policy", *policies, "--seed", *map(str, seeds)]
    if args.predictor:
        words += ["--predictor", *_predictors(args)]
    if choice.speed != 1.0:
        words += ["--speed", f"{choice.speed:g}"]
    for option, value in (
        ("lengths", choice.lengths),
        ("length-model", args.length_model),
        ("span", choice.span_s),
        ("rate", choice.rate),
        ("backends", choice.num_backends),
        ("model", choice.model),
    ):
        if value is not None:
            words += [f"--{option}", str(value)]
    if args.no_chunking:
        words.append("--no-chunking")
    return shlex.join(["fairlane", "simulate", *words, "--report", str(directory)])


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return value


def _span(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= MAX_SPAN_S:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0 up to {MAX_SPAN_S:,}")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1_000.0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and below 1,000")
    return value
