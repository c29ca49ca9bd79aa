"""A TGI server reduced to what scheduling meets: strict FIFO, whole reservations, one token per step and request.

Written from the server's rules alone; it imports nothing of the scheduler it is used to judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Stream:
    """One upstream request: what it reserved, what is left of its prompt and of its output."""

    name: str
    input_tokens: int
    new_tokens: int
    length: int
    """Tokens the model would write before it stops by itself (counted from this stream's start)."""
    blocks: int = 0
    prefill_left: int = 0
    produced: int = 0
    is_closing: bool = False


@dataclass(slots=True)
class StepServer:
    """One server. ``step`` is one iteration; everything the client sees of it happens at its end."""

    kv_tokens: int
    block_size: int = 1
    speculate: int = 0
    prefill_per_step: int = 1_000_000
    queue: list[Stream] = field(default_factory=list)
    running: list[Stream] = field(default_factory=list)

    def usable(self) -> int:
        return self.kv_tokens // self.block_size - 1

    def blocks(self, input_tokens: int, new_tokens: int) -> int:
        tokens = input_tokens + min(new_tokens, 1024) + self.speculate - 1
        return -(-tokens // self.block_size)

    def free(self) -> int:
        return self.usable() - sum(stream.blocks for stream in self.running)

    def open(self, stream: Stream) -> None:
        stream.prefill_left = stream.input_tokens
        self.queue.append(stream)

    def close(self, name: str) -> None:
        """The client has gone: a queued stream vanishes, a running one is noticed at its next token."""
        self.queue = [stream for stream in self.queue if stream.name != name]
        for stream in self.running:
            if stream.name == name:
                stream.is_closing = True

    def step(self) -> list[tuple[str, str]]:
        """One iteration. Returns (name, what) in batch order: ``token``, then perhaps ``length`` or ``end``."""
        while self.queue:
            head = self.queue[0]
            blocks = self.blocks(head.input_tokens, head.new_tokens)
            if blocks > self.free():
                break
            head.blocks = blocks
            self.running.append(self.queue.pop(0))
        budget = self.prefill_per_step
        events: list[tuple[str, str]] = []
        left: list[Stream] = []
        for stream in self.running:
            if stream.prefill_left:
                taken = min(budget, stream.prefill_left)
                budget -= taken
                stream.prefill_left -= taken
                if stream.prefill_left:
                    left.append(stream)
                    continue
            if stream.is_closing:
                continue
            stream.produced += 1
            events.append((stream.name, "token"))
            if stream.produced >= stream.length:
                events.append((stream.name, "end"))
            elif stream.produced >= stream.new_tokens:
                events.append((stream.name, "length"))
            else:
                left.append(stream)
        self.running = left
        return events

    def crash(self) -> None:
        self.queue.clear()
        self.running.clear()
