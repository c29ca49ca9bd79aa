"""One TGI server in virtual time: FIFO queue, whole reservations, iterations, prefix cache.

Rules, as TGI v3 applies them:

- The queue is a strict FIFO, looked at once per iteration; the head that does not fit stops it. A request reserves
  ``input + min(new, 1024) - 1`` tokens when it is admitted and keeps them until it leaves.
- An iteration processes at most ``prefill_budget`` tokens, decoders included. With chunking the last prompt admitted
  takes what is left of the budget and goes on in the next iteration; without, a prefill has an iteration for itself.
- Every decoder gets one token per iteration, a prompt that became complete its first.
- A closed stream is noticed at the end of the running iteration, or of the whole prefill if its prompt was still being
  processed; queued, it vanishes when it reaches the head.
- Only prompts are cached, least recently used first to go, in KV that nobody has reserved.
- A request for more than 1,024 new tokens runs in pieces; each goes to the tail of the queue with all it has written.
  It ends early where that has become longer than the longest prompt.

Cost: O(requests that enter or leave) per iteration, not O(running): requests that decode share one clock, a heap holds
at which tick each ends, and the context length of all is a running sum.

Differences to ``router_ext.tgi_model.Batcher``, which moves every request separately: an iteration here is one forward
(the batcher's loop runs a decode after every prefill before it admits again), and blocks are single tokens.

Source: TGI v3 ``queue.rs``, ``backend.rs``, ``block_allocator.rs``, ``radix.rs``.
"""

from __future__ import annotations

import heapq
from collections import deque

from router_ext.sim.models import ServerModel
from router_ext.sim.prefix_cache import PrefixCache
from router_ext.sim.streams import NOBODY, Batch, Outcome, Stream
from router_ext.tgi_model import MAX_PIECE_TOKENS, reserved_tokens


class Server:
    """See the module. The driver calls ``begin`` when nothing runs, and ``finish`` at the instant it returned.

    Attributes:
        reserved: KV tokens of the running requests. num_running: how many they are.
        kv_seconds, running_seconds: integrals of both over time, up to ``integrated_s``.
        num_recomputed: prompt tokens computed again because of a preemption. num_continued: at slice continuations.
    """

    def __init__(self, model: ServerModel) -> None:
        self.model = model
        self.usable = model.kv_tokens - 1
        self.queue: deque[Stream] = deque()
        self.cache = PrefixCache()
        self.reserved = 0
        self.num_running = 0
        self.kv_seconds = 0.0
        self.running_seconds = 0.0
        self.integrated_s = 0.0
        self.num_recomputed = 0
        self.num_continued = 0
        self.num_prefilled = 0
        self.iteration = 0
        self._tick = 0
        self._order = 0
        self._context = 0
        self._decoding: dict[Stream, None] = {}
        self._batch = NOBODY
        self._is_batch_stale = False
        self._prefilling: list[Stream] = []
        self._ends: list[tuple[int, int, Stream]] = []
        self._closing: list[Stream] = []
        self._is_decode_step = False
        self._owes_decode = False
        self._waiting_tokens = 1

    # --- the client's side -----------------------------------------------------------------------------------------

    def open(self, stream: Stream) -> None:
        """A request has arrived."""
        self._order += 1
        stream.order = self._order
        self._enqueue(stream)

    def close(self, stream: Stream) -> None:
        """The client's connection is gone; noticed as the module says."""
        stream.is_closed = True
        if stream.is_running:
            self._closing.append(stream)

    def _enqueue(self, stream: Stream) -> None:
        stream.piece = min(stream.new_tokens - stream.written, MAX_PIECE_TOKENS)
        stream.reserved = reserved_tokens(input_length=stream.input_tokens, new_tokens=stream.piece)
        self.queue.append(stream)

    # --- iterations ------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """Begin an iteration; the instant of its end, or None if there is nothing to do."""
        model = self.model
        if model.is_chunked:
            prefill_tokens = self._admit_chunks(now)
            num_decoding = len(self._decoding)
        else:
            prefill_tokens = self._admit_whole(now)
            num_decoding = 0 if prefill_tokens else len(self._decoding)
        if not num_decoding and not prefill_tokens:
            return None
        self._is_decode_step = num_decoding > 0
        duration_ms = model.per_prefill_token_ms * prefill_tokens
        if num_decoding:
            duration_ms += (
                model.decode_base_ms + model.per_sequence_ms * num_decoding + model.per_context_token_ms * self._context
            )
        else:
            duration_ms += model.prefill_base_ms
        self.num_prefilled += prefill_tokens
        return now + duration_ms / 1_000.0

    def finish(self, now: float) -> Outcome:
        """End the iteration: who shows what, who leaves."""
        self.iteration += 1
        decoded = NOBODY
        ended: list[Stream] = []
        if self._is_decode_step:
            decoding = self._decoding
            if self._is_batch_stale:
                self._batch = Batch(tuple(decoding))
                self._is_batch_stale = False
            decoded = self._batch
            self._tick = tick = self._tick + 1
            self._context += len(decoding)
            ends = self._ends
            while ends and ends[0][0] <= tick:
                stream = heapq.heappop(ends)[2]
                if stream.is_decoding and stream.end_tick <= tick:
                    self._end_piece(stream, now, ended)
        started: list[Stream] = []
        if self._prefilling:
            started = self._complete_prompts(now, ended)
        if self._closing:
            self._drop_closed(now)
        return Outcome(decoded, started, ended, tick=self._tick, iteration=self.iteration)

    def _complete_prompts(self, now: float, ended: list[Stream]) -> list[Stream]:
        started: list[Stream] = []
        unfinished: list[Stream] = []
        for stream in self._prefilling:
            stream.left -= stream.chunk
            if stream.left:
                unfinished.append(stream)
                continue
            started.append(stream)
            stream.base = self._tick
            stream.before = stream.written
            stream.first_iteration = self.iteration
            stream.is_decoding = True
            self._decoding[stream] = None
            self._is_batch_stale = True
            self._context += stream.input_tokens + 1
            produces = min(stream.piece, stream.length - stream.written)
            stream.end_tick = self._tick + produces - 1
            if produces == 1:
                self._end_piece(stream, now, ended)
            else:
                heapq.heappush(self._ends, (stream.end_tick, stream.order, stream))
        self._prefilling = unfinished
        return started

    def _end_piece(self, stream: Stream, now: float, ended: list[Stream]) -> None:
        """The piece has all its tokens: the request is over, or goes to the tail for its next one."""
        produced = self._tick - stream.base + 1
        self._leave(stream, now)
        stream.written += produced
        is_over = stream.written >= min(stream.length, stream.new_tokens)
        if not is_over and stream.input_tokens + produced <= self.model.longest_input_tokens:
            stream.input_tokens += produced
            self._enqueue(stream)
        else:
            ended.append(stream)

    def _drop_closed(self, now: float) -> None:
        """Streams whose client has gone leave, if this iteration had a token for them; that is how it is noticed."""
        still: list[Stream] = []
        for stream in self._closing:
            if stream.is_decoding and (self._is_decode_step or stream.first_iteration == self.iteration):
                self._leave(stream, now)
            elif stream.is_running:
                still.append(stream)
        self._closing = still

    def _leave(self, stream: Stream, now: float) -> None:
        self._integrate(now)
        stream.is_running = stream.is_decoding = False
        stream.left_iteration = self.iteration
        del self._decoding[stream]
        self._is_batch_stale = True
        self._context -= stream.input_tokens + self._tick - stream.base + 1
        self.reserved -= stream.reserved
        self.num_running -= 1
        self.cache.put(stream.job.request_id, stream.input_tokens)
        self.cache.shrink(self.usable - self.reserved)
        if not self.num_running:
            self._owes_decode = False
            self._waiting_tokens = 1

    # --- admission -------------------------------------------------------------------------------------------------

    def _admit_chunks(self, now: float) -> int:
        """Give the unfinished prompt its chunk, then take newcomers while budget and KV last. Prompt tokens in all."""
        budget = self.model.prefill_budget_tokens - len(self._decoding)
        total = 0
        for stream in self._prefilling:
            # A budget eaten up by decoders must not stall the prompt for ever.
            stream.chunk = max(1, min(stream.left, budget))
            budget -= stream.chunk
            total += stream.chunk
        queue = self.queue
        while queue and budget > 0:
            stream = queue[0]
            if stream.is_closed:
                queue.popleft()
                continue
            if stream.reserved > self.usable - self.reserved:
                break
            queue.popleft()
            self._start(stream, now)
            stream.chunk = min(stream.left, budget)
            budget -= stream.chunk
            total += stream.chunk
        return total

    def _admit_whole(self, now: float) -> int:
        """Newcomers of a prefill of their own, without chunking; 0 if a decode is due or too few would come."""
        model = self.model
        min_size = 0
        if self.num_running:
            if self._owes_decode:
                self._owes_decode = False
                self._waiting_tokens += 1
                return 0
            if self._waiting_tokens < model.max_waiting_tokens:
                min_size = int(self.num_running * model.waiting_served_ratio)
        queue = self.queue
        while queue and queue[0].is_closed:
            queue.popleft()
        budget = model.prefill_budget_tokens
        free = self.usable - self.reserved
        taken: list[Stream] = []
        if len(queue) >= min_size:
            for stream in queue:
                if stream.is_closed:
                    continue
                chunk = stream.input_tokens - self.cache.peek(stream.job.request_id, stream.input_tokens)
                if stream.reserved > free or chunk > budget:
                    break
                free -= stream.reserved
                budget -= chunk
                taken.append(stream)
        if not taken or len(taken) < min_size:
            self._waiting_tokens += self.num_running > 0
            return 0
        while taken[-1].is_running is False and queue:
            stream = queue.popleft()
            if not stream.is_closed:
                self._start(stream, now)
        total = 0
        for stream in taken:
            stream.chunk = stream.left
            total += stream.chunk
        self._waiting_tokens = 1
        self._owes_decode = self.num_running > len(taken)
        return total

    def _start(self, stream: Stream, now: float) -> None:
        self._integrate(now)
        cached = self.cache.take(stream.job.request_id, stream.input_tokens)
        stream.left = stream.input_tokens - cached
        stream.is_running = True
        self.num_running += 1
        self.reserved += stream.reserved
        self.cache.shrink(self.usable - self.reserved)
        self._prefilling.append(stream)
        if stream.written or stream.was_sliced:
            self.num_continued += stream.left
        elif stream.was_preempted:
            self.num_recomputed += stream.left

    def _integrate(self, now: float) -> None:
        elapsed = now - self.integrated_s
        if elapsed > 0.0:
            self.kv_seconds += elapsed * self.reserved
            self.running_seconds += elapsed * self.num_running
            self.integrated_s = now

    def settle(self, now: float) -> None:
        """Bring the integrals up to ``now``."""
        self._integrate(now)
