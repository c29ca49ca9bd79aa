"""Which quantile of its predicted length a request's slice is: the critical fractile, learned in its pool.

A slice that is a token too short costs its share of a prefill done again; a token too long costs KV that stands empty
while somebody waits for it. Both are seconds of a whole backend per token, as observed:

    c_u = input sent again after a slice was too short / prefill rate      per token that the continuation then wrote
    c_o = tokens reserved and not written x seconds somebody waited / KV   per such token
    p*  = c_u / (c_u + c_o), within [0.5, 0.99]

With p* the expected costs of one token more and of one token less are equal (newsvendor): exactly so for rests whose
tail is exponential, where what is missing does not depend on where the slice ended.

Only slices that p* has sized teach it. It starts at 0.97 (``core.lengths``), to which observations add up as if
twenty had been made there; the last few hundred decide.

Cost: O(1).

Source: critical fractile of quantile reservation; a fixed level costs up to half as much again where prompts are short
or long for the pool.
"""

from __future__ import annotations

START = 0.97
LOWEST, HIGHEST = 0.5, 0.99

_KEPT = 0.995
_STARTED_WITH = 20.0


class SliceLevel:
    """See the module.

    Attributes:
        level: p*.
    """

    __slots__ = ("_long_s", "_long_tokens", "_num_long", "_num_short", "_short_s", "_short_tokens", "level")

    def __init__(self) -> None:
        self.level = START
        self._short_s = self._short_tokens = self._num_short = 0.0
        self._long_s = self._long_tokens = self._num_long = 0.0

    @property
    def short_token_s(self) -> float | None:
        """``c_u``; None before it was observed."""
        return self._short_s / self._short_tokens if self._short_tokens else None

    @property
    def long_token_s(self) -> float | None:
        """``c_o``; None before it was observed."""
        return self._long_s / self._long_tokens if self._long_tokens else None

    def was_short(self, prefill_s: float, tokens: int) -> None:
        """A slice was too short: its continuation spent so long on the prompt again, and wrote so many tokens."""
        if tokens <= 0 or prefill_s < 0.0:
            return
        self._short_s = _KEPT * self._short_s + prefill_s
        self._short_tokens = _KEPT * self._short_tokens + tokens
        self._num_short = _KEPT * self._num_short + 1.0
        self._learn()

    def was_long(self, tokens: int, waited_s: float, kv_tokens: int) -> None:
        """A slice was too long by so many tokens of KV, while somebody waited for so long."""
        if tokens <= 0 or kv_tokens <= 0:
            return
        self._long_s = _KEPT * self._long_s + tokens * waited_s / kv_tokens
        self._long_tokens = _KEPT * self._long_tokens + tokens
        self._num_long = _KEPT * self._num_long + 1.0
        self._learn()

    def _learn(self) -> None:
        short, long = self.short_token_s, self.long_token_s
        if short is None or long is None or short + long <= 0.0:
            return
        seen = min(self._num_short, self._num_long)
        level = (_STARTED_WITH * START + seen * short / (short + long)) / (_STARTED_WITH + seen)
        self.level = min(max(level, LOWEST), HIGHEST)
