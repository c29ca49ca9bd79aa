"""A router under a supervisor: its listening socket, and its replacement by a new process while it serves.

    supervisor  owns the listening socket, starts routers on it
    SIGUSR1     (``fairlane restart-router``) a second router is started beside the first and told to take over; once it
                serves, the first one answers what it has and ends. If it does not come to that, the first one serves on
    <folder>/supervisor.lock   who to send the signal to; the lock is the kernel's
    <folder>/restart.json      what became of the newest restart

SIGUSR1, because SIGHUP means that the terminal has gone, and then everything is to end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from router_ext.errors import SettingsError
from router_ext.ops import process
from router_ext.ops.supervisor import Service, describe_exit

LOCK_NAME = "supervisor.lock"
RESULT_NAME = "restart.json"
RESTART_SIGNAL = signal.SIGUSR1
BACKLOG = 4_096

RESTART_LIMIT_S = 90.0
"""A successor that does not serve by then is given up."""

_LEAVING_GRACE_S = 15.0


@dataclass(slots=True, kw_only=True)
class RouterService(Service):
    """A router, and those it is being replaced by or has replaced.

    Attributes:
        folder: the router's state folder. say: receives one line per noteworthy event.
    """

    folder: Path
    say: Callable[[str], None]
    limit_s: float = RESTART_LIMIT_S
    _successor: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _pipe: int = field(default=-1, init=False)
    _began: float = field(default=0.0, init=False)
    _leaving: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    @property
    def pid(self) -> int | None:
        # One that dies while its successor starts needs no other: that one serves in its place.
        for each in (self.process, self._successor):
            if each is not None and each.poll() is None:
                return each.pid
        return None

    def replace(self) -> None:
        """Start a successor, unless one is starting already. ``look`` tells what becomes of it."""
        if self._successor is not None:
            self.say("the router is being replaced already")
            return
        self._began = time.monotonic()
        self._pipe, told = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        env = {**self.env, "FAIRLANE_ROUTER_TAKE_OVER": "true", "FAIRLANE_ROUTER_READY_FD": str(told)}
        try:
            self._successor = process.spawn(self.command, env=env, log=self.log, pass_fds=(*self.pass_fds, told))
        except OSError as error:
            os.close(self._pipe)
            self._ended(f"it could not be started: {error}")
            return
        finally:
            os.close(told)
        self.say(f"replacing the router: process {self._successor.pid} is starting")

    def look(self) -> None:
        """Notice that a successor serves or has failed, and that one that was replaced has ended."""
        self._leaving = [each for each in self._leaving if not self._has_ended(each)]
        successor = self._successor
        if successor is None:
            return
        try:
            serves = os.read(self._pipe, 64).startswith(b"serving")
        except BlockingIOError:
            if successor.poll() is None and time.monotonic() - self._began < self.limit_s:
                return
            serves = False
        os.close(self._pipe)
        self._successor = None
        if serves:
            if self.process is not None:
                self._leaving.append(self.process)
            self.process = successor
            self._ended(None)
            return
        is_late = successor.poll() is None and time.monotonic() - self._began >= self.limit_s
        status = process.stop(successor, grace_s=5.0)
        process.kill_session(successor)
        why = f"it does not serve after {self.limit_s:.0f} s" if is_late else f"it {describe_exit(status)}"
        self._ended(why + self.log_tail())

    def _has_ended(self, leaving: subprocess.Popen[bytes]) -> bool:
        status = leaving.poll()
        if status is None:
            return False
        process.kill_session(leaving)
        self.say(f"the router before (process {leaving.pid}) {describe_exit(status)}")
        return True

    def _ended(self, why: str | None) -> None:
        """A restart is over: say it, and write it down for whoever asked for it."""
        seconds = round(time.monotonic() - self._began, 3)
        if why is None:
            self.say(f"the router was replaced in {seconds:.1f} s; the one before ends with its last answer")
        else:
            self.say(f"the router was not replaced, and serves on: {why}")
        result = {"at": time.time(), "ok": why is None, "why": why, "pid": self.pid, "seconds": seconds}
        draft = self.folder / (RESULT_NAME + ".new")
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(result))
            draft.replace(self.folder / RESULT_NAME)

    def stop(self) -> None:
        others = [*self._leaving, *([self._successor] if self._successor is not None else [])]
        for each in others:
            if each.poll() is None:
                each.send_signal(signal.SIGTERM)
        Service.stop(self)
        for each in others:
            process.stop(each, grace_s=_LEAVING_GRACE_S)
            process.kill_session(each)
        self._leaving.clear()
        self._successor = None


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """The router's listening socket. It outlives the router's process: a restart refuses no connection.

    Raises:
        SettingsError: the port is not to be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        listener.listen(BACKLOG)
        yield listener


@contextlib.contextmanager
def supervising(folder: Path) -> Iterator[None]:
    """Be the one whom ``fairlane restart-router`` asks for this state folder.

    Raises:
        SettingsError: another supervisor is.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(f"another supervisor runs a router in {folder}") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def supervisor_of(folder: Path) -> int | None:
    """Process number of the supervisor of a state folder; None if there is none."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        text = os.pread(descriptor, 20, 0).decode()
        return int(text) if text.isdecimal() else None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def restarts_on_signal() -> Iterator[Callable[[], bool]]:
    """Within the block ``RESTART_SIGNAL`` asks for a restart; yields what tells whether it came since it was asked."""
    asked = [False]

    def note(number: int, frame: object) -> None:
        asked[0] = True

    def was_asked() -> bool:
        found, asked[0] = asked[0], False
        return found

    previous = signal.signal(RESTART_SIGNAL, note)
    try:
        yield was_asked
    finally:
        signal.signal(RESTART_SIGNAL, previous)
