"""``fairlane predictor train``: a length model from a folder of answers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from router_ext.ops.predictor.progress import Bar
from router_ext.predict.answers import Samples, read_answers
from router_ext.predict.training import Options, train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="prompts.jsonl.gz beside outputs.csv.gz, at any depth"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the model is written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--experts", type=int, nargs="+", metavar="K", help="candidates, default: 1 4 8")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Train, write the file, say what it can do."""
    samples = Samples()
    with Bar("training") as bar:
        bar.tell(0.0, "reading answers")
        rows = [samples.of(answer) for answer in read_answers(args.data)]
        options = Options(experts=tuple(args.experts)) if args.experts else Options()
        trained = train(rows, seed=args.seed, built_at_us=int(time.time() * 1e6), on_progress=bar.tell, options=options)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_bytes(trained.artifact)
    if args.json:
        json.dump({"output": str(args.output), "bytes": len(trained.artifact), **trained.metrics}, sys.stdout)
        sys.stdout.write("\n")
        return 0
    fresh = trained.metrics["new_prompts"]
    print(
        f"{args.output}: {len(trained.artifact) / 1e6:.1f} MB, {trained.metrics['rows']:,} answers to "
        f"{trained.metrics['prompts']:,} prompts of {trained.metrics['models']} models, "
        f"{trained.metrics['experts']} experts, {trained.metrics['seconds']:g} s\n"
        f"on prompts that its parts had not seen: MAE {fresh['mae']:.1f}, median relative error "
        f"{fresh['median_relative_error']:.3f}, R2 of logs {fresh['r2_log']:.3f}"
    )
    return 0
