"""Child processes that end with their parent: start, wait, stop.

Every child gets a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone, which then stops its
children in order. On Linux the kernel signals a child when the parent dies, whatever killed it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_LAUNCH = str(Path(__file__).with_name("launch.py"))
_LOG_BYTES = 16 * 1024 * 1024


def spawn(
    command: Sequence[str],
    *,
    log: Path | None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command`` with both outputs appended to ``log`` (0600; cut down once it passes 16 MB); None: our own.

    Args:
        death_signal: sent to the child when the calling thread ends.
        env: the whole environment; None inherits ours.
        pass_fds: descriptors the child keeps under their numbers.
    """
    with contextlib.nullcontext(None) if log is None else _open_log(log) as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), death_signal.name, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )


def stop(process: subprocess.Popen[bytes], *, how: signal.Signals = signal.SIGTERM, grace_s: float = 10.0) -> int:
    """Ask the child to end with ``how``; after ``grace_s`` seconds kill its whole session. Returns the exit status."""
    if process.poll() is None:
        process.send_signal(how)
        try:
            return process.wait(grace_s)
        except subprocess.TimeoutExpired:
            kill_session(process)
    return process.wait()


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the child and what it started in its session's process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def wait_until(condition: Callable[[], bool], *, limit_s: float, every_s: float = 0.02) -> bool:
    """Poll ``condition`` until it holds; False when ``limit_s`` seconds passed first."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
    except OSError:
        return ""


def run(
    command: Sequence[str], *, env: Mapping[str, str], given: str = "", keeps_errors: bool = True
) -> tuple[int, str, str]:
    """Run a command to its end in its own session, ``given`` on stdin: (exit status, stdout, stderr).

    ``keeps_errors``: False leaves it our stderr, for progress; "" is returned.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), "SIGTERM", *command],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if keeps_errors else None,
        text=True,
        env=dict(env),
        start_new_session=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr or ""


def started_at(pid: int) -> int | None:
    """Kernel ticks at which a live process began: with its number, its identity. None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def command_line(pid: int) -> list[str]:
    """Arguments of a running process; empty when it is gone (or on systems without ``/proc``)."""
    try:
        return [part.decode("utf-8", "replace") for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    except OSError:
        return []


@contextlib.contextmanager
def _open_log(log: Path) -> Iterator[int]:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size > _LOG_BYTES:
            kept = tail(log, 200).encode()
            os.ftruncate(descriptor, 0)
            os.write(descriptor, kept + b"\n")
        yield descriptor
    finally:
        os.close(descriptor)
