"""``fairlane predictor evaluate``: a length model on prompts it has not seen, next to baselines in the same run.

Either two folders (``--train``, ``--test``), or one that is split by prompts, near-duplicates together, once per seed
(``--data``, ``--seeds``); then figures are means over the seeds, and ``splits`` has each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from router_ext.errors import SettingsError
from router_ext.ops.predictor.inspect import read_model
from router_ext.ops.predictor.progress import Bar
from router_ext.predict.answers import read_answers
from router_ext.predict.evaluation import evaluate, mean_of, split

_COLUMNS = {
    "mae": "MAE",
    "mae_2048": "cut",
    "median_relative_error": "rel.",
    "r2_log": "R2",
    "spearman": "rho",
    "accuracy_2": "acc2",
    "accuracy_5": "acc5",
    "coverage_80": "80%",
    "coverage_90": "90%",
}
_LEGEND = (
    "cut: MAE with both sides cut at 2,048; rel.: median relative error; R2: of ln(1 + tokens); rho: Spearman's; "
    "acc: share in the right one of 2, of 5 classes; 80%, 90%: share of answers within the interval"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--train", type=Path, metavar="DIR", help="answers to train on")
    parser.add_argument("--test", type=Path, metavar="DIR", help="answers to judge on")
    parser.add_argument("--data", type=Path, metavar="DIR", help="answers to split 80/20 by prompt instead")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="splits of --data")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--model", type=Path, metavar="FILE", help="judge this model instead of training one")
    parser.add_argument("--ablations", action="store_true", help="train without parts as well (minutes each)")
    parser.add_argument("--unseen-models", action="store_true", help="train without a fifth of the models as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object, progress goes to stderr")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    if (args.data is None) == (args.train is None and args.model is None):
        raise SettingsError("give either --train and --test, or --data")
    if args.data is None and args.test is None:
        raise SettingsError("--train needs --test")
    if args.seeds < 1:
        raise SettingsError(f"--seeds {args.seeds} is not at least 1")
    artifact = None if args.model is None else read_model(args.model)
    results = []
    with Bar("evaluation") as bar:
        bar.tell(0.0, "reading answers")
        if args.data is not None:
            answers = read_answers(args.data)
            pairs = [(args.seed + i, *split(answers, args.seed + i)) for i in range(args.seeds)]
        else:
            train_rows = [] if args.train is None else read_answers(args.train)
            pairs = [(args.seed, train_rows, read_answers(args.test))]
        for i, (seed, train_rows, test_rows) in enumerate(pairs):
            results.append(
                evaluate(
                    train_rows,
                    test_rows,
                    seed=seed,
                    artifact=artifact,
                    ablations=args.ablations,
                    unseen=args.unseen_models,
                    on_progress=_part(bar, i, len(pairs)),
                )
            )
    found = results[0] if len(results) == 1 else {**mean_of(results), "splits": results}
    if args.json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
    else:
        _print(found)
    return 0


def _part(bar: Bar, i: int, n: int) -> Callable[[float, str], None]:
    """Progress of the i-th split of n."""

    def tell(share: float, line: str) -> None:
        bar.tell((i + share) / n, f"split {i + 1} of {n}, {line}" if line and n > 1 else line)

    return tell


def _print(found: Mapping[str, Any]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in _COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    rows = {"cold": found["model"], **{f"  {name}": of for name, of in found.get("ablations", {}).items()}}
    rows |= {"whole answers": found["whole"], "with histories": found["stream"], "warm": found["warm"]}
    rows |= {"  same rows, cold": found["warm"].get("cold_same_rows") or {}}
    rows |= dict(found["baselines"])
    for name, of in rows.items():
        table.add_row(name, *(_number(column, of.get(column)) for column in _COLUMNS))
    console.print(table)
    console.print(_LEGEND, style="dim")
    console.print(_held_out(found))
    model, stream, runaway = found["model"], found["stream"], found["runaway"]
    if "mae_over_boosting" in model:
        console.print(f"MAE over boosting's: {model['mae_over_boosting']:.4f}")
    console.print(f"prediction: p50 {model['predict_us']['p50']:,.0f} us, p99 {model['predict_us']['p99']:,.0f} us")
    console.print(
        f"runaway: {runaway['share']:.2%} of answers, predicted {runaway['predicted_share']:.2%}, "
        f"AUC {runaway['auc']:.3f}"
    )
    if stream.get("median_relative_error_final") is not None:
        console.print(
            f"median relative error of a new tenant: {stream['median_relative_error_at_200']:.3f} after 200 requests, "
            f"{stream['median_relative_error_final']:.3f} at the end; MAE with histories over cold: "
            f"{stream['mae_over_cold']:.4f}"
        )
    for kind, of in found["coverage"].items():
        worst = list(of.items())[:3]
        console.print(
            f"lowest coverage of 90% {kind.replace('_', ' ')}: "
            + ", ".join(f"{name} {figures['coverage_90']:.3f}" for name, figures in worst)
        )
    if found.get("unseen_models"):
        cold, later = found["unseen_models"]["cold"], found["unseen_models"]["with_history"]
        console.print(
            f"models not trained on: MAE {cold['mae']:.1f} cold, {later['mae']:.1f} with histories; "
            f"90% covers {cold['coverage_90']:.3f} and {later['coverage_90']:.3f}"
        )


def _held_out(found: Mapping[str, Any]) -> str:
    """Whether the figures are of prompts that were new to the model."""
    told = [of["data"]["seen_by_model"] for of in found.get("splits", [found])]
    if None in told:
        return "unknown whether these are held out: the model's file does not say what it was trained on"
    known, of = (sum(one[name] for one in told) for name in ("prompts", "of"))
    if known:
        return f"NOT held out: the model was trained on {known:,} of {of:,} prompts"
    return f"held out: the model was trained on none of {of:,} prompts"


def _number(column: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if column.startswith("mae") else f"{value:.3f}"
