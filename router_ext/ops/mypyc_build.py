"""Compiles a copy of ``router_ext.core`` with mypyc: a program of its own, which ``ops.compile`` starts.

    python -P mypyc_build.py OPTIMISATION JOBS OUTPUT MODULE...

It runs in a folder with a copy of the package, takes the modules as paths relative to it, and leaves the extension
modules below ``OUTPUT``. For every C file that is begun it prints a line ``NUMBER TOTAL``. In a process of its own
because mypyc exits on an error and setuptools changes global state.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import setuptools
from mypyc.build import mypycify
from setuptools.command.build_ext import build_ext


def main() -> None:
    optimisation, jobs, output, *modules = sys.argv[1:]
    # No configuration: neither that of a folder above nor the user's. One C file per module, so that several compilers
    # can work at once; whatever a file does not export stays inside the shared library.
    extensions = mypycify(
        ["--config-file=", "--strict", *modules], opt_level=optimisation, debug_level="0", multi_file=True
    )
    total = sum(len(extension.sources) for extension in extensions)
    started = 0
    lock = threading.Lock()

    class Build(build_ext):  # type: ignore[misc]  # setuptools has no types
        """``build_ext`` whose compiler takes the files of one extension ``jobs`` at a time."""

        def build_extensions(self) -> None:
            compile_some = self.compiler.compile

            def compile_one(source: str, options: dict[str, Any]) -> list[str]:
                nonlocal started
                with lock:
                    started += 1
                    print(started, total, flush=True)
                return list(compile_some([source], **options))

            with ThreadPoolExecutor(int(jobs)) as pool:
                self.compiler.compile = lambda sources, **options: [
                    each for done in pool.map(lambda source: compile_one(source, options), sources) for each in done
                ]
                super().build_extensions()

    distribution = setuptools.Distribution({"name": "router_ext_core", "ext_modules": extensions})
    command = Build(distribution)
    command.build_lib, command.build_temp, command.parallel = output, "objects", int(jobs)
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    main()
