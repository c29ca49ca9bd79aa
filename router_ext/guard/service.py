"""Proofs of grammars for the event loop: asked once, kept, shared, and made for all tenants in turn.

    guard = Guard()
    task = asyncio.create_task(guard.run())               # keeps the nursery alive
    proof = await guard.prove(grammar, tenant, limit_s)   # from the cache in microseconds

The loop compiles nothing. At most ``JOBS`` grammars are compiled at a time and one of a tenant; tenants take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from router_ext.errors import GuardUnavailable
from router_ext.guard.grammar import Grammar
from router_ext.guard.messages import Job, Proof, framed
from router_ext.obs.logs import get_logger
from router_ext.settings import child_environment
from router_ext.wire.frames import Frames

_log = get_logger(__name__)

JOBS = 2
"""Grammars compiled at a time."""

MAX_KEPT = 4_096
"""Proofs kept, refusals as well."""

MAX_KEPT_TEXT = 16 << 20
"""Characters of inlined schemas kept with them."""

MAX_WAITING = 16
"""Grammars of one tenant that wait to be compiled."""

MAX_GRAMMAR_BYTES = 262_144
"""Of a grammar's text; more is refused unread."""

WAIT_S = 10.0
"""For a proof, queue included."""

MEMORY_MB = 512
_LEAST_CPU_S = 0.5
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 10.0


class _Pending:
    """One grammar that is being proven, for all who ask for it."""

    __slots__ = ("answer", "cpu_s", "grammar", "tenant")

    def __init__(self, grammar: Grammar, tenant: str, cpu_s: float, answer: asyncio.Future[Proof]) -> None:
        self.grammar = grammar
        self.tenant = tenant
        self.cpu_s = cpu_s
        self.answer = answer


class Guard:
    """See the module. Event loop's thread only.

    Attributes:
        compiled: grammars compiled so far. found: asked for and known. pid: of the nursery, None while it is away.
    """

    def __init__(self, *, jobs: int = JOBS, wait_s: float = WAIT_S, command: list[str] | None = None) -> None:
        self.compiled = 0
        self.found = 0
        self.pid: int | None = None
        self._jobs = jobs
        self._wait_s = wait_s
        self._command = command or [sys.executable, "-P", "-m", "router_ext.guard.nursery", "--fd"]
        self._kept: OrderedDict[str, Proof] = OrderedDict()
        self._kept_text = 0
        self._pending: dict[str, _Pending] = {}
        self._running: dict[str, _Pending] = {}
        self._waiting: OrderedDict[str, deque[_Pending]] = OrderedDict()
        self._decoder = msgspec.msgpack.Decoder(Proof)
        self._transport: asyncio.Transport | None = None
        self._over: asyncio.Future[None] | None = None
        self._is_wanted = asyncio.Event()

    def warm(self) -> None:
        """Start the nursery now, not with the first grammar."""
        self._is_wanted.set()

    # --- asking -----------------------------------------------------------------------------------------------------

    def known(self, grammar: Grammar, cpu_s: float) -> Proof | None:
        """The proof of a grammar seen before; None also if it was given up sooner than ``cpu_s`` allow."""
        proof = self._kept.get(grammar.digest)
        if proof is None or (proof.tried_s is not None and proof.tried_s < cpu_s):
            return None
        self._kept.move_to_end(grammar.digest)
        return proof

    async def prove(self, grammar: Grammar, tenant: str, limit_s: float) -> Proof:
        """The proof of a grammar; ``limit_s`` of stall bounds the CPU time it may take.

        Raises:
            GuardUnavailable: too many grammars of this tenant wait, it took longer than ``wait_s``, or no nursery.
        """
        if len(grammar.text) > MAX_GRAMMAR_BYTES:
            return Proof(
                digest=grammar.digest,
                problem=f"the grammar has {len(grammar.text)} characters, at most {MAX_GRAMMAR_BYTES} are judged",
                is_cost=True,
            )
        cpu_s = max(limit_s, _LEAST_CPU_S)
        proof = self.known(grammar, cpu_s)
        if proof is not None:
            self.found += 1
            return proof
        pending = self._pending.get(grammar.digest)
        if pending is None:
            pending = self._enqueue(grammar, tenant, cpu_s)
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(pending.answer)
        except TimeoutError:
            raise GuardUnavailable(f"The grammar was not judged within {self._wait_s:g} s; try again.") from None

    def _enqueue(self, grammar: Grammar, tenant: str, cpu_s: float) -> _Pending:
        queue = self._waiting.get(tenant)
        if queue is not None and len(queue) >= MAX_WAITING:
            raise GuardUnavailable(
                f"{len(queue)} grammars of this tenant wait to be judged, {MAX_WAITING} may.",
                code="rate_limit_exceeded",
            )
        answer: asyncio.Future[Proof] = asyncio.get_running_loop().create_future()
        pending = _Pending(grammar, tenant, cpu_s, answer)
        self._pending[grammar.digest] = pending
        self._waiting.setdefault(tenant, deque()).append(pending)
        self._is_wanted.set()
        self._start()
        return pending

    def _start(self) -> None:
        """Send what may be compiled now: one of a tenant, tenants in turn."""
        transport = self._transport
        if transport is None:
            return
        busy = {pending.tenant for pending in self._running.values()}
        for tenant in list(self._waiting):
            if len(self._running) >= self._jobs:
                return
            if tenant in busy:
                continue
            queue = self._waiting.pop(tenant)
            pending = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            grammar = pending.grammar
            self._running[grammar.digest] = pending
            job = Job(grammar.digest, grammar.kind, grammar.text, pending.cpu_s, MEMORY_MB)
            transport.write(framed(job))

    # --- answers ----------------------------------------------------------------------------------------------------

    def received(self, payload: bytes) -> None:
        """A proof has come."""
        proof = self._decoder.decode(payload)
        self.compiled += 1
        pending = self._running.pop(proof.digest, None)
        self._keep(proof)
        if pending is not None:
            self._pending.pop(proof.digest, None)
            if not pending.answer.done():
                pending.answer.set_result(proof)
        self._start()

    def _keep(self, proof: Proof) -> None:
        old = self._kept.pop(proof.digest, None)
        self._kept_text += len(proof.inlined or "") - len(old.inlined or "" if old is not None else "")
        self._kept[proof.digest] = proof
        while len(self._kept) > MAX_KEPT or self._kept_text > MAX_KEPT_TEXT:
            _, gone = self._kept.popitem(last=False)
            self._kept_text -= len(gone.inlined or "")

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a nursery alive until cancelled. What was being compiled when one ended is compiled again, once."""
        delay_s = _FIRST_DELAY_S
        await self._is_wanted.wait()
        while True:
            compiled = self.compiled
            await self._live()
            _log.warning("guard.nursery_ended", running=len(self._running))
            self._requeue()
            delay_s = _FIRST_DELAY_S if self.compiled > compiled else min(_LONGEST_DELAY_S, 2 * delay_s)
            await asyncio.sleep(delay_s)

    def _requeue(self) -> None:
        running, self._running = self._running, {}
        for pending in running.values():
            self._waiting.setdefault(pending.tenant, deque()).appendleft(pending)

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        process: asyncio.subprocess.Process | None = None
        transport: asyncio.Transport | None = None
        self._over = loop.create_future()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=child_environment(os.environ),
                )
            transport, _ = await loop.create_connection(lambda: _Link(self.received, self._lost), sock=ours)
            self._transport, self.pid = transport, process.pid
            self._start()
            await self._over
        except OSError as error:
            _log.warning("guard.nursery_not_started", reason=error.strerror)
        finally:
            self._transport, self.pid = None, None
            if transport is None:
                ours.close()
            else:
                transport.close()
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())

    def _lost(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class _Link(asyncio.Protocol):
    """Our end of the socket."""

    def __init__(self, on_payload: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_payload = on_payload
        self._on_end = on_end
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._on_payload(payload)
        except ValueError:  # msgspec's errors are of this kind
            self._on_end()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()
