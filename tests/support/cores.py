"""A compiled build of the core for a session, and programs that run under one core or the other."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from router_ext import compiled
from router_ext.ops import compile as compiling

ROOT = Path(__file__).parents[2]


@functools.cache
def built() -> compiled.Build:
    """The build of these sources, in the user's cache, where `make setup` keeps it: made once, if at all."""
    if missing := compiling.missing_tools(os.environ):
        pytest.skip(f"the core cannot be compiled here: {'; '.join(missing)}")
    found, _ = compiling.build(os.environ)
    return found


def run(
    program: str, *args: str, core: str = "auto", root: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python program in an interpreter of its own, with the package in ``root`` and tests to import.

    Args:
        core: what ``FAIRLANE_CORE`` says; the program itself calls ``compiled.activate``.
    """
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *args],
        env={
            **os.environ,
            "PYTHONPATH": f"{root}{os.pathsep}{ROOT}",
            compiled.CORE_VARIABLE: core,
            **(environment or {}),
        },
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )


def printed(program: str, *args: str, core: str) -> str:
    done = run(program, *args, core=core)
    assert done.returncode == 0, done.stderr
    return done.stdout
