"""A compiled core is used where it fits the sources to the byte and is whole; anything else runs the sources."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.exchange import call
from support.modelserver import model_server
from support.routers import Setup, backend, router
from support.tenants import new_tenant

from router_ext import compiled
from tests.support.cores import ROOT, built, run

_WHICH = """
import json, os, sys
from router_ext import compiled
compiled.activate(os.environ)
from router_ext.core.scheduler import Scheduler
from router_ext.core.units import *
import router_ext.core.kv as kv
print(json.dumps([compiled.running(), compiled.why_source(os.environ), getattr(kv, "EDITED", None)]))
"""


def which(core: str = "auto", *, root: Path = ROOT, cache: Path | None = None) -> tuple[str, str | None, str | None]:
    """The core that runs, why it is the sources, and what an edit left in it."""
    done = run(_WHICH, core=core, root=root, environment={} if cache is None else {compiled.CACHE_VARIABLE: str(cache)})
    assert done.returncode == 0, done.stderr
    running, why, edited = json.loads(done.stdout)
    return running, why, edited


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the sources."""
    shutil.copytree(ROOT / "router_ext", tmp_path / "copy" / "router_ext", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with a copy of the build, to be damaged."""
    build = built()
    shutil.copytree(build.folder, tmp_path / "cache" / "core" / build.folder.name)
    return tmp_path / "cache"


def the_build(cache: Path) -> Path:
    return cache / "core" / built().folder.name


def test_a_build_of_these_very_sources_is_used_wherever_they_lie(copy: Path) -> None:
    built()
    assert which(root=copy) == ("compiled", None, None)
    assert which("compiled", root=copy) == ("compiled", None, None)
    assert which("source", root=copy) == ("source", None, None)


@pytest.mark.parametrize("edit", ["core/kv.py", "core/config.py", "errors.py"])
def test_an_edited_source_is_never_shadowed(copy: Path, edit: str) -> None:
    built()
    with (copy / "router_ext" / edit).open("a") as file:
        file.write("\n")
    with (copy / "router_ext" / "core" / "kv.py").open("a") as file:
        file.write('EDITED = "yes"\n')
    running, why, edited = which(root=copy)
    assert (running, edited) == ("source", "yes")
    assert why is not None
    assert "no build of these sources" in why
    assert "`fairlane compile`" in why


def test_a_source_more_is_another_core(copy: Path) -> None:
    built()
    (copy / "router_ext" / "core" / "further.py").touch()
    assert which(root=copy)[0] == "source"


def _cut_short(build: Path) -> None:
    [shared] = build.glob("*__mypyc.so")
    shared.write_bytes(shared.read_bytes()[:100_000])


def _one_bit(build: Path) -> None:
    path = build / "router_ext.core.kv.so"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _open_to_others(build: Path) -> None:
    build.chmod(0o777)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut_short, "has changed"),
        (_one_bit, "kv.so has changed"),
        (lambda build: (build / "router_ext.core.kv.so").unlink(), "kv.so"),
        (lambda build: (build / compiled.MANIFEST).unlink(), compiled.MANIFEST),
        (lambda build: (build / compiled.MANIFEST).write_text('{"modules": '), "damaged"),
        (lambda build: (build / compiled.MANIFEST).write_text("[]"), "damaged"),
        (_open_to_others, "another user"),
    ],
)
def test_a_build_that_is_not_whole_is_left_alone(cache: Path, damage: Callable[[Path], object], said: str) -> None:
    assert which(cache=cache)[0] == "compiled"
    damage(the_build(cache))
    running, why, _ = which(cache=cache)
    assert running == "source"
    assert why is not None
    assert said in why
    assert str(the_build(cache)) in why
    refused = run(_WHICH, core="compiled", environment={compiled.CACHE_VARIABLE: str(cache)})
    assert refused.returncode != 0
    assert said in refused.stderr


def test_machine_code_that_does_not_load_is_not_used(cache: Path) -> None:
    """As that of a machine with other libraries: whole, but not for this interpreter."""
    build = the_build(cache)
    [shared] = build.glob("*__mypyc.so")
    shared.write_bytes(b"\x7fELF of another machine")
    manifest = json.loads((build / compiled.MANIFEST).read_text())
    manifest["files"][shared.name] = compiled.checksum(shared)
    (build / compiled.MANIFEST).write_text(json.dumps(manifest))
    assert which(cache=cache)[0] == "source"


def test_the_processes_of_a_simulation_run_the_core_of_the_one_that_asks() -> None:
    built()
    program = """
if __name__ == "__main__":
    import os
    from router_ext import compiled
    compiled.activate(os.environ)
    from router_ext.sim.runs import Task, Workers
    from router_ext.sim.suites import SuiteChoice
    with Workers(2) as workers:
        os.environ["FAIRLANE_CORE"] = "auto"
        print(workers._pool.submit(compiled.running).result())
        task = Task(choice=SuiteChoice(name="burst"), policy="slo-fair", seed=1)
        print([recording.digest for recording in workers.perform([task, task])])
"""
    said = {core: run(program, core=core).stdout.splitlines() for core in ("compiled", "source")}
    assert [lines[0] for lines in said.values()] == ["compiled", "source"]
    assert said["compiled"][1] == said["source"][1]


def test_a_router_runs_compiled_and_says_so() -> None:
    built()
    with (
        model_server("--sim-step-ms", "1", "--sim-mean-tokens", "0") as server,
        router(Setup(backends=[backend(server.port)]), environment={compiled.CORE_VARIABLE: "compiled"}) as running,
    ):
        assert running.metric("fairlane_build_info", core="compiled") == 1
        tenant = new_tenant(running)
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 20, "details": True}}
        status, _, answer = call(running.port, "POST", "/generate", body, headers=tenant.headers)
        assert status == 200, answer
        running.wait(running.is_idle)
        assert '"core":"compiled"' in running.log.read_text()
