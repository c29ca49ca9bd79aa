"""A router that is replaced while it serves: it keeps its connections, its successor decides.

    SERVING --Take--> PAUSED --Taken--> LEFT --all answered--> the process ends
       ^                |
       '---- no Taken --'

PAUSED lasts milliseconds: nothing is decided, everything that happens is kept. When the successor does not take over,
the router goes on with it as if nothing had been. LEFT, every event of its requests goes to the successor's scheduler,
and what that decides comes back (``wire.handover``). So one scheduler decides at any time, with all reservations and
all counters, and a queued request, a slice's end or a failed backend needs no rule of its own.

If the successor dies, running slices go on and what waits waits: the next router in the folder takes it over by the
same words (``Mirror``), within ``ORPHAN_LIMIT_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from router_ext.core.events import Event, TimerFired
from router_ext.core.ids import RequestId
from router_ext.errors import FairlaneError, NoBackend
from router_ext.gateway.leaving import Mirror, action_of
from router_ext.obs.logs import get_logger
from router_ext.wire.handover import (
    TAKEN_LIMIT_S,
    Happened,
    Hello,
    Left,
    LeftClosing,
    LeftPool,
    Message,
    Moved,
    Occurrence,
    Order,
    Take,
    Taken,
    Told,
    decode,
    encode,
    frame_length,
)

if TYPE_CHECKING:
    from router_ext.gateway.engine import PoolEngine

SOCKET_NAME = "handover.sock"
ORPHAN_LIMIT_S = 30.0
"""How long requests wait for another successor once theirs has died."""

MAX_UNREAD_BYTES = 64 << 20
"""A successor that reads so little is given up."""

_log = get_logger(__name__)


class HandoverFailed(FairlaneError):
    """The other side does not take part, or not as agreed."""

    code = "handover_failed"


@contextlib.contextmanager
def reachable(directory: Path) -> Iterator[str]:
    """An address for ``SOCKET_NAME`` in a folder of any depth: the kernel takes paths of 107 bytes at most."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)


def listen_at(directory: Path) -> socket.socket:
    """A listening socket there, in place of a predecessor's; for this user alone."""
    (directory / SOCKET_NAME).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        with reachable(directory) as address:
            listener.bind(address)
    finally:
        os.umask(mask)
    listener.listen(8)
    listener.setblocking(False)
    return listener


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user (or as root)."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user in (os.geteuid(), 0)


class Wire:
    """Messages on one connection. Writing never waits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connection: socket.socket) -> Wire:
        """Take over a connected socket."""
        connection.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def send(self, message: Message) -> None:
        """Hand a message to the kernel or to the buffer before it."""
        if self._writer.is_closing():
            return
        self._writer.write(encode(message))
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._writer.transport.abort()

    async def receive(self) -> Message | None:
        """The next message this version knows; None once the other side has gone.

        Raises:
            ValueError: it speaks something else.
        """
        while True:
            try:
                head = await self._reader.readexactly(4)
                body = await self._reader.readexactly(frame_length(head))
            except (asyncio.IncompleteReadError, OSError):
                return None
            message = decode(body)
            if message is not None:
                return message

    def close(self) -> None:
        self._writer.close()


class Leaver:
    """The side that is replaced.

    Args:
        engines: the router's, by pool. move: puts its books into a folder of their own. on_left: the successor has
            taken over. end_all: ends every request that is left.
        sockets: what it listens on, handed to the successor: the clients' first, then the operator's.
    """

    def __init__(
        self,
        *,
        engines: dict[str, PoolEngine],
        move: Callable[[], None],
        describe: Callable[[], Moved],
        on_left: Callable[[], None],
        end_all: Callable[[FairlaneError], None],
        sockets: Sequence[socket.socket],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._engines = engines
        self._move = move
        self._describe = describe
        self._on_left = on_left
        self._end_all = end_all
        # Of our own: another successor is given them as well, when the first one has died.
        self._sockets = [each.dup() for each in sockets]
        self._mirrors: dict[str, Mirror] = {}
        self._state = _State.SERVING
        self._was_left = False
        self._held: list[tuple[str, Event]] = []
        self._link: Wire | None = None
        self._said: dict[str, list[Occurrence]] = {}
        self._has_ended = False
        self._orphaned: asyncio.TimerHandle | None = None

    @property
    def has_left(self) -> bool:
        """Somebody else decides."""
        return self._was_left

    async def run(self, listener: socket.socket) -> None:
        """Answer successors until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    while True:
                        connection, _ = await self._loop.sock_accept(listener)
                        tasks.create_task(self._meet(connection))
                finally:
                    self._has_ended = True
        finally:
            listener.close()
            self._let_go()
            if self._link is not None:
                self._link.close()

    async def _meet(self, connection: socket.socket) -> None:
        try:
            if not is_same_user(connection):
                connection.close()
                return
            connection.setblocking(False)
            async with asyncio.timeout(TAKEN_LIMIT_S):
                hello = await self._hello(connection)
            _log.info("handover.asked", successor=hello.pid, is_peer=hello.is_peer)
            descriptors: list[int] = []
            if not hello.is_peer:
                self._move()
                descriptors = [each.fileno() for each in self._sockets]
            moved = self._describe()
            moved.has_admin = len(descriptors) > 1
            moved.has_left = self._was_left
            socket.send_fds(connection, [encode(moved)], descriptors)
            await self._hand_over(await Wire.over(connection), hello)
        except (OSError, ValueError, TimeoutError, HandoverFailed) as error:
            _log.warning("handover.failed", reason=str(error) or type(error).__name__)
            connection.close()
        except Exception:  # a defect in here must not take what is being served with it
            _log.exception("handover.failed")
            self._go_on()
            connection.close()

    async def _hello(self, connection: socket.socket) -> Hello:
        head = await self._read(connection, 4)
        message = decode(await self._read(connection, frame_length(head)))
        if not isinstance(message, Hello):
            raise HandoverFailed("the first word is no greeting")
        return message

    async def _read(self, connection: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await self._loop.sock_recv(connection, count - len(data))
            if not part:
                raise HandoverFailed("it left again")
            data += part
        return data

    async def _hand_over(self, wire: Wire, hello: Hello) -> None:
        try:
            if not isinstance(await wire.receive(), Take):
                _log.warning("handover.given_up", successor=hello.pid)
                return
            if self._state is _State.PAUSED:
                raise HandoverFailed("another successor is taking over")
            wire.send(self._pause())
            answer: Message | None = None
            try:
                async with asyncio.timeout(TAKEN_LIMIT_S):
                    answer = await wire.receive()
            except TimeoutError:
                pass
            finally:
                if not isinstance(answer, Taken):
                    self._go_on()
            if not isinstance(answer, Taken):
                _log.warning("handover.given_up", successor=hello.pid)
                return
            wire.send(Taken())
            self._leave(wire)
            _log.info("handover.done", successor=hello.pid, requests=self.num_requests)
            while (message := await wire.receive()) is not None:
                if isinstance(message, Told):
                    self._obey(message)
        finally:
            wire.close()
            self._lost(wire)

    # --- states -----------------------------------------------------------------------------------------------------

    def _pause(self) -> Left:
        self._state = _State.PAUSED
        pools = {}
        for pool, engine in self._engines.items():
            if self._was_left:
                pools[pool] = LeftPool(requests=self._mirrors[pool].requests())
                continue
            counters, heirs, closing = engine.leave(partial(self._event, pool))
            mirror = self._mirrors[pool] = Mirror(self._loop.time)
            mirror.fill(heirs)
            pools[pool] = LeftPool(
                counters=counters,
                requests=mirror.requests(),
                closing=[LeftClosing(backend=c.backend, tokens=c.tokens, rest_s=c.rest_s) for c in closing],
            )
        return Left(pools=pools)

    def _go_on(self) -> None:
        """Nobody has taken over: whoever decided decides on."""
        if self._state is not _State.PAUSED:
            return
        held, self._held = self._held, []
        if self._was_left:
            self._state = _State.LEFT
            for pool, event in held:
                self._event(pool, event)
            return
        self._state = _State.SERVING
        self._mirrors.clear()
        for pool, engine in self._engines.items():
            engine.decide_again([*(event for where, event in held if where == pool), TimerFired()])

    def _leave(self, wire: Wire) -> None:
        former, self._link = self._link, wire
        if former is not None:
            former.close()
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None
        is_first, self._was_left = not self._was_left, True
        self._state = _State.LEFT
        self._said.clear()
        held, self._held = self._held, []
        for pool, event in held:
            self._event(pool, event)
        if is_first:
            self._on_left()

    def _lost(self, wire: Wire) -> None:
        if self._link is not wire:
            return
        self._link = None
        if self._has_ended:
            return  # not lost: this process ends before it, as it should
        _log.warning("handover.successor_lost", requests=self.num_requests, limit_s=ORPHAN_LIMIT_S)
        self._orphaned = self._loop.call_later(ORPHAN_LIMIT_S, self._give_up)

    def _give_up(self) -> None:
        self._let_go()
        self._end_all(NoBackend("The router is shutting down.", code="draining", retry_after_s=2.0))

    def _let_go(self) -> None:
        """Hold no listening socket any more: where nobody accepts, clients are to be refused."""
        for each in self._sockets:
            each.close()

    def cover(self, pool: str, engine: PoolEngine) -> None:
        """A pool that was configured after this router had left is the successor's as well."""
        if self._was_left:
            self._mirrors[pool] = Mirror(self._loop.time)
            engine.leave(partial(self._event, pool))

    @property
    def num_requests(self) -> int:
        """Requests that are known to live here."""
        return sum(len(mirror.entries) for mirror in self._mirrors.values())

    # --- what happens, and what is decided --------------------------------------------------------------------------

    def _event(self, pool: str, event: Event) -> None:
        if self._state is _State.PAUSED:
            self._held.append((pool, event))
            return
        said = self._mirrors[pool].happened(event)
        if said is None or self._link is None:
            return
        if not self._said:
            self._loop.call_soon(self._say)
        self._said.setdefault(pool, []).append(said)

    def _say(self) -> None:
        said, self._said = self._said, {}
        if self._link is not None:
            for pool, events in said.items():
                self._link.send(Happened(pool=pool, events=events))

    def _obey(self, message: Told) -> None:
        engine = self._engines.get(message.pool)
        mirror = self._mirrors.get(message.pool)
        if engine is None or mirror is None:
            return
        for order in message.orders:
            mirror.told(order)
            if order.kind == "end":
                engine.end_request(RequestId(order.request_id), _ended(order))
            elif (action := action_of(order)) is not None:
                engine.carry_out(action)


class _State(enum.Enum):
    SERVING = enum.auto()
    PAUSED = enum.auto()
    LEFT = enum.auto()


def _ended(order: Order) -> FairlaneError:
    return NoBackend(order.reason, code=order.code or None, retry_after_s=order.retry_after_s)
