"""Which form of ``router_ext.core`` a process runs: its sources, or the same sources compiled to machine code.

There is one implementation, the sources. ``fairlane compile`` (``ops.compile``) hands them to mypyc and keeps what
comes out in a folder of the user's cache, under a name made of every byte that went in::

    CACHE/core/lock                       held while somebody builds
    CACHE/core/<digest>/manifest.json     {"modules": {name: file}, "files": {file: sha256}, ...}
    CACHE/core/<digest>/*.so

Nothing compiled lies beside a source, so an edited source is never shadowed: its digest names a build that is not
there. A build is loaded whole or not at all: every file is compared with the manifest first.

``activate`` must come before anything imports ``router_ext.core``, hence this module imports nothing of it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from router_ext.errors import FairlaneError, SettingsError

CORE_VARIABLE = "FAIRLANE_CORE"
CACHE_VARIABLE = "FAIRLANE_CACHE"
VARIABLES = (CORE_VARIABLE, CACHE_VARIABLE, "HOME", "XDG_CACHE_HOME")
"""What decides which core a process runs; whoever starts one with a narrow environment hands these on."""

CHOICES = ("auto", "compiled", "source")
COMMAND = "`fairlane compile`"
MANIFEST = "manifest.json"
PACKAGE = "router_ext.core"
_LAYOUT = b"1"
"""Part of the digest: another number makes every build a stranger, whatever the sources."""


class NoBuild(FairlaneError):
    """No compiled build that may be loaded; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A verified build. ``modules``: names of Python modules and their files."""

    folder: Path
    modules: Mapping[str, Path]
    mypy: str


def sources(package: Path | None = None) -> list[Path]:
    """Files that make up the core, below the package folder and relative to it: what a build depends on."""
    package = package or _package()
    core = sorted(path.relative_to(package) for path in (package / "core").rglob("*.py"))
    return [Path("errors.py"), *core]


def digest(package: Path | None = None) -> str:
    """Name of the build that fits these sources and this interpreter. Cost: reads about 300 kB."""
    package = package or _package()
    found = sha256(b"\0".join((_LAYOUT, EXTENSION_SUFFIXES[0].encode())))
    for path in sources(package):
        content = (package / path).read_bytes()
        found.update(f"\0{path.as_posix()}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()[:32]


def builds_folder(environ: Mapping[str, str]) -> Path:
    """Where builds are kept: ``core`` in ``FAIRLANE_CACHE``, else in ``fairlane`` of the user's cache folder."""
    if environ.get(CACHE_VARIABLE):
        return Path(environ[CACHE_VARIABLE]).absolute() / "core"
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(cache).absolute() / "fairlane" / "core"


def checksum(file: Path) -> str:
    """As the manifest states it."""
    return sha256(file.read_bytes()).hexdigest()


def find(environ: Mapping[str, str]) -> Build:
    """The build that fits the sources as they are.

    Raises:
        NoBuild: there is none, another user could have written it, or it is damaged.
    """
    folder = builds_folder(environ)
    name = digest()
    if not (folder / name).is_dir():
        raise NoBuild(f"no build of these sources in {folder}; {COMMAND} makes one")
    return verify(folder / name)


def verify(folder: Path) -> Build:
    """Read a build's manifest and compare every file with it.

    Raises:
        NoBuild: naming the folder and what is wrong.
    """
    try:
        # Whoever may write here can have this process do anything.
        owned = folder.stat()
        if owned.st_uid not in (0, os.geteuid()) or owned.st_mode & 0o022:
            raise NoBuild(f"the build in {folder} could have been written by another user; remove it")
        manifest = json.loads((folder / MANIFEST).read_bytes())
        for file, expected in manifest["files"].items():
            if checksum(folder / file) != expected:
                raise NoBuild(f"the build in {folder} is damaged ({file} has changed); {COMMAND} makes it anew")
        modules = {str(name): folder / file for name, file in manifest["modules"].items()}
        return Build(folder=folder, modules=modules, mypy=str(manifest["mypy"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoBuild(
            f"the build in {folder} is damaged ({type(error).__name__}: {error}); {COMMAND} makes it anew"
        ) from None


def activate(environ: Mapping[str, str]) -> None:
    """Decide which core this process imports, by ``FAIRLANE_CORE``; ``running`` tells which.

    ``auto`` (or unset): the compiled one if there is a build that fits, else the sources. ``compiled``: that or an
    error. ``source``: the sources. A process that has imported the core already keeps what it has.

    Raises:
        SettingsError: another word. NoBuild: ``compiled`` was asked for and cannot be had.
    """
    wanted = _wanted(environ)
    if any(name.startswith(f"{PACKAGE}.") for name in sys.modules):
        if wanted not in ("auto", running()):
            raise NoBuild(f"{CORE_VARIABLE} is {wanted}, but this process has imported the {running()} core already")
    elif wanted != "source" and running() == "source":
        try:
            load(find(environ))
        except NoBuild:
            if wanted == "compiled":
                raise


def why_source(environ: Mapping[str, str]) -> str | None:
    """Why this process runs the sources although it would run a build if there were one, for a log; else None."""
    if running() == "compiled" or _wanted(environ) == "source":
        return None
    try:
        return f"{find(environ).folder} came too late or does not load"
    except NoBuild as error:
        return error.message


def _wanted(environ: Mapping[str, str]) -> str:
    wanted = environ.get(CORE_VARIABLE) or "auto"
    if wanted not in CHOICES:
        raise SettingsError(f"{CORE_VARIABLE} must be one of {', '.join(CHOICES)}, not {wanted!r}")
    return wanted


def running() -> str:
    """``compiled`` or ``source``: what this process has imported, or would."""
    module = sys.modules.get(f"{PACKAGE}.scheduler")
    if module is None:
        return "compiled" if any(isinstance(finder, _Finder) for finder in sys.meta_path) else "source"
    return "compiled" if str(module.__file__).endswith(tuple(EXTENSION_SUFFIXES)) else "source"


class _Finder(MetaPathFinder):
    """Finds the modules of a build, in front of all other finders. Everything else is found as ever."""

    def __init__(self, build: Build) -> None:
        self._modules = build.modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._modules.get(fullname)
        if file is None:
            return None
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, str(file)))


def load(build: Build) -> None:
    """Put a build in front of the sources, for what this process imports from now on.

    Raises:
        NoBuild: it does not load here, as when it was made on a machine with other libraries.
    """
    finder = _Finder(build)
    sys.meta_path.insert(0, finder)
    try:
        # The machine code lies in the one module outside the package; the others only lead there.
        for name in build.modules:
            if not name.startswith(f"{PACKAGE}."):
                importlib.import_module(name)
    except ImportError as error:
        sys.meta_path.remove(finder)
        raise NoBuild(
            f"the build in {build.folder} cannot be loaded ({error}); {COMMAND} --force makes it anew"
        ) from None


def _package() -> Path:
    return Path(__file__).resolve().parent
