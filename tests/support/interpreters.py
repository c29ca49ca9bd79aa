"""Programs run in interpreters of their own, where the order of hashes is another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def printed(program: str, *args: str, hash_seed: int) -> str:
    """What a program prints under ``PYTHONHASHSEED``, with the project's packages and tests to import."""
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(_ROOT)},
        cwd=_ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout
