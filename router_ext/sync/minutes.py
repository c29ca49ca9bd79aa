"""Minute counters that all routers share through Valkey, while it is reachable.

Each router keeps its own windows (``sync.window``) whatever happens. In Valkey there is a hash per tenant or key with
the sum of every bucket, and with what each router has in it. Only a router's own counts are ever set, to what they
are, so sending them again changes nothing:

    take   if what all have taken and this request fit every limit, add it; one script, so atomic over tenant and key
    set    this router's counts of some buckets are these (refunds, what was taken while Valkey was away)

One task owns the one connection and sends what has gathered as one batch: no request waits behind another's round
trip. A request waits for its answer for ``limit_s`` at most; then, and at once while the store is late or away, it is
judged by the router's own window and its share of the limit. A late store is asked again as soon as its batch is
back, a lost one is connected to with a backoff; first it is told every bucket that it does not know. So a switch in
either direction neither forgets nor doubles what was taken. Its bound: as long as the store is away, routers give out
their shares beside what others had been given in the minute before and they had not heard of. All together stay below
twice the limit in the minute of the switch, and a single router within the limit.

What leaves the process are ids of tenants and keys, bucket numbers and counts. Hashes expire with the window. Buckets
are numbered by Valkey's clock; those of two routers are the same to within one bucket's length.

Source of the form: state-based counters (G-Counter of Shapiro et al., 2011), per bucket.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from router_ext.sync.session import Backoff
from router_ext.sync.window import BUCKET_S, N_BUCKETS, MinuteWindow

log = structlog.get_logger(__name__)

BATCH_LIMIT_S = 1.0
"""A batch without an answer for so long: the connection is given up."""
CONNECT_LIMIT_S = 2.0
PING_S = 2.0
"""An idle connection is tried after so long."""
MAX_BATCH = 256
EXPIRE_MS = int((N_BUCKETS + 5) * BUCKET_S * 1_000)

_TAKE = f"""
local me, now, tokens = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local first = now - {N_BUCKETS - 1}
local costs = {{1, tokens}}
local letters = {{'r', 't'}}
local answer = {{1}}
local new = {{}}
for i, key in ipairs(KEYS) do
  for k = 1, 2 do
    local limit = tonumber(ARGV[2 + 2 * i + k - 1])
    local sum, free = 0, 0
    if limit >= 0 then
      local names = {{}}
      -- A router whose bucket has begun a little earlier counts as well.
      for b = first, now + 1 do names[#names + 1] = b .. letters[k] end
      local found = redis.call('HMGET', key, unpack(names))
      if not found[{N_BUCKETS}] then new[key] = true end
      for _, count in ipairs(found) do if count then sum = sum + tonumber(count) end end
      if sum + costs[k] > limit then
        answer[1] = 0
        local over = sum + costs[k] - limit
        for at, count in ipairs(found) do
          if count then over = over - tonumber(count) end
          if over <= 0 then free = first + at - 1 + {N_BUCKETS}; break end
        end
        if over > 0 then free = -1 end
      end
    end
    answer[#answer + 1] = sum
    answer[#answer + 1] = free
  end
end
if answer[1] == 1 then
  for _, key in ipairs(KEYS) do
    if new[key] then
      for _, name in ipairs(redis.call('HKEYS', key)) do
        if tonumber(string.match(name, '^%d+')) < first - 1 then redis.call('HDEL', key, name) end
      end
    end
    for k = 1, 2 do
      redis.call('HINCRBY', key, now .. letters[k], costs[k])
      redis.call('HINCRBY', key, now .. letters[k] .. me, costs[k])
    end
    redis.call('PEXPIRE', key, {EXPIRE_MS})
  end
end
return answer
"""

_SET = f"""
local key, me = KEYS[1], ARGV[1]
for i = 2, #ARGV, 3 do
  for k, letter in ipairs({{'r', 't'}}) do
    local name, now = ARGV[i] .. letter, tonumber(ARGV[i + k])
    local before = tonumber(redis.call('HGET', key, name .. me) or '0')
    if now ~= before then
      redis.call('HINCRBY', key, name, now - before)
      redis.call('HSET', key, name .. me, ARGV[i + k])
    end
  end
end
redis.call('PEXPIRE', key, {EXPIRE_MS})
return 1
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the store said of one request.

    ``bucket``: where it was counted, in this router's numbers. ``sums``: requests and tokens of all routers before it,
    per window; 0 where there is no limit. ``free_at``: the bucket from which on it would fit, where it does not; -1:
    never.
    """

    is_taken: bool
    bucket: int
    sums: tuple[tuple[int, int], ...]
    free_at: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class _Take:
    windows: Sequence[MinuteWindow]
    limits: Sequence[tuple[int | None, int | None]]
    tokens: int
    done: asyncio.Future[Verdict | None]
    bucket: int = 0
    is_abandoned: bool = False


class SharedMinutes:
    """See the module. Create it inside the running loop.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``. limit_s: what a request waits for an answer at most.
        windows: everything that has been counted lately; asked at every new connection.

    Attributes:
        n_late: answers that did not come in time. n_connects: connections that were made.
        last_error: text of the newest failure, None while all is well.
    """

    def __init__(
        self,
        url: str,
        *,
        limit_s: float,
        windows: Callable[[], Iterable[MinuteWindow]],
        backoff: Backoff | None = None,
    ) -> None:
        self.n_late = 0
        self.n_connects = 0
        self.last_error: str | None = None
        self._url = url
        self._limit_s = limit_s
        self._windows = windows
        self._loop = asyncio.get_running_loop()
        self._backoff = backoff or Backoff(first_s=0.1, limit_s=5.0)
        # Of this process alone: one that is started again must not set what its predecessor has taken.
        self._me = secrets.token_hex(6)
        self._is_connected = False
        self._is_late = False
        self._queue: list[_Take] = []
        self._dirty: dict[MinuteWindow, None] = {}
        self._wake = asyncio.Event()
        # This router's bucket numbers plus this are the store's.
        self._shift: int | None = None
        self._take_sha = self._set_sha = ""

    @property
    def is_up(self) -> bool:
        """Worth asking: connected, all is told, and the last answer came in time."""
        return self._is_connected and not self._is_late

    def bucket(self) -> int:
        """Number of the present bucket, on the clock that nobody sets."""
        return int(self._loop.time() / BUCKET_S)

    def changed(self, window: MinuteWindow, bucket: int) -> None:
        """A window was changed otherwise than by ``take``: the store is told with the next batch."""
        window.dirty.add(bucket)
        self._dirty[window] = None
        self._wake.set()

    async def take(
        self, windows: Sequence[MinuteWindow], limits: Sequence[tuple[int | None, int | None]], tokens: int
    ) -> Verdict | None:
        """Count a request in every window if all limits (requests, tokens; None: none) allow it, or in none.

        The windows have been counted in when it returns. None: no answer in time, and nothing was counted.
        """
        if not self.is_up:
            return None
        wanted = _Take(windows, limits, tokens, self._loop.create_future())
        self._queue.append(wanted)
        self._wake.set()
        try:
            await asyncio.wait((wanted.done,), timeout=self._limit_s)
        except asyncio.CancelledError:
            self._abandon(wanted)
            raise
        if wanted.done.done():
            return wanted.done.result()
        self.n_late += 1
        self._is_late = True
        self._abandon(wanted)
        return None

    def _abandon(self, wanted: _Take) -> None:
        """Its request goes another way, or has gone: what the store may have counted for it is taken back."""
        wanted.is_abandoned = True
        if wanted.done.done():
            verdict = wanted.done.result()
            if verdict is not None and verdict.is_taken:
                for window in wanted.windows:
                    if window.take_back(verdict.bucket, 1, wanted.tokens):
                        self.changed(window, verdict.bucket)

    # --- the connection -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a connection, until cancelled."""
        try:
            while True:
                try:
                    await self._serve()
                except (RedisError, OSError, TimeoutError) as error:
                    self._lost(f"{type(error).__name__} {error}".rstrip())
                await asyncio.sleep(self._backoff.next_s())
        finally:
            self._lost("")

    async def _serve(self) -> None:
        client = Redis.from_url(
            self._url,
            socket_connect_timeout=CONNECT_LIMIT_S,
            socket_timeout=BATCH_LIMIT_S,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            await self._connect(client)
            while True:
                try:
                    async with asyncio.timeout(PING_S):
                        await self._wake.wait()
                except TimeoutError:
                    # So that its loss is known before somebody waits for it.
                    await client.ping()
                    continue
                self._wake.clear()
                await self._send(client)
        finally:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await client.aclose()

    async def _connect(self, client: Redis) -> None:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            seconds, microseconds = await client.time()
            self._align((seconds + microseconds / 1e6 - self._loop.time()) / BUCKET_S)
            self._take_sha = await client.script_load(_TAKE)
            self._set_sha = await client.script_load(_SET)
        now = self.bucket()
        for window in self._windows():
            window.advance(now)
            window.dirty.update(window.spread())
            if window.dirty:
                self._dirty[window] = None
        while self._dirty:
            await self._send(client)
        # In the turn in which nothing was left to tell.
        self._is_connected, self._is_late = True, False
        self.n_connects += 1
        if self.last_error is not None or self.n_connects == 1:
            log.info("minutes.shared")
        self.last_error = None
        self._backoff.reset()

    def _align(self, ahead: float) -> None:
        """The store's clock is so many buckets ahead. Other numbers for the same buckets would count them twice."""
        if self._shift is None or abs(ahead - self._shift) > 1.0:
            self._shift = round(ahead)

    async def _send(self, client: Redis) -> None:
        """One batch: what was changed, then who wants to take; sent and answered in this order."""
        now = self.bucket()
        shift = self._shift
        assert shift is not None
        pipe = client.pipeline(transaction=False)
        n_sets = 0
        for window in list(self._dirty)[:MAX_BATCH]:
            del self._dirty[window]
            window.advance(now)
            counts = [str(n) for b in sorted(window.dirty) for n in (b + shift, *window.counts(b))]
            window.dirty.clear()
            if counts:
                pipe.evalsha(self._set_sha, 1, window.name, self._me, *counts)
                n_sets += 1
        takes: list[_Take] = []
        for wanted in self._queue[:MAX_BATCH]:
            if not wanted.is_abandoned:
                wanted.bucket = now
                for window in wanted.windows:
                    # Kept though nothing is in it: after a break the store is told what is, whatever it has counted.
                    window.add(now, 0, 0)
                names = [window.name for window in wanted.windows]
                limits = [str(-1 if limit is None else limit) for pair in wanted.limits for limit in pair]
                pipe.evalsha(
                    self._take_sha, len(names), *names, self._me, str(now + shift), str(wanted.tokens), *limits
                )
                takes.append(wanted)
        del self._queue[:MAX_BATCH]
        if self._queue or self._dirty:
            self._wake.set()
        if not n_sets and not takes:
            self._is_late = False
            return
        try:
            async with asyncio.timeout(BATCH_LIMIT_S):
                answers = await pipe.execute()
        except BaseException:
            for wanted in takes:
                if not wanted.done.done():
                    wanted.done.set_result(None)
            raise
        self._is_late = False
        for wanted, answer in zip(takes, answers[n_sets:], strict=True):
            self._answered(wanted, answer, shift)

    def _answered(self, wanted: _Take, answer: list[int], shift: int) -> None:
        is_taken = bool(answer[0])
        if wanted.is_abandoned:
            if is_taken:
                # The window does not have it: told again as it is, the store has not either.
                for window in wanted.windows:
                    self.changed(window, wanted.bucket)
            return
        sums: list[tuple[int, int]] = []
        free_at: list[tuple[int, int]] = []

        def ours(bucket: int) -> int:
            return bucket - shift if bucket > 0 else bucket

        for index, window in enumerate(wanted.windows):
            requests, free_requests, tokens, free_tokens = answer[1 + 4 * index : 5 + 4 * index]
            sums.append((requests, tokens))
            free_at.append((ours(free_requests), ours(free_tokens)))
            window.advance(wanted.bucket)
            window.heard(wanted.bucket, requests, tokens)
            if is_taken:
                window.add(wanted.bucket, 1, wanted.tokens)
        wanted.done.set_result(Verdict(is_taken, wanted.bucket, tuple(sums), tuple(free_at)))

    def _lost(self, reason: str) -> None:
        if self._is_connected and reason:
            log.warning("minutes.lost", reason=reason)
        elif reason and self.last_error is None:
            log.warning("minutes.unreachable", reason=reason)
        self._is_connected = False
        self.last_error = reason or self.last_error
        for wanted in self._queue:
            if not wanted.done.done():
                wanted.done.set_result(None)
        self._queue.clear()
