"""``fairlane predictor inspect``: what a length model's file says of itself, after its digest was checked."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from router_ext.errors import ArtifactRefused
from router_ext.predict import model_file
from router_ext.predict.predictor import Predictor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a length model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Load it as a router would and print its header."""
    data = read_model(args.file)
    header = Predictor.load(data).header
    _, tensors = model_file.unpack(data)
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        part = name.split(".", 1)[0]
        sizes[part] = sizes.get(part, 0) + tensor.nbytes
    found: dict[str, Any] = {
        "schema": header.schema,
        "version": header.version,
        "feature_version": header.feature_version,
        "built_at": datetime.fromtimestamp(header.built_at_us / 1e6, UTC).isoformat(),
        "digest": header.digest,
        "bytes": len(data),
        "part_bytes": sizes,
        "models": header.models,
        "settings": header.settings,
        "metrics": header.metrics,
    }
    if args.json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
        return 0
    for name, value in found.items():
        print(f"{name:16} {', '.join(value) if isinstance(value, list) else value}")
    return 0


def read_model(path: Path) -> bytes:
    """Bytes of a model's file.

    Raises:
        ArtifactRefused: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactRefused(f"{path}: {error.strerror}") from None
