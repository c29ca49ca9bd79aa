"""The router that takes over: what it asks of its predecessors, and their requests as its own scheduler sees them.

    greet (before the loop)    the predecessor in the folder hands down its sockets and moves its books away
    wait_ready                 configuration applied, every backend up that is up there
    take                       the predecessor, and routers before it that still have requests: each stops deciding;
                               then counters and requests of all go into the schedulers in one turn

A predecessor that ends before it has answered leaves what it had to the ledger, as after a kill. One that does not
take part goes on serving, and the successor ends with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router_ext.backends.base import BackendRefused
from router_ext.backends.pool import State
from router_ext.core.actions import Dispatch, Expire, Preempt, Reject
from router_ext.core.events import (
    Arrived,
    Cancelled,
    Failed,
    Finished,
    Heir,
    Inherited,
    Preempted,
    RequestSpec,
    SliceEnded,
)
from router_ext.core.ids import BackendId, RequestId
from router_ext.core.inheritance import Closing
from router_ext.errors import FairlaneError
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.handover import HandoverFailed, Wire, is_same_user, reachable
from router_ext.gateway.leaving import event_id, event_of, heir_of, order_of
from router_ext.gateway.limits import Limiter
from router_ext.gateway.model import Member
from router_ext.gateway.suspects import BackendFrozen
from router_ext.gateway.upstream import Step
from router_ext.obs.logs import get_logger
from router_ext.sync.generations import is_alive, leaving_folders
from router_ext.sync.ledger import now_us
from router_ext.wire.handover import (
    TAKEN_LIMIT_S,
    Happened,
    Hello,
    Left,
    LeftPool,
    Moved,
    Order,
    Take,
    Taken,
    Told,
    decode,
    encode,
    frame_length,
)

_LOOK_S = 0.02

_log = get_logger(__name__)


@dataclass(slots=True)
class Greeting:
    """A predecessor that takes part: its connection, what it said, the sockets it handed down."""

    connection: socket.socket
    moved: Moved
    listener: socket.socket
    admin: socket.socket | None

    def close(self) -> None:
        """Give it up; the other goes on."""
        for each in (self.connection, self.listener, self.admin):
            if each is not None:
                each.close()


def greet(directory: Path, *, is_replacing: bool, limit_s: float = TAKEN_LIMIT_S) -> Greeting | None:
    """Ask the router that serves from this folder to be replaced (``is_replacing``). Blocks; None if there is none.

    If it has been killed, the newest of those it had replaced still has sockets and requests, and waits.

    Raises:
        HandoverFailed: it is there and does not answer as agreed.
    """
    for folder in (directory, *reversed(leaving_folders(directory))):
        if folder == directory and not is_replacing:
            continue
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(limit_s)
        try:
            with reachable(folder) as address:
                connection.connect(address)
        except OSError:
            connection.close()
            continue
        try:
            greeting = _greet(connection)
        except HandoverFailed:
            if is_replacing:
                raise
            continue
        if is_replacing or greeting.moved.has_left:
            return greeting
        greeting.close()
    return None


def _greet(connection: socket.socket) -> Greeting:
    try:
        if not is_same_user(connection):
            raise HandoverFailed("the socket of the running router belongs to another user")
        connection.sendall(encode(Hello(pid=os.getpid())))
        data, descriptors, _, _ = socket.recv_fds(connection, 65_536, 2)
        while len(data) < 4 or len(data) < 4 + frame_length(data[:4]):
            part = connection.recv(65_536)
            if not part:
                raise HandoverFailed("the running router broke the connection off")
            data += part
        moved = decode(data[4:])
        if not isinstance(moved, Moved) or not descriptors:
            raise HandoverFailed("the running router handed no socket down")
    except (OSError, ValueError) as error:
        connection.close()
        raise HandoverFailed(f"the running router does not answer: {error}") from None
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    return Greeting(connection, moved, sockets[0], sockets[1] if len(sockets) > 1 else None)


class RemoteGeneration:
    """A request that a predecessor carries out."""

    def __init__(self, predecessor: Predecessor, pool: str, spec: RequestSpec, *, is_running: bool) -> None:
        self._predecessor = predecessor
        self.pool = pool
        self.spec = spec
        self.request_id = spec.request_id
        self.step = Step.RUNNING if is_running else Step.QUEUED
        self.member: Member | None = None
        self.started_s = 0.0
        self.heard_s = 0.0

    @property
    def has_spoken(self) -> bool:
        return True

    def relay(self, action: Dispatch | Preempt | Reject | Expire) -> None:
        """Have it done."""
        if isinstance(action, Dispatch):
            self.step = Step.RUNNING
        elif not isinstance(action, Preempt):
            self.step = Step.ENDED
            self._predecessor.over(self)
        self._predecessor.tell(self.pool, order_of(action))

    def give_up(self, error: FairlaneError) -> None:
        self._predecessor.tell(
            self.pool,
            Order(
                kind="end",
                request_id=self.request_id,
                code=error.code,
                reason=error.message,
                retry_after_s=error.retry_after_s,
            ),
        )

    # The engine asks these of what runs in its own process only.
    def frozen(self, error: BackendFrozen | BackendRefused) -> None: ...
    def dispatch(self, action: Dispatch, member: Member) -> None: ...
    def preempt(self) -> None: ...
    def move(self) -> None: ...
    def undispatched(self) -> None: ...
    def expired(self, error: FairlaneError) -> None: ...
    def refused(self, error: FairlaneError) -> None: ...
    def end_with(self, error: FairlaneError) -> None: ...
    def cancel(self) -> None: ...


class Predecessor:
    """One router that has left its requests here. ``limits``: what they hold of their tenants' and keys'."""

    def __init__(self, wire: Wire, engines: Mapping[str, PoolEngine], limits: Limiter, *, name: str) -> None:
        self.name = name
        self._wire = wire
        self._engines = engines
        self._limits = limits
        self._generations: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._remote: dict[tuple[str, RequestId], RemoteGeneration] = {}
        self._told: dict[str, list[Order]] = {}

    async def take(self) -> dict[str, LeftPool] | None:
        """Ask for everything it has; None if it has gone. It decides nothing any more when this returns.

        Raises:
            HandoverFailed: it does not take part, and decides on.
        """
        self._wire.send(Take())
        try:
            async with asyncio.timeout(2 * TAKEN_LIMIT_S):
                left = await self._wire.receive()
                if left is None:
                    return None
                if not isinstance(left, Left):
                    raise HandoverFailed("the running router does not hand its requests over")
                self._wire.send(Taken())
                answer = await self._wire.receive()
        except (TimeoutError, ValueError) as error:
            raise HandoverFailed(f"the running router does not answer: {error or 'too late'}") from None
        return left.pools if isinstance(answer, Taken) else None

    def adopt(self, pool: str, left: LeftPool) -> list[Heir]:
        """Its requests of a pool as the engine's own; what to tell the scheduler."""
        engine = self._engines[pool]
        heirs = [heir_of(record) for record in left.requests]
        for heir in heirs:
            standing = heir.standing
            self._adopt(pool, engine, heir.request, is_running=standing.backend is not None, age_s=standing.age_s)
        return heirs

    def _adopt(self, pool: str, engine: PoolEngine, spec: RequestSpec, *, is_running: bool, age_s: float = 0.0) -> None:
        generation = RemoteGeneration(self, pool, spec, is_running=is_running)
        self._remote[pool, spec.request_id] = generation
        engine.adopt(generation)
        event = event_id(spec)
        self._generations[event] += 1
        arrived_us = now_us() - round(age_s * 1e6)
        self._limits.inherit(spec.tenant, spec.key, event, _predicted_cost(spec), arrived_us, part=str(spec.request_id))

    def over(self, generation: RemoteGeneration) -> None:
        """A request has ended, or will by what it was told. The first time counts."""
        if self._remote.pop((generation.pool, generation.request_id), None) is None:
            return
        event = event_id(generation.spec)
        self._generations[event] -= 1
        if not self._generations[event]:
            del self._generations[event]
            self._limits.end(event, None)

    def tell(self, pool: str, order: Order) -> None:
        """Send an order, with the others of this turn."""
        if not self._told:
            self._loop.call_soon(self._flush)
        self._told.setdefault(pool, []).append(order)

    def refuse(self, pool: str, left: LeftPool) -> None:
        """Requests of a pool that is not configured any more."""
        for record in left.requests:
            reason = "This model is not served any more."
            self.tell(pool, Order(kind="end", request_id=record.request_id, code="model_removed", reason=reason))

    def _flush(self) -> None:
        told, self._told = self._told, {}
        for pool, orders in told.items():
            self._wire.send(Told(pool=pool, orders=orders))

    async def follow(self) -> None:
        """Take what happens there, until it has ended; then nothing of it is left here."""
        try:
            while (message := await self._wire.receive()) is not None:
                if isinstance(message, Happened):
                    self._happened(message)
        except ValueError as error:
            _log.error("handover.unreadable", predecessor=self.name, reason=str(error))
        finally:
            self._wire.close()
        _log.info("handover.predecessor_gone", predecessor=self.name, requests=len(self._remote))
        for (pool, request_id), generation in list(self._remote.items()):
            engine = self._engines.get(pool)
            if engine is not None:
                engine.post(Cancelled(request_id=request_id))
                engine.forget(generation)
            self.over(generation)

    def _happened(self, message: Happened) -> None:
        pool = message.pool
        engine = self._engines.get(pool)
        for said in message.events:
            event = event_of(said)
            if event is None:
                continue
            if engine is None:
                if isinstance(event, Arrived):
                    self.refuse(pool, LeftPool(requests=[said.arrival] if said.arrival else []))
                continue
            if isinstance(event, Arrived):
                self._adopt(pool, engine, event.request, is_running=False)
                engine.post(event)
                continue
            generation = self._remote.get((pool, RequestId(said.request_id)))
            if generation is None:
                continue
            if isinstance(event, SliceEnded | Preempted) or (isinstance(event, Failed) and event.is_retryable):
                generation.step = Step.QUEUED
            is_over = isinstance(event, Finished | Cancelled | Failed) and generation.step is not Step.QUEUED
            if isinstance(event, Cancelled | Finished) or is_over:
                generation.step = Step.ENDED
                self.over(generation)
                engine.post(event)
                engine.forget(generation)
            else:
                engine.post(event)


class Succession:
    """Everything a starting router takes over.

    Args:
        greeting: the predecessor in the folder, if it was one that still served.
        restore: gives a pool the counters of the file, where no predecessor says better.
    """

    def __init__(
        self,
        *,
        directory: Path,
        greeting: Greeting | None,
        engines: Mapping[str, PoolEngine],
        limits: Limiter,
        restore: Callable[[str, PoolEngine, Any], None],
    ) -> None:
        self._directory = directory
        self._greeting = greeting
        self._engines = engines
        self._limits = limits
        self._restore = restore
        self._predecessors: list[Predecessor] = []

    @property
    def _is_replacing(self) -> bool:
        """The first predecessor serves by itself if nothing comes of this."""
        return self._greeting is not None and not self._greeting.moved.has_left

    async def wait_ready(self, *, limit_s: float) -> None:
        """Return once every backend that is up for a predecessor is up here.

        Raises:
            HandoverFailed: not within the limit, and somebody else serves.
        """
        loop = asyncio.get_running_loop()
        wanted: dict[str, set[str]] = {}
        for moved in await self._meet():
            for pool, backends in moved.up.items():
                wanted.setdefault(pool, set()).update(backends)
        deadline = loop.time() + limit_s
        while missing := self._missing(wanted):
            if loop.time() >= deadline:
                if not self._is_replacing:
                    _log.error("handover.not_ready", missing=missing)
                    return
                raise HandoverFailed(f"not ready within {limit_s:g} s: {', '.join(missing)} not up here")
            await asyncio.sleep(_LOOK_S)

    async def _meet(self) -> list[Moved]:
        """Connect to everybody; what they say of themselves."""
        found = []
        own = None
        if self._greeting is not None:
            moved = self._greeting.moved
            own = moved.folder
            found.append(moved)
            wire = await Wire.over(self._greeting.connection)
            self._predecessors.append(Predecessor(wire, self._engines, self._limits, name=own))
        for folder in leaving_folders(self._directory):
            if folder.name == own:
                continue
            with contextlib.suppress(HandoverFailed, OSError, ValueError, TimeoutError):
                peer, moved = await self._peer(folder)
                found.append(moved)
                self._predecessors.append(peer)
        return found

    def _missing(self, wanted: Mapping[str, Iterable[str]]) -> list[str]:
        missing = []
        for pool, backends in wanted.items():
            engine = self._engines.get(pool)
            if engine is None:
                missing.append(pool)
                continue
            members = engine.backends.members
            for backend in sorted(backends):
                member = members.get(BackendId(backend))
                # One that the configuration has no more is not waited for.
                if member is not None and member.state is not State.UP:
                    missing.append(backend)
        return missing

    async def take(self) -> list[Predecessor]:
        """Take over from everybody; returns those to be followed from now on.

        Raises:
            HandoverFailed: the predecessor goes on itself.
        """
        parts: list[tuple[Predecessor, dict[str, LeftPool]]] = []
        for number, predecessor in enumerate(self._predecessors):
            is_serving = number == 0 and self._is_replacing
            try:
                left = await predecessor.take()
            except HandoverFailed as error:
                if is_serving:
                    raise
                _log.warning("handover.failed", predecessor=predecessor.name, reason=error.message)
                continue
            if left is not None:
                parts.append((predecessor, left))
            elif is_serving and await asyncio.to_thread(is_alive, self._directory / predecessor.name):
                raise HandoverFailed("the running router took its requests back and goes on")
        self._apply(parts)
        return [predecessor for predecessor, _ in parts]

    async def _peer(self, folder: Path) -> tuple[Predecessor, Moved]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            with reachable(folder) as address:
                connection.connect(address)
            connection.send(encode(Hello(pid=os.getpid(), is_peer=True)))
        except OSError:
            connection.close()
            raise
        wire = await Wire.over(connection)
        async with asyncio.timeout(TAKEN_LIMIT_S):
            moved = await wire.receive()
        if not isinstance(moved, Moved):
            wire.close()
            raise HandoverFailed("no answer")
        return Predecessor(wire, self._engines, self._limits, name=folder.name), moved

    def _apply(self, parts: list[tuple[Predecessor, dict[str, LeftPool]]]) -> None:
        """All of it in one turn: nobody is dispatched between one predecessor's requests and the next one's."""
        for pool, engine in self._engines.items():
            counters = next((p[pool].counters for _, p in parts if pool in p and p[pool].counters is not None), None)
            self._restore(pool, engine, counters)
        heirs: dict[str, list[Heir]] = {}
        closing: dict[str, list[Closing]] = {}
        for predecessor, pools in parts:
            for pool, left in pools.items():
                if pool not in self._engines:
                    predecessor.refuse(pool, left)
                    continue
                heirs.setdefault(pool, []).extend(predecessor.adopt(pool, left))
                closing.setdefault(pool, []).extend(
                    Closing(backend=BackendId(c.backend), tokens=c.tokens, rest_s=c.rest_s) for c in left.closing
                )
        for pool, requests in heirs.items():
            self._engines[pool].post(Inherited(requests=requests, closing=closing[pool]))


def _predicted_cost(spec: RequestSpec) -> int:
    """Tokens that a request will probably use; without a prediction only those of its prompt are known."""
    predicted = 0 if spec.quantiles is None else spec.quantiles[len(spec.quantiles) // 2]
    return spec.prompt_tokens + min(predicted, spec.max_new_tokens) * spec.num_sequences
