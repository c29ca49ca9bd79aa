"""``fairlane compile``: what it needs, what it leaves, and that builders do not meet."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from router_ext import cli, compiled
from router_ext.errors import SettingsError
from router_ext.ops import compile as compiling
from router_ext.ops import stack


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(compiled.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def a_build(folder: Path) -> Path:
    """One that is whole, but of nothing."""
    folder.mkdir(parents=True)
    (folder / compiled.MANIFEST).write_text(json.dumps({"modules": {}, "files": {}, "mypy": compiling._mypy_version()}))
    return folder


def test_without_a_compiler_it_says_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CC", raising=False)
    assert cli.main(["compile"]) == 1
    said = capsys.readouterr().err
    assert "no C compiler" in said
    assert "apt-get install gcc" in said
    assert "the core runs interpreted" in said
    assert list(cache.iterdir()) == []


def test_without_mypyc_it_says_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mypyc" else real(name))
    assert cli.main(["compile"]) == 1
    assert "pip install 'fairlane[compile]'" in capsys.readouterr().err


def test_without_the_headers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert any("python3-dev" in each for each in compiling.missing_tools(os.environ))


def test_a_build_that_is_there_is_not_made_again(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = a_build(cache / "core" / compiled.digest())
    assert cli.main(["compile", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["folder"] == str(place)
    assert printed["is_new"] is False


def test_that_of_another_mypy_is(cache: Path) -> None:
    place = a_build(cache / "core" / compiled.digest())
    (place / compiled.MANIFEST).write_text(json.dumps({"modules": {}, "files": {}, "mypy": "0.1"}))
    assert compiling._sound(os.environ) is None


def test_it_waits_for_another_builder_and_takes_what_that_one_made(cache: Path) -> None:
    folder = cache / "core"
    folder.mkdir()
    waits = threading.Event()
    found: list[tuple[compiled.Build, bool]] = []
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        builder = threading.Thread(target=lambda: found.append(compiling.build(os.environ, on_wait=waits.set)))
        builder.start()
        assert waits.wait(30)
        place = a_build(folder / compiled.digest())
    builder.join(30)
    [(build, is_new)] = found
    assert build.folder == place
    assert not is_new


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(compiled.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(compiling.CompileError, match="FAIRLANE_CACHE names another"):
        compiling.build(os.environ)


def test_of_older_builds_a_few_stay(tmp_path: Path) -> None:
    for age in range(8):
        os.utime(a_build(tmp_path / f"build{age}"), (1_000 - age, 1_000 - age))
    newest = a_build(tmp_path / "newest")
    os.utime(newest, (0, 0))
    compiling._prune(tmp_path, newest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build0", "build1", "build2", "newest"]


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"FAIRLANE_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c/core"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/fairlane/core"),
        ({"HOME": "/h"}, "/h/.cache/fairlane/core"),
    ],
)
def test_builds_lie_in_the_users_cache(environ: dict[str, str], folder: str) -> None:
    assert str(compiled.builds_folder(environ)) == folder


def test_another_word_for_the_core_is_refused() -> None:
    with pytest.raises(SettingsError, match="FAIRLANE_CORE must be one of auto, compiled, source, not 'fast'"):
        compiled.activate({"FAIRLANE_CORE": "fast"})


def test_a_process_that_has_one_core_cannot_get_the_other() -> None:
    from router_ext.core import scheduler  # noqa: F401 (imported, that is the point)

    other = "source" if compiled.running() == "compiled" else "compiled"
    with pytest.raises(compiled.NoBuild, match="has imported the"):
        compiled.activate({"FAIRLANE_CORE": other})


def test_the_router_of_up_is_told_which_core() -> None:
    given = {"FAIRLANE_CORE": "source", "FAIRLANE_CACHE": "/c", "FAIRLANE_SECRET_KEY": "s"}
    assert stack.base_environment(given).items() >= {("FAIRLANE_CORE", "source"), ("FAIRLANE_CACHE", "/c")}
    assert "FAIRLANE_SECRET_KEY" not in stack.base_environment(given)


def test_a_digest_depends_on_every_byte_of_every_source(tmp_path: Path) -> None:
    package = Path(compiled.__file__).parent
    shutil.copytree(package / "core", tmp_path / "core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "errors.py", tmp_path)
    before = compiled.digest(tmp_path)
    assert before == compiled.digest()
    seen = {before}
    for path in compiled.sources(tmp_path):
        whole = (tmp_path / path).read_bytes()
        (tmp_path / path).write_bytes(whole + b" ")
        seen.add(compiled.digest(tmp_path))
        (tmp_path / path).write_bytes(whole)
    assert len(seen) == len(compiled.sources()) + 1
    (tmp_path / "core" / "bounds.py").rename(tmp_path / "core" / "bounds2.py")
    assert compiled.digest(tmp_path) not in seen


def _fields_of_late_types(source: str) -> list[str]:
    """Class fields whose type is imported for the type checker only: machine code looks for it when it is loaded."""
    tree = ast.parse(source)
    late = {
        name.asname or name.name
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
    return [
        f"{each.name}.{ast.unparse(field.target)}"
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        for field in each.body
        if isinstance(field, ast.AnnAssign)
        and late & {name.id for name in ast.walk(field.annotation) if isinstance(name, ast.Name)}
    ]


@pytest.mark.parametrize("source", compiled.sources(), ids=lambda source: source.stem)
def test_no_class_of_the_core_is_built_of_a_type_that_is_not_there_yet(source: Path) -> None:
    package = Path(compiled.__file__).parent
    assert not _fields_of_late_types((package / source).read_text())


def test_such_a_class_is_found() -> None:
    late = "if TYPE_CHECKING:\n    from core.events import Spec\nclass Heir:\n    request: Spec | None\n    age: int\n"
    assert _fields_of_late_types(late) == ["Heir.request"]
