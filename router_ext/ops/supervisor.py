"""Runs a set of units: starts them in order, restarts what crashes, stops them in the reverse order.

Single-threaded on purpose: children are told of their parent's death by the thread that started them. All of it runs
in the main thread, where ``KeyboardInterrupt`` (Ctrl-C, and SIGTERM once ``interrupt_on_signals`` is in force) may
come at any point; whatever was being started then is ended by the kernel when this process exits.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from router_ext.errors import FairlaneError
from router_ext.ops import process
from router_ext.ops.embedded import EmbeddedPostgres, EmbeddedServerError, EmbeddedValkey

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
STEADY_S = 60.0
"""A unit that ran for so long starts again with the first pause."""

_LOOK_EVERY_S = 0.2


class StartFailed(FairlaneError):
    """A unit did not become ready; the message ends with the tail of its log."""


class Unit(Protocol):
    """Something the supervisor keeps running. ``log`` is named in messages about it; None: our own output."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> Path | None: ...
    @property
    def pid(self) -> int | None: ...
    def start(self) -> object: ...
    def stop(self) -> object: ...
    def exit_status(self) -> int | None:
        """Of the process that was running and is no more."""
        ...


@dataclass(slots=True, kw_only=True)
class Service:
    """A child process. ``ready`` is polled after the start; None means ready at once.

    ``grace_s``: how long it may take to end after SIGTERM before its session is killed.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path | None
    ready: Callable[[], bool] | None = None
    ready_limit_s: float = 120.0
    grace_s: float = 15.0
    pass_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def exit_status(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def start(self) -> None:
        if self.process is not None:
            process.kill_session(self.process)  # what a crashed parent left of its children
        self.process = process.spawn(self.command, env=self.env, log=self.log, pass_fds=self.pass_fds)

    def wait_ready(self) -> None:
        """Wait for ``ready``.

        Raises:
            StartFailed: it ended, or ``ready_limit_s`` passed.
        """
        if self.ready is None:
            return
        probe = self.ready
        if not process.wait_until(lambda: self.pid is None or probe(), limit_s=self.ready_limit_s, every_s=0.1):
            raise StartFailed(f"{self.name} is not ready after {self.ready_limit_s:.0f} s{self.log_tail()}")
        if self.pid is None:
            raise StartFailed(f"{self.name} {describe_exit(self.exit_status())}{self.log_tail()}")

    def stop(self) -> None:
        if self.process is not None:
            process.stop(self.process, grace_s=self.grace_s)
            process.kill_session(self.process)

    def log_tail(self) -> str:
        """The end of its log, for an error message."""
        if self.log is None:
            return ""
        return f"; the end of {self.log}:\n{process.tail(self.log)}"


@dataclass(slots=True)
class Embedded:
    """A private server as a unit."""

    server: EmbeddedPostgres | EmbeddedValkey

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def log(self) -> Path:
        return self.server.log

    @property
    def pid(self) -> int | None:
        return self.server.pid

    def exit_status(self) -> int | None:
        return None if self.server.process is None else self.server.process.poll()

    def start(self) -> str:
        return self.server.start()

    def stop(self) -> None:
        self.server.stop()


@dataclass(slots=True)
class _Watched:
    unit: Unit
    started: float
    pause_s: float = FIRST_PAUSE_S
    restarts: int = 0
    due: float | None = None


class Supervisor:
    """Owns the units of one state folder.

    Args:
        record: file that names the running children, so that the next start finds what a killed one left; or None.
        say: receives one line per noteworthy event.

    Attributes:
        also: called in every round.
    """

    def __init__(self, record: Path | None, say: Callable[[str], None]) -> None:
        self.also: list[Callable[[], None]] = []
        self._record = record
        self._say = say
        self._watched: list[_Watched] = []

    def start(self, unit: Unit) -> None:
        """Start a unit and watch it from now on."""
        self._watched.append(_Watched(unit, time.monotonic()))
        unit.start()
        self._write_record()

    def watch(self) -> None:
        """Look after the units until interrupted."""
        while True:
            self.look()
            time.sleep(_LOOK_EVERY_S)

    def look(self) -> None:
        """One round: notice what ended, start again what is due."""
        for each in self.also:
            each()
        now = time.monotonic()
        for watched in self._watched:
            if watched.due is None and watched.unit.pid is None:
                if now - watched.started >= STEADY_S:
                    watched.pause_s = FIRST_PAUSE_S
                watched.due = now + watched.pause_s
                how = describe_exit(watched.unit.exit_status())
                where = "" if watched.unit.log is None else f" (log: {watched.unit.log})"
                self._say(f"{watched.unit.name} {how}; starting it again in {watched.pause_s:g} s{where}")
                watched.pause_s = min(watched.pause_s * 2, LONGEST_PAUSE_S)
            elif watched.due is not None and now >= watched.due:
                self._restart(watched)

    def _restart(self, watched: _Watched) -> None:
        watched.restarts += 1
        watched.started = time.monotonic()
        watched.due = None
        try:
            watched.unit.start()
        except (EmbeddedServerError, OSError) as error:
            self._say(f"{watched.unit.name}: {error}")
        else:
            self._say(f"{watched.unit.name} started again (restart {watched.restarts})")
            self._write_record()

    def stop(self) -> None:
        """Stop every unit, the last started first."""
        while self._watched:
            unit = self._watched[-1].unit
            if unit.pid is not None:
                self._say(f"stopping {unit.name}")
            unit.stop()
            self._watched.pop()
        if self._record is not None:
            self._record.unlink(missing_ok=True)

    def end_leftovers(self, grace_s: float = 10.0) -> None:
        """End children of an earlier supervisor that was killed; the kernel has already told them to go."""
        if self._record is None:
            return
        try:
            recorded: list[tuple[str, int, int]] = [tuple(entry) for entry in json.loads(self._record.read_text())]
        except (OSError, ValueError):
            return

        def left() -> list[tuple[str, int, int]]:
            return [entry for entry in recorded if process.started_at(entry[1]) == entry[2]]

        for name, pid, _ in left():
            self._say(f"an earlier {name} (process {pid}) is still ending")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        process.wait_until(lambda: not left(), limit_s=grace_s)
        for _, pid, _ in left():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        process.wait_until(lambda: not left(), limit_s=5.0)
        self._record.unlink(missing_ok=True)

    def _write_record(self) -> None:
        if self._record is None:
            return
        # The private servers keep their own record and end their own leftovers.
        services = [watched.unit for watched in self._watched if isinstance(watched.unit, Service)]
        entries = [(unit.name, unit.pid, process.started_at(unit.pid)) for unit in services if unit.pid is not None]
        draft = self._record.with_suffix(".new")
        draft.write_text(json.dumps(entries))
        draft.replace(self._record)


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "is not running"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Within the block SIGTERM, SIGINT and SIGHUP raise ``KeyboardInterrupt`` in the main thread."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ignoring_signals() -> Iterator[None]:
    """Within the block a second Ctrl-C does not break off an orderly stop."""
    previous = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def answers(url: str) -> Callable[[], bool]:
    """A probe: does ``url`` answer 200? Proxies named in the environment are not asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def probe() -> bool:
        try:
            with opener.open(url, timeout=2.0) as answer:
                return int(answer.status) == 200
        except (OSError, http.client.HTTPException):
            return False

    return probe
