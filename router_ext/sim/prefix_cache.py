"""A server's prefix cache: prompts that left, in KV that nobody has reserved."""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """Prompts that left, by request: how many of their first tokens are still there.

    A prompt is found again only by a continuation of its own request: the suites' prompts share nothing else.
    """

    __slots__ = ("_kept", "tokens")

    def __init__(self) -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()
        self.tokens = 0

    def take(self, name: str, input_tokens: int) -> int:
        """Tokens of this prompt that need not be computed; they belong to its reservation from here on."""
        kept = self._kept.pop(name, 0)
        self.tokens -= kept
        # A forward needs at least one token to compute.
        return min(kept, input_tokens - 1)

    def peek(self, name: str, input_tokens: int) -> int:
        """As ``take``, without taking."""
        return min(self._kept.get(name, 0), input_tokens - 1)

    def put(self, name: str, input_tokens: int) -> None:
        """A request left; its prompt stays as long as there is room."""
        self.tokens += input_tokens - self._kept.pop(name, 0)
        self._kept[name] = input_tokens

    def shrink(self, room: int) -> None:
        """Evict, least recently used first and from the end of a prompt, until no more than ``room`` is taken."""
        kept = self._kept
        while self.tokens > room:
            name, tokens = next(iter(kept.items()))
            excess = self.tokens - room
            if tokens > excess:
                kept[name] = tokens - excess
                self.tokens = room
                return
            del kept[name]
            self.tokens -= tokens
