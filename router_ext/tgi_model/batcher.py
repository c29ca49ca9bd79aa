"""TGI's queue and continuous batching loop as a state machine.

One iteration of TGI's loop is: ask the queue for newcomers; if some fit, run a prefill (with chunked prefill the
running batch rides along and gets its token too); then run a decode. ``next_step`` hands out those forwards one by
one, ``complete`` takes their outcome. The queue is a strict FIFO: nothing behind a head that does not fit is looked at.

Source: TGI ``backends/v3/src/{queue,backend}.rs``, ``flash_causal_lm.py`` for the split of chunks.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from router_ext.tgi_model.blocks import Allocation, BlockAllocator
from router_ext.tgi_model.reservation import reserved_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What a TGI server was started with. ``block_size`` None is a padded model: no allocator, no chunking."""

    max_batch_prefill_tokens: int = 4096
    max_batch_total_tokens: int = 16_384
    max_batch_size: int | None = None
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    block_size: int | None = 16
    chunking: bool = True
    prefix_cache: bool = False
    speculate: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One request, or one 1024-token piece of it, in the queue or in the batch.

    Attributes:
        is_closed: the client has gone. A queued entry stays in the queue until it reaches the head.
        computed: prompt tokens whose keys and values exist.
        chunk: prompt tokens the next forward computes; 0 once the prompt is complete.
        owner: whatever the driver wants back.
    """

    input_length: int
    max_new_tokens: int
    prompt_ids: Sequence[int] | None = None
    owner: Any = None
    is_closed: bool = False
    queued_at: float = 0.0
    batched_at: float | None = None
    computed: int = 0
    chunk: int = 0
    allocation: Allocation | None = None

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.input_length


class StepKind(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """One forward: prompt chunks to compute and requests to decode, in batch order."""

    kind: StepKind
    prefill: list[tuple[Entry, int]]
    decode: list[Entry]
    admitted: list[Entry]

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk for _, chunk in self.prefill)

    @property
    def sampled(self) -> list[Entry]:
        """Entries that get a token from this forward: decoding ones, and those whose prompt becomes complete."""
        return [e for e, chunk in self.prefill if e.computed + chunk >= e.input_length] + self.decode


@dataclass(slots=True)
class Admission:
    """Counts of one look into the queue, for the metrics."""

    concat: str | None = None
    size: int = 0


class Batcher:
    """Queue, running batch and block allocator of one TGI server. Not thread-safe: one driver owns it."""

    def __init__(self, rules: BatchRules) -> None:
        if rules.chunking and rules.block_size is None:
            raise ValueError("a padded model cannot prefill in chunks")
        self.rules = rules
        self.queue: deque[Entry] = deque()
        self.running: list[Entry] = []
        self.dropped = 0  # dead entries removed from the head of the queue so far
        self.last_admission = Admission()
        self.allocator = (
            BlockAllocator(
                total_tokens=rules.max_batch_total_tokens,
                block_size=rules.block_size,
                prefix_cache=rules.prefix_cache,
            )
            if rules.block_size is not None
            else None
        )
        self._owes_decode: bool = False
        self._waiting_tokens = 1

    @property
    def batch_max_tokens(self) -> int:
        """Reserved KV tokens of the running batch; shared prefix blocks count once per request, as in TGI's gauge."""
        if not self.running:
            return 0
        if self.allocator is not None:
            return sum(e.allocation.blocks for e in self.running if e.allocation) * self.allocator.block_size
        longest = max(e.input_length for e in self.running)
        return len(self.running) * (longest + max(e.max_new_tokens for e in self.running))

    @property
    def current_tokens(self) -> int:
        """Tokens of the next forward: one per decoding request and the pending chunks."""
        return sum(e.chunk if e.is_prefilling else 1 for e in self.running)

    def append(self, entry: Entry, now: float) -> None:
        entry.queued_at = now
        self.queue.append(entry)

    def next_step(self, now: float) -> Step | None:
        """The forward to run now, or None if there is nothing to do (or the head of the queue does not fit)."""
        rules = self.rules
        self.last_admission = Admission()
        if not self.running:
            admitted = self.next_batch(
                min_size=None,
                max_size=rules.max_batch_size,
                prefill_token_budget=rules.max_batch_prefill_tokens,
                token_budget=rules.max_batch_total_tokens,
                now=now,
            )
            return self._start_prefill(admitted, ride_along=False) if admitted else None
        if not self._owes_decode:
            admitted = self._admit_to_running(now)
            if admitted:
                self._waiting_tokens = 1
                return self._start_prefill(admitted, ride_along=rules.chunking)
        self._owes_decode = False
        self._waiting_tokens += 1
        return self._forward(StepKind.DECODE, self.running, [])

    def _admit_to_running(self, now: float) -> list[Entry]:
        rules = self.rules
        token_budget = max(0, rules.max_batch_total_tokens - self.batch_max_tokens)
        if rules.chunking:
            min_size, max_size = None, None
            prefill_budget = max(0, rules.max_batch_prefill_tokens - self.current_tokens)
            reason = "chunking"
        else:
            starved = self._waiting_tokens >= rules.max_waiting_tokens
            min_size = None if starved else math.floor(len(self.running) * rules.waiting_served_ratio)
            max_size = None if rules.max_batch_size is None else max(0, rules.max_batch_size - len(self.running))
            prefill_budget = rules.max_batch_prefill_tokens
            reason = "wait_exceeded" if starved else "backpressure"
        admitted = self.next_batch(
            min_size=min_size,
            max_size=max_size,
            prefill_token_budget=prefill_budget,
            token_budget=token_budget,
            now=now,
        )
        if admitted:
            self.last_admission.concat = reason
        return admitted

    def _start_prefill(self, admitted: list[Entry], *, ride_along: bool) -> Step:
        self.last_admission.size = len(admitted)
        step = self._forward(StepKind.PREFILL, [*self.running, *admitted] if ride_along else admitted, admitted)
        self._owes_decode = bool(self.running)
        self.running.extend(admitted)
        return step

    @staticmethod
    def _forward(kind: StepKind, entries: list[Entry], admitted: list[Entry]) -> Step:
        prefill: list[tuple[Entry, int]] = []
        decode: list[Entry] = []
        for entry in entries:
            if not entry.is_prefilling:
                decode.append(entry)
            elif entry.chunk:
                prefill.append((entry, entry.chunk))
        return Step(kind=kind, prefill=prefill, decode=decode, admitted=admitted)

    def complete(self, step: Step, *, finished: Collection[Entry]) -> None:
        """Take the outcome of a forward: prompts advance, ``finished`` entries leave and free their blocks at once."""
        for entry, chunk in step.prefill:
            entry.computed += chunk
            entry.chunk = 0
        if finished:
            self.remove(finished)
        self._split_chunks()

    def remove(self, entries: Collection[Entry]) -> None:
        """Take entries out of the running batch: finished, dropped, or lost to a failed forward."""
        gone = set(entries)
        for entry in gone:
            if entry.allocation is not None and self.allocator is not None:
                self.allocator.free(entry.allocation)
                entry.allocation = None
        self.running = [e for e in self.running if e not in gone]
        if not self.running:
            self._owes_decode = False
            self._waiting_tokens = 1

    def _split_chunks(self) -> None:
        """Share the prefill budget of the next forward among unfinished prompts, last request first."""
        pending = [e for e in self.running if e.is_prefilling]
        if not pending:
            return
        budget = self.rules.max_batch_prefill_tokens - (len(self.running) - 1)
        for entry in reversed(pending):
            entry.chunk = max(0, min(entry.input_length - entry.computed, budget))
            budget -= entry.chunk
        if all(e.chunk == 0 for e in pending):
            pending[-1].chunk = 1  # a budget eaten up by decoding requests must not stall the prompt for ever

    def next_batch(
        self,
        *,
        min_size: int | None,
        max_size: int | None,
        prefill_token_budget: int,
        token_budget: int,
        now: float,
    ) -> list[Entry]:
        """Entries taken from the head of the queue, their blocks reserved; empty if none fits or too few do."""
        rules = self.rules
        queue = self.queue
        if prefill_token_budget == 0 or token_budget == 0 or not queue or max_size == 0:
            return []
        if min_size is not None and len(queue) < min_size:
            return []
        if rules.block_size is not None:
            prefill_token_budget = -(-prefill_token_budget // rules.block_size) * rules.block_size
        taken: list[Entry] = []
        prefill_tokens = decode_tokens = longest = 0
        while queue:
            entry = queue[0]
            if entry.is_closed:
                queue.popleft()
                self.dropped += 1
                continue
            if self.allocator is None:
                longest = max(longest, entry.input_length)
                prefill_tokens = (len(taken) + 1) * longest
                decode_tokens += entry.max_new_tokens
                over = prefill_tokens + decode_tokens + rules.speculate > token_budget
                if prefill_tokens > prefill_token_budget or over:
                    break
                entry.chunk = entry.input_length
            else:
                allocation = self.allocator.allocate(
                    reserved_tokens(
                        input_length=entry.input_length, new_tokens=entry.max_new_tokens, speculate=rules.speculate
                    ),
                    entry.prompt_ids,
                )
                if allocation is None:
                    break
                postfix = entry.input_length - allocation.prefix_tokens
                is_over = prefill_tokens + postfix > prefill_token_budget
                chunk = prefill_token_budget - prefill_tokens if is_over else postfix
                if is_over and (not rules.chunking or chunk <= 0):
                    self.allocator.free(allocation)
                    break
                entry.allocation = allocation
                entry.computed = allocation.prefix_tokens
                entry.chunk = chunk
                prefill_tokens += chunk
                if is_over:
                    taken.append(queue.popleft())
                    break
            taken.append(queue.popleft())
            if len(taken) == max_size:
                break
        if min_size is not None and len(taken) < min_size:
            for entry in reversed(taken):
                self._put_back(entry)
            return []
        for entry in taken:
            entry.batched_at = now
        return taken

    def _put_back(self, entry: Entry) -> None:
        if entry.allocation is not None and self.allocator is not None:
            self.allocator.free(entry.allocation)
            entry.allocation = None
        entry.computed = entry.chunk = 0
        self.queue.appendleft(entry)
