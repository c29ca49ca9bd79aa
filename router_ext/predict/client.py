"""The router's side of the prediction worker: starts it, asks it, and does without it.

One child process, started once the router serves and again, with a growing delay, whenever it ends. It is killed if it
leaves a question unanswered for ``HANG_S``. While it is away, or has too much to do, questions are not asked: the
caller has its fallback at once. A model that ``MAX_DEATHS`` workers did not survive loading is loaded no more.

The child gets the same priority as the router: its answer is awaited for some milliseconds only, and a lower one
would make it late exactly when the machine is busy. It ends by itself when the socket closes, however the router ends.

Nothing here imports numpy or torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from router_ext.obs.logs import get_logger
from router_ext.predict.messages import (
    Answer,
    Answers,
    Ask,
    Assign,
    Assigned,
    Ended,
    FromWorker,
    Ready,
    framed,
)
from router_ext.predict.state import SAVE_INTERVAL_S
from router_ext.settings import child_environment
from router_ext.wire.decoding import NotDecoded
from router_ext.wire.frames import Frames

_log = get_logger(__name__)

MAX_OUTSTANDING = 256
"""Questions without an answer from which no more are asked, whatever the worker's speed."""

_LEARNED_SHARE = 0.1
"""Of the newest batch in what a question is known to take."""

MAX_UNSENT_BYTES = 4 << 20
"""News of ended answers are dropped from here on: the worker does not read."""

HANG_S = 5.0
"""A question unanswered for so long: the worker hangs. While it loads a model it may be silent for some tenths of a
second."""
START_LIMIT_S = 60.0
END_LIMIT_S = 5.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 30.0
_STABLE_S = 60.0
"""A worker that lived for so long is started again without delay."""
MAX_DEATHS = 3
"""Workers that may end while they load one model; then it is given up, until this process ends."""


class Listener(Protocol):
    """Who is told of what the worker does."""

    def answered(self, seconds: float) -> None: ...
    def batch_answered(self, count: int, seconds: float) -> None: ...
    def model_assigned(self, outcome: Assigned) -> None: ...
    def worker_ended(self) -> None: ...


def worker_command(
    *, directory: Path, log_level: str, router: str, limit_s: float, save_s: float = SAVE_INTERVAL_S
) -> list[str]:
    """The command line of the real worker; the descriptor of its socket is appended.

    Args:
        limit_s: how long its answers are waited for. save_s: how often it saves what it has learned.
    """
    return [
        *(sys.executable, "-P", "-m", "router_ext.predict.worker"),
        *("--dir", str(directory), "--log-level", log_level, "--router", router),
        *("--limit-ms", f"{limit_s * 1_000:g}", "--save-s", f"{save_s:g}", "--fd"),
    ]


class PredictionClient:
    """See the module. Event loop's thread only.

    Args:
        command: of the worker, without the descriptor at its end.
        limit_s: how long an answer is waited for. Where the questions before it will take the worker longer, by what
            they took of late, one is not asked: its answer would be late, and make all that follow late too.

    Attributes:
        state: ``down``, ``starting`` or ``up``. pid: of the living worker. restarts: how often it was started again.
        why_down: what ended it last.
    """

    def __init__(self, command: Sequence[str], listener: Listener, *, limit_s: float) -> None:
        self.state = "down"
        self.pid: int | None = None
        self.restarts = 0
        self.why_down = "not started yet"
        self._command = list(command)
        self._limit_s = limit_s
        self._question_s = 0.0
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._wanted: dict[str, Assign] = {}
        self._good: dict[str, Assign] = {}
        """The last model of each pool that was loaded: what answers if the wanted one is refused."""
        self._loading: list[Assign] = []
        """Sent to the worker, which loads them in this order, and not answered yet."""
        self._deaths: dict[str, int] = {}
        """Of workers, by the digest of what they were loading, since it was loaded last."""
        self._waiting: dict[int, tuple[asyncio.Future[Answer | None], float]] = {}
        # The loop's clock moves in milliseconds, once a turn.
        self._clock = time.perf_counter
        self._transport: asyncio.Transport | None = None
        self._next_id = 1
        self._watch: asyncio.TimerHandle | None = None
        self._starting: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[str] | None = None

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Questions without an answer."""
        return len(self._waiting)

    @property
    def is_up(self) -> bool:
        """Questions are answered."""
        return self.state == "up"

    def next_id(self) -> int:
        """The id of a question about to be asked."""
        self._next_id += 1
        return self._next_id

    def ask(self, question: Ask) -> asyncio.Future[Answer | None] | None:
        """Send a question. The future never fails: None means that the worker ended first or could not answer.

        Returns:
            None if it is up, but has too many questions already, or is not up: nothing was sent.
        """
        transport = self._transport
        n_before = len(self._waiting)
        if self.state != "up" or transport is None or n_before >= MAX_OUTSTANDING:
            return None
        if n_before * self._question_s > self._limit_s:
            return None
        answer: asyncio.Future[Answer | None] = self._loop.create_future()
        self._waiting[question.id] = (answer, self._clock())
        transport.write(framed(question))
        if self._watch is None:
            self._watch = self._loop.call_later(HANG_S, self._look)
        return answer

    def ended(self, news: Ended) -> None:
        """What became of an answer. Lost if the worker is away: it is one observation of many."""
        transport = self._transport
        if self.state == "up" and transport is not None and transport.get_write_buffer_size() < MAX_UNSENT_BYTES:
            transport.write(framed(news))

    def assign(self, pool: str, digest: str | None, path: str = "") -> None:
        """The model of a pool from now on, also in workers to come. ``Listener.model_assigned`` tells the outcome."""
        message = Assign(pool, digest, path)
        if digest is None:
            self._wanted.pop(pool, None)
            self._good.pop(pool, None)
            self._loading = [order for order in self._loading if order.pool != pool]
            self._send(message)
        else:
            self._wanted[pool] = message
            if self._is_given_up(digest):
                self._refuse(message)
            else:
                self._send(message)

    def _send(self, message: Assign) -> None:
        if self.state == "up" and self._transport is not None:
            if message.digest is not None:
                self._loading.append(message)
            self._transport.write(framed(message))

    # --- models that kill -------------------------------------------------------------------------------------------

    def _is_given_up(self, digest: str | None) -> bool:
        return digest is not None and self._deaths.get(digest, 0) >= MAX_DEATHS

    def _refuse(self, order: Assign) -> None:
        """A model that was given up will not be tried: the one before stays."""
        good = self._good.get(order.pool)
        current = None if good is None or self._is_given_up(good.digest) else good.digest
        reason = f"the worker ended {MAX_DEATHS} times while it loaded this model: {self.why_down}"
        self._listener.model_assigned(Assigned(order.pool, order.digest, current, reason))

    def _blame(self) -> None:
        """A worker has ended by itself: what it was loading may be why."""
        loading, self._loading = self._loading, []
        digest = loading[0].digest if loading else None
        if digest is None:
            return
        self._deaths[digest] = self._deaths.get(digest, 0) + 1
        if self._deaths[digest] == MAX_DEATHS:
            for order in [order for order in self._wanted.values() if order.digest == digest]:
                self._refuse(order)

    def _look(self) -> None:
        """Nobody waits longer than the limit for a worker that hangs."""
        self._watch = None
        if not self._waiting:
            return
        _, oldest = next(iter(self._waiting.values()))
        rest_s = oldest + HANG_S - self._clock()
        if rest_s > 0:
            self._watch = self._loop.call_later(rest_s + 0.01, self._look)
        else:
            self._end(f"a question was not answered for {HANG_S:g} s")

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a worker alive until cancelled."""
        failures = 0
        while True:
            since = self._loop.time()
            await self._live()
            failures = 0 if self._loop.time() - since >= _STABLE_S else failures + 1
            _log.warning("predictor.worker_ended", reason=self.why_down, failures=failures)
            self._listener.worker_ended()
            self._blame()
            if failures:
                await asyncio.sleep(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (failures - 1)))
            self.restarts += 1

    async def _live(self) -> None:
        """One worker, from its start to its end."""
        ours, theirs = socket.socketpair()
        process: asyncio.subprocess.Process | None = None
        transport: asyncio.Transport | None = None
        self.state = "starting"
        self._over = self._loop.create_future()
        self._starting = self._loop.call_later(START_LIMIT_S, self._end, f"not ready after {START_LIMIT_S:g} s")
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**child_environment(os.environ), **_ALLOCATION, **_ONE_THREAD},
                )
            self.pid = process.pid
            transport, _ = await self._loop.create_connection(lambda: _Connection(self), sock=ours)
            self._transport = transport
            self.why_down = await self._over
        except OSError as error:
            self.why_down = f"it could not be started: {error.strerror}"
        finally:
            self._lost()
            if transport is None:
                ours.close()
            else:
                transport.close()
            if process is not None:
                await asyncio.shield(_ended(process, is_asked=self._over.cancelled()))

    def _lost(self) -> None:
        self.state, self.pid, self._transport = "down", None, None
        if self._starting is not None:
            self._starting.cancel()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        waiting, self._waiting = self._waiting, {}
        for answer, _ in waiting.values():
            if not answer.done():
                answer.set_result(None)

    def _end(self, reason: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(reason)

    # --- from the worker --------------------------------------------------------------------------------------------

    def received(self, payload: bytes) -> None:
        """One frame has come; what follows nonsense is not listened to."""
        if self._over is None or self._over.done():
            return
        try:
            message = self._decoder.decode(payload)
        except NotDecoded as error:
            self._end(f"it sent something else than an answer: {error}")
            return
        match message:
            case Answers():
                for answer in message.answers:
                    self._resolve(answer.id, answer)
                for question in message.refused:
                    self._resolve(question, None)
                count = len(message.answers) + len(message.refused)
                self._question_s += _LEARNED_SHARE * (message.seconds / max(1, count) - self._question_s)
                self._listener.batch_answered(count, message.seconds)
            case Assigned():
                wanted = self._wanted.get(message.pool)
                self._loaded(message)
                if wanted is not None and message.refused is None and wanted.digest == message.digest:
                    self._good[message.pool] = wanted
                self._listener.model_assigned(message)
            case Ready():
                self.state = "up"
                if self._starting is not None:
                    self._starting.cancel()
                _log.info("predictor.worker_ready", pid=message.pid, known=message.known)
                for pool, wanted in self._wanted.items():
                    good = self._good.get(pool)
                    if good is not None and good.digest != wanted.digest and not self._is_given_up(good.digest):
                        self._send(good)
                    if not self._is_given_up(wanted.digest):
                        self._send(wanted)

    def _loaded(self, outcome: Assigned) -> None:
        """One model less is being loaded, and it killed nobody."""
        for at, order in enumerate(self._loading):
            if (order.pool, order.digest) == (outcome.pool, outcome.digest):
                del self._loading[at]
                self._deaths.pop(order.digest or "", None)
                return

    def _resolve(self, question: int, answer: Answer | None) -> None:
        found = self._waiting.pop(question, None)
        if found is not None:
            self._listener.answered(self._clock() - found[1])
            if not found[0].done():
                found[0].set_result(answer)

    def lost(self, reason: str) -> None:
        """The socket is closed."""
        self._end(reason)


class _Connection(asyncio.Protocol):
    """Our end of the socket."""

    def __init__(self, client: PredictionClient) -> None:
        self._client = client
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._client.received(payload)
        except ValueError as error:
            self._client.lost(f"it sent {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._client.lost("it ended" if error is None else f"its socket broke: {error}")


async def _ended(process: asyncio.subprocess.Process, *, is_asked: bool) -> None:
    """Wait for the end of a worker whose socket is closed: for a while if it is to save what it knows, else not."""
    if is_asked:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()


_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_ALLOCATION = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
"""What glibc's allocator is told: what a model needed while it was loaded goes back to the system."""
