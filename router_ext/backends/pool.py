"""The backends of one pool: who is up, and what each knows of itself.

    WARMING --info and probe answered, healthy--> UP <--healthy again, asked anew-- DOWN
       ^                                          |  refused connection, or several failed checks --> DOWN
       '-- added or its address changed
    a cordoned backend is watched like any other; the scheduler gives it nothing.

The breaker (``backends.breaker``) opens with DOWN. A broken stream whose connection was refused or cut before its head
opens it at once, so do ``STREAM_FAILURES`` streams in a row that failed with no token from the backend in between, and
any failure while it is half-open. A good check brings the backend UP again, half-open, if its wait is over; its first
token closes the breaker. Metrics of a backend are looked at for drift only: stale or missing ones never stop dispatch.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from router_ext.backends.base import Backend, BackendUnreachable
from router_ext.backends.breaker import Breaker, Phase
from router_ext.backends.probe import fetch_info
from router_ext.core.ids import BackendId
from router_ext.errors import FairlaneError, UpstreamFailed
from router_ext.obs.logs import get_logger
from router_ext.wire.controlplane import BackendRecord
from router_ext.wire.metrics_text import parse_gauges
from router_ext.wire.tgi import Info

METRICS_EVERY = 5
"""Health checks per look at a backend's metrics."""

STREAM_FAILURES = 5
"""Streams in a row that fail in different loop turns: a backend whose ``/health`` is well serves nothing all the same.
A batch that fails whole counts once."""

HALF_OPEN = "half-open: one request at a time until it has shown a token"

_log = get_logger(__name__)

K = TypeVar("K")
"""What the gateway found out about a backend's model."""


class State(enum.StrEnum):
    """Where a backend stands; the words of the heartbeat."""

    WARMING = "warming"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True, eq=False)
class Member(Generic[K]):
    """One backend under watch."""

    record: BackendRecord
    client: Backend
    breaker: Breaker
    state: State = State.WARMING
    info: Info | None = None
    info_body: bytes = b""
    knowledge: K | None = None
    failures: int = 0
    stream_failures: int = 0
    stream_failed_s: float = -1.0
    answered_s: float = 0.0
    """When ``/health`` answered last, on the loop's clock."""
    detail: str = "not asked yet"
    queue_size: int | None = None
    reserved_tokens: int | None = None
    is_alarmed: bool = False
    kick: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def backend(self) -> BackendId:
        return BackendId(self.record.backend)

    @property
    def is_on_trial(self) -> bool:
        """Up, and given one request at a time until it has shown a token."""
        return self.breaker.phase is Phase.HALF_OPEN


class Listener(Protocol[K]):
    """Who wants to know; called on the loop's thread."""

    def backend_changed(self, member: Member[K]) -> None:
        """``state`` became UP or DOWN, or ``is_on_trial`` ended."""

    def backend_learned(self, member: Member[K]) -> None:
        """``info`` or ``knowledge`` is there or differs; comes before ``backend_changed`` to UP.

        Raises:
            FairlaneError: it cannot be used with these; the member forgets them and stays out.
        """


class BackendPool(Generic[K]):
    """Watches the backends of one pool. ``run`` owns every task."""

    def __init__(
        self,
        *,
        listener: Listener[K],
        make_client: Callable[[BackendRecord], Backend],
        probe: Callable[[Backend], Awaitable[K]],
        interval_s: float,
        timeout_s: float,
        max_failures: int,
        max_wait_s: float = 15.0,
    ) -> None:
        self.members: dict[BackendId, Member[K]] = {}
        self._listener = listener
        self._make_client = make_client
        self._probe = probe
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._max_failures = max_failures
        self._max_wait_s = max_wait_s
        self._loop = asyncio.get_running_loop()
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def up(self) -> list[Member[K]]:
        """Members that may be used, in the order of the configuration."""
        return [member for member in self.members.values() if member.state is State.UP]

    def prepare(self, records: Iterable[BackendRecord]) -> dict[BackendId, Backend]:
        """Clients of the members a configuration adds or moves: everything of ``apply`` that may fail."""
        made: dict[BackendId, Backend] = {}
        for record in records:
            member = self.members.get(BackendId(record.backend))
            if member is None or _address(member.record) != _address(record):
                made[BackendId(record.backend)] = self._make_client(record)
        return made

    def apply(self, records: Iterable[BackendRecord], clients: Mapping[BackendId, Backend] | None = None) -> None:
        """Follow a configuration. A member with another address starts anew; streams on a removed one go on.

        Args:
            clients: from ``prepare`` for the same records, with nothing in between.
        """
        records = list(records)
        if clients is None:
            clients = self.prepare(records)
        wanted = {BackendId(record.backend): record for record in records}
        for backend in [b for b in self.members if b not in wanted]:
            self._drop(self.members.pop(backend))
        ordered: dict[BackendId, Member[K]] = {}
        for backend, record in wanted.items():
            member = self.members.get(backend)
            if member is not None and _address(member.record) != _address(record):
                self._drop(member)
                member = None
            if member is None:
                member = Member[K](record=record, client=clients[backend], breaker=Breaker(max_wait_s=self._max_wait_s))
                self._watch(member)
            member.record = record
            ordered[backend] = member
        self.members = ordered

    def staying(self, records: Iterable[BackendRecord]) -> dict[BackendId, Member[K]]:
        """Members that a configuration keeps as they are."""
        kept = {}
        for record in records:
            member = self.members.get(BackendId(record.backend))
            if member is not None and _address(member.record) == _address(record):
                kept[member.backend] = member
        return kept

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for member in self.members.values():
                self._watch(member)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None

    def stream_failed(self, backend: BackendId, error: UpstreamFailed) -> None:
        """A stream broke: look at once, and open the breaker if the server itself did not answer, or serves nothing."""
        member = self.members.get(backend)
        if member is None:
            return
        now = self._loop.time()
        if now != member.stream_failed_s:
            member.stream_failed_s = now
            member.stream_failures += 1
        is_useless = member.is_on_trial or member.stream_failures >= STREAM_FAILURES
        if member.state is State.UP and (is_useless or isinstance(error, BackendUnreachable)):
            member.failures = self._max_failures
            self._set(member, State.DOWN, error.message)
        member.kick.set()

    def spoke(self, backend: BackendId) -> None:
        """A token came from this backend: it serves."""
        member = self.members.get(backend)
        if member is None:
            return
        member.stream_failures = 0
        if member.is_on_trial:
            member.breaker.close(self._loop.time())
            member.detail = ""
            _log.info("backend.closed_breaker", backend=member.backend)
            self._listener.backend_changed(member)

    async def close(self) -> None:
        """Close every connection."""
        for member in self.members.values():
            await member.client.close()

    # --- watching ---

    def _watch(self, member: Member[K]) -> None:
        if self._tasks is not None and member.task is None:
            member.task = self._tasks.create_task(self._poll(member), name=f"watch {member.backend}")

    def _drop(self, member: Member[K]) -> None:
        if member.task is not None:
            member.task.cancel()
        self._set(member, State.DOWN, "removed")

    async def _poll(self, member: Member[K]) -> None:
        number = 0
        while True:
            try:
                await self._check(member)
                if member.state is State.UP and number % METRICS_EVERY == 0:
                    await self._look_at_metrics(member)
            except Exception as error:  # a defect that one backend's answer trips must not end the watch of the others
                _log.exception("backend.watch_failed", backend=member.backend)
                self._failed(member, f"the watch met a defect: {type(error).__name__}", is_gone=False)
            number += 1
            member.kick.clear()
            # A backend that is away is asked more often: queued requests wait for it.
            wait_s = self._interval_s if member.state is State.UP else min(self._interval_s, 0.25)
            try:
                async with asyncio.timeout(wait_s):
                    await member.kick.wait()
            except TimeoutError:
                continue

    async def _check(self, member: Member[K]) -> None:
        if self._loop.time() < member.breaker.not_before_s:
            return
        try:
            if member.state is not State.UP:
                # It may have come back as another model, or with other limits.
                await self._learn(member)
            reply = await member.client.call("GET", "/health", timeout_s=self._timeout_s)
            if reply.status != 200:
                raise UpstreamFailed(f"/health answered {reply.status}")
        except UpstreamFailed as error:
            self._failed(member, error.message, is_gone=isinstance(error, BackendUnreachable))
            return
        now = self._loop.time()
        member.answered_s = now
        # A stream may have failed while it was asked.
        if member.breaker.try_again(now):
            member.failures = 0
            self._set(member, State.UP, HALF_OPEN if member.is_on_trial else "")

    def _failed(self, member: Member[K], detail: str, *, is_gone: bool) -> None:
        member.failures += 1
        if is_gone or member.failures >= self._max_failures:
            self._set(member, State.DOWN, detail)
        else:
            member.detail = detail

    async def _learn(self, member: Member[K]) -> None:
        info, body = await fetch_info(member.client)
        knowledge = member.knowledge
        if knowledge is None or info != member.info:
            knowledge = await self._probe(member.client)
        if info != member.info or knowledge != member.knowledge:
            before = member.info, member.info_body, member.knowledge
            member.info, member.info_body, member.knowledge = info, body, knowledge
            try:
                self._listener.backend_learned(member)
            except FairlaneError as error:
                member.info, member.info_body, member.knowledge = before
                raise UpstreamFailed(f"The backend's limits cannot be used: {error.message}") from None

    def _set(self, member: Member[K], state: State, detail: str) -> None:
        member.detail = detail
        if member.state is state:
            return
        before, member.state = member.state, state
        if before is State.UP:
            member.breaker.open(self._loop.time())
            member.stream_failures = 0
        _log.info("backend.changed", backend=member.backend, before=before, state=state, detail=detail)
        if state is State.UP or before is State.UP:
            self._listener.backend_changed(member)

    async def _look_at_metrics(self, member: Member[K]) -> None:
        try:
            reply = await member.client.call("GET", "/metrics", timeout_s=self._timeout_s)
            if reply.status != 200:
                raise UpstreamFailed(f"/metrics answered {reply.status}")
        except UpstreamFailed as error:
            member.queue_size = member.reserved_tokens = None
            _log.debug("backend.metrics_missing", backend=member.backend, detail=str(error))
            return
        gauges = parse_gauges(reply.body)
        before = member.queue_size
        # A gauge that was never written is absent, and means 0.
        member.queue_size = gauges.queue_size or 0
        member.reserved_tokens = gauges.batch_current_max_tokens or 0
        is_long = member.queue_size > 1 and before is not None and before > 1
        if is_long and not member.is_alarmed:
            # With this router alone in front its queue stays empty: the ledger or the settings are wrong.
            _log.warning("backend.queue_not_empty", backend=member.backend, queue_size=member.queue_size)
        member.is_alarmed = is_long


def _address(record: BackendRecord) -> tuple[str, str | None]:
    return record.url, record.api_key_name
