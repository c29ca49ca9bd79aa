"""``fairlane compile``: the scheduler's core as machine code, for decisions that take half the time.

Everything works without: the core is plain Python, and what is compiled are the same sources. Needed once, where it is
run: a C compiler, Python's headers, mypy and setuptools (``pip install 'fairlane[compile]'``). ``compiled`` says where
builds are kept and which process uses them.

A build happens in a folder beside its place and moves there by a rename, so that nobody sees half of one; builders
wait for each other. Of older builds a few stay, for other branches and for processes that start meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from router_ext import compiled
from router_ext.errors import FairlaneError

_OPTIMISATION = "2"
"""Of the C compiler. 3 made no decision faster than the noise, at a larger build."""

_INTERPRETED = frozenset({"core/config.py", "core/knobs.py", "core/invariants.py"})
"""Configuration is read once, and looked at as dataclasses with metadata, which mypyc does not keep. The audit is
nothing that anybody waits for, and would be a tenth of what the C compiler has to do."""

_KEPT = 4
_BUILDER = Path(__file__).with_name("mypyc_build.py")
_TAIL_LINES = 15
_DRAFT = ".draft-"


class CompileError(FairlaneError):
    """The core could not be compiled; the message says what is missing or ends with what the compiler said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="compile even if there is a build of these sources")
    parser.add_argument("--json", action="store_true", help="print one JSON object, progress goes to stderr")


def run(args: argparse.Namespace) -> int:
    """Make the build that fits the sources, unless it is there."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    began = time.monotonic()
    with progress:
        task = progress.add_task("compiling the core", total=None)
        found, is_new = build(
            os.environ,
            is_forced=args.force,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            on_wait=lambda: progress.update(task, description="waiting for another `fairlane compile`"),
        )
    took_s = round(time.monotonic() - began, 1)
    if args.json:
        entry = {"folder": str(found.folder), "is_new": is_new, "took_s": took_s, "modules": len(found.modules)}
        print(json.dumps(entry | {"mypy": found.mypy}))
    elif is_new:
        print(f"compiled the core in {took_s:g} s: {found.folder}")
    else:
        print(f"the core is compiled already: {found.folder}")
    return 0


def build(
    environ: Mapping[str, str],
    *,
    is_forced: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[compiled.Build, bool]:
    """The build of the sources as they are, and whether it was made by this call.

    Args:
        is_forced: make it even if there is a sound one.
        on_progress: told how many C files of how many have been begun. on_wait: told once if another builds.

    Raises:
        CompileError: a tool is missing, or one of them failed.

    Cost: about half a minute on two cores; a few milliseconds if the build is there.
    """
    if not is_forced and (found := _sound(environ)) is not None:
        return found, False
    missing = missing_tools(environ)
    if missing:
        raise CompileError(f"{'; '.join(missing)}. Nothing depends on it: without, the core runs interpreted")
    folder = compiled.builds_folder(environ)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _alone(folder, on_wait):
            # The one that was waited for may have made it.
            if not is_forced and (found := _sound(environ)) is not None:
                return found, False
            return _make(folder, on_progress), True
    except OSError as error:
        raise CompileError(
            f"cannot keep a build in {folder}: {error} ({compiled.CACHE_VARIABLE} names another)"
        ) from None


def missing_tools(environ: Mapping[str, str]) -> list[str]:
    """What has to be installed before the core can be compiled, a sentence each."""
    missing = []
    if any(importlib.util.find_spec(module) is None for module in ("mypyc", "setuptools")):
        missing.append("mypy with mypyc, or setuptools, is not installed: pip install 'fairlane[compile]'")
    compiler = shlex.split(environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler, path=environ.get("PATH")) is None:
        missing.append(f"there is no C compiler ({compiler}): on Debian and Ubuntu apt-get install gcc libc6-dev")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        missing.append(f"Python's headers are not in {headers}: on Debian and Ubuntu apt-get install python3-dev")
    return missing


def _sound(environ: Mapping[str, str]) -> compiled.Build | None:
    """The build of these sources, by the mypy that is installed (or any, if none is)."""
    try:
        found = compiled.find(environ)
    except compiled.NoBuild:
        return None
    return found if found.mypy == (_mypy_version() or found.mypy) else None


def _mypy_version() -> str | None:
    try:
        return importlib.metadata.version("mypy")
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _alone(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """One builder at a time; the kernel lets go of the lock of one that was killed."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, on_progress: Callable[[int, int], None]) -> compiled.Build:
    for left in folder.glob(f"{_DRAFT}*"):
        shutil.rmtree(left, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=folder))
    try:
        work = draft / "work"
        _copy_sources(work / "router_ext")
        # Of the copy: the sources may change while this runs.
        name = compiled.digest(work / "router_ext")
        _run_builder(work, on_progress)
        result = draft / "result"
        result.mkdir(mode=0o755)
        _collect(work / "out", result)
        _try_out(result)
        place = folder / name
        if place.exists():
            place.rename(draft / "damaged")
        result.rename(place)
        _prune(folder, place)
        return compiled.verify(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy_sources(target: Path) -> None:
    package = Path(compiled.__file__).parent
    for path in [Path("__init__.py"), *compiled.sources()]:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package / path, target / path)


def _run_builder(work: Path, on_progress: Callable[[int, int], None]) -> None:
    modules = [
        f"router_ext/{path.as_posix()}"
        for path in compiled.sources(work / "router_ext")
        if path.parts[0] == "core" and path.name != "__init__.py" and path.as_posix() not in _INTERPRETED
    ]
    jobs = str(len(os.sched_getaffinity(0)))
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-P", str(_BUILDER), _OPTIMISATION, jobs, "out", *modules],
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as builder:
        assert builder.stdout is not None
        try:
            for line in builder.stdout:
                match line.split():
                    case [done, total] if done.isdigit() and total.isdigit():
                        on_progress(int(done), int(total))
                    case _:
                        said.append(line.rstrip())
        finally:
            builder.terminate()
    if builder.returncode != 0:
        raise CompileError(
            "\n".join(["mypyc or the C compiler failed; the end of what they said:", *said[-_TAIL_LINES:]])
        )


def _collect(output: Path, result: Path) -> None:
    """Move the extension modules into one flat folder and write the manifest."""
    modules, files = {}, {}
    for path in sorted(output.rglob("*.so")):
        name = ".".join(path.relative_to(output).parts).split(".cpython-", 1)[0].split(".abi", 1)[0]
        file = f"{name}.so"
        path.rename(result / file)
        (result / file).chmod(0o755)
        modules[name] = file
        files[file] = compiled.checksum(result / file)
    manifest = {"modules": modules, "files": files, "mypy": _mypy_version(), "python": sys.version}
    (result / compiled.MANIFEST).write_text(json.dumps(manifest, indent=1))


def _try_out(result: Path) -> None:
    """Import every module in a fresh interpreter."""
    program = (
        "import importlib, pathlib, sys\n"
        "from router_ext import compiled\n"
        "build = compiled.verify(pathlib.Path(sys.argv[1]))\n"
        "compiled.load(build)\n"
        "for name in build.modules: importlib.import_module(name)\n"
        "sys.exit(compiled.running() != 'compiled')\n"
    )
    root = Path(compiled.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(result)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CompileError(f"the compiled core does not load: {done.stderr.strip()[-1_000:]}")


def _prune(folder: Path, newest: Path) -> None:
    builds = [
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(_DRAFT) and path != newest
    ]
    builds.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in builds[_KEPT - 1 :]:
        shutil.rmtree(path, ignore_errors=True)
