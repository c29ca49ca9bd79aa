"""Which starts of prompts a backend probably still holds: an estimate of TGI's prefix cache, kept by the router.

TGI reports no hits, so the router follows its rules: when a request ends, its whole-block prompt enters the cache (its
output does not); what requests reserve pushes the least recently used blocks out, but none that a running request
shares; a backend that was down has lost everything.

A prompt is known by its *chain*: one hash per block of ``PREFIX_BLOCK_TOKENS`` tokens, each over the whole start of the
prompt up to there and salted by the tenant, so that nobody profits from, or learns of, another tenant's prompts.

Invariants: a block is held only together with those before it in its chain (the last of a chain are the first to go),
which makes ``match`` a binary search. At a dispatch what is held and not shared is cut down to the KV that nobody has
reserved.

Cost: ``match`` O(log blocks of the chain); start and stop of a request O(blocks of its chain).
"""

from __future__ import annotations

from collections import OrderedDict

PREFIX_BLOCK_TOKENS = 64
"""Tokens per hash of a chain. Small enough to see a system prompt of a few hundred tokens, large enough that a prompt
of 8,000 is 125 numbers. TGI's own blocks are 1 token (flashinfer) or 256 (flashdecoding)."""


class PrefixIndex:
    """Blocks one backend probably holds.

    Attributes:
        idle: those nobody uses, least recently used first.
    """

    __slots__ = ("_running", "_shared", "idle")

    def __init__(self) -> None:
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._shared: dict[int, int] = {}
        """Block -> running requests that found it here."""
        self._running: dict[int, tuple[tuple[int, ...], int]] = {}
        """Ticket -> (chain, blocks of it that were found)."""

    def __len__(self) -> int:
        return len(self.idle) + len(self._shared)

    def match(self, chain: tuple[int, ...]) -> int:
        """Blocks of the chain that are held."""
        idle, shared = self.idle, self._shared
        if not chain or (chain[0] not in idle and chain[0] not in shared):
            return 0
        held, missing = 1, len(chain) + 1
        while missing - held > 1:
            middle = (held + missing) // 2
            block = chain[middle - 1]
            if block in idle or block in shared:
                held = middle
            else:
                missing = middle
        return held

    def start(self, ticket: int, chain: tuple[int, ...]) -> int:
        """A request starts: what it finds here stays for as long as it runs. Returns the blocks found."""
        shared, idle = self._shared, self.idle
        found = 0
        # Block by block: a chain whose hashes collide with others' must not upset the books.
        for block in chain:
            count = shared.get(block, 0)
            if not count:
                if block not in idle:
                    break
                del idle[block]
            shared[block] = count + 1
            found += 1
        self._running[ticket] = (chain, found)
        return found

    def stop(self, ticket: int, *, is_prefilled: bool) -> None:
        """A request is over. Its prompt is held from now on, if it was processed to its end."""
        known = self._running.pop(ticket, None)
        if known is None:
            return
        chain, found = known
        shared, idle = self._shared, self.idle
        # From the end of the prompt to its start, so that the start is the most recently used.
        for position in range(len(chain) - 1, -1, -1):
            block = chain[position]
            count = shared.get(block, 0)
            if position < found:
                if count > 1:
                    shared[block] = count - 1
                    continue
                del shared[block]
                idle[block] = None
            elif count == 0 and is_prefilled:
                idle[block] = None
                idle.move_to_end(block)

    def trim(self, free_tokens: int) -> None:
        """Only so many tokens of KV are reserved by nobody: forget what does not fit, least recently used first."""
        idle = self.idle
        room = max(0, free_tokens // PREFIX_BLOCK_TOKENS)
        while len(idle) > room:
            idle.popitem(last=False)

    def clear(self) -> None:
        """The backend lost everything, what runs included."""
        self.idle.clear()
        self._shared.clear()
        self._running.clear()
