"""How long a slice of a request with a predicted distribution is: the cheapest way to hold KV for it.

A slice of ``s`` tokens holds ``input + s`` tokens of KV while it runs, whatever of it gets written; if it ends before
the answer does, what it wrote is processed again, and what it was sent too, unless the request goes on in place, as a
share ``kept`` of them does (``Decider.slice_ended``). Both take time of a backend from others. With ``price``, what a
KV token held for one step costs, counted in tokens processed again, the rest of an answer of ``k`` tokens costs

    C(k) = min over s of  price * (input + k + s) * E[steps of the slice]
                          + P(it goes on) * ((1 - kept) * (input + k) + s + _SLICE_TOKENS + C(k + s))

So a slice is the critical fractile p* = c_u / (c_u + c_o) of what is left, with the two costs as they are for this
request: higher where a long input would be sent again, lower where a short one would, or where nobody knows how long
the answer will be and a long reservation stands empty for long.

Slices may end at the quantiles and at lengths between them, never before the least likely one (0.05): to divide what
surely goes on would be cheaper still where KV is dear, but a client's stream pauses wherever a slice ends.

Price: a backend with full KV gains by KV that more sequences share the part of a step that does not grow with them.

    c_o = _SHARED * step / KV tokens      backend seconds per KV token held for a step
    c_u = 1 / prefill rate                backend seconds per token processed again
    price = c_o / c_u                     of what was observed lately

Cost: O(n^2) for n lengths at which slices may end, some twenty, less what no end beyond can make cheaper.

Source: critical fractile of quantile reservation. The program over slices is ours.
"""

from __future__ import annotations

from router_ext.core.survival import Survival

_SHARED = 0.4
"""The part of a step that sequences share: half with Llama-2-7B on an A10G with full KV, 0.3 where steps are mostly
context. Learned from steps it would be noise, for full backends run much the same number of sequences. A price off by
half costs a tenth of what slices gain (``fairlane simulate trace --lengths``)."""

_SLICE_TOKENS = 64
"""What a slice costs beside: a request more, and a pause in a client's stream. Without it there are twice as many
slices for no more throughput; with twice as much, throughput is up to 1% less."""

_START = 0.004
"""Price before speeds were observed: of servers like those."""

_KEEP = 0.98
"""Speeds jump with what a step happens to carry; the last fifty slices decide."""

_PIECE_TOKENS = 64
"""So near to each other may slices end."""

_MOST_PIECES = 6
"""Into so many parts the lengths between two quantiles are cut at most."""

_TAIL = 1.25
"""Beyond the quantiles each length at which slices may end is so many times the one before."""

_NEVER = float("inf")


class KvPrice:
    """What KV costs in one pool, see the module.

    Attributes:
        ratio: the price.
        resent_s, held_s: ``c_u`` and ``c_o``; None before they were observed.
        level: quantile of what was left, mean over the last slices; 1 before the first.
        onward: share of the continuations that went on in place lately.
    """

    __slots__ = ("_count", "held_s", "level", "onward", "ratio", "resent_s")

    def __init__(self) -> None:
        self.ratio = _START
        self.resent_s: float | None = None
        self.held_s: float | None = None
        self.level = 1.0
        self.onward = 0.0
        self._count = 0

    def observe_resumed(self, *, is_onward: bool) -> None:
        """A request starts that ran before."""
        self.onward += (1.0 - _KEEP) * (is_onward - self.onward)

    def observe(self, *, step_s: float, prefill_rate: float | None, kv_tokens: int, level: float) -> None:
        """A slice starts at a level, on a backend with so much KV, such steps and so many prompt tokens per second."""
        self._count += 1
        share = max(1.0 - _KEEP, 1.0 / self._count)
        self.level += share * (level - self.level)
        if prefill_rate is None or kv_tokens <= 0:
            return
        resent, held = 1.0 / prefill_rate, _SHARED * step_s / kv_tokens
        # Means of seconds, not of their ratio: a prompt rate that is far too high for once counts for little.
        self.resent_s = resent if self.resent_s is None else self.resent_s + share * (resent - self.resent_s)
        self.held_s = held if self.held_s is None else self.held_s + share * (held - self.held_s)
        self.ratio = self.held_s / self.resent_s


def cheapest(
    survival: Survival, *, prompt_tokens: int, produced: int, cap: int, most: int, price: float, kept: float = 0.0
) -> int:
    """New tokens of the next slice, at least 1 and at most ``most``.

    Args:
        prompt_tokens: of the client. produced: output so far, below ``cap``, at which the answer ends at the latest.
        most: longest slice. price, kept: see the module.
    """
    ends, left = _ends(survival, produced, cap, most)
    last = len(ends) - 1
    # Steps until each end, on average over answers that got to ``produced``.
    steps = [0.0] * (last + 1)
    total = 0.0
    for j in range(1, last + 1):
        total += (left[j - 1] + left[j]) / 2.0 * (ends[j] - ends[j - 1])
        steps[j] = total
    # Cheapest way on from each length at which a slice may begin, the last first.
    onward = [0.0] * (last + 1)
    best = last
    for begin in range(last - 1, -1, -1):
        least = _NEVER
        start = ends[begin]
        again = (1.0 - kept) * (prompt_tokens + start) + _SLICE_TOKENS
        for end in range(begin + 1, last + 1):
            size = ends[end] - start
            if size > most:
                break
            cost = price * (prompt_tokens + ends[end]) * (steps[end] - steps[begin])
            if cost >= least:
                # Longer ones hold more, for longer.
                break
            cost += left[end] * (again + size) + onward[end]
            if cost < least:
                least, best = cost, end
        onward[begin] = least
    return ends[best] - produced


def _ends(survival: Survival, produced: int, cap: int, most: int) -> tuple[list[int], list[float]]:
    """Lengths at which slices may end, ascending from ``produced`` to the cap, and the share of answers that go on."""
    reached = survival.beyond(produced)
    ends, left = [produced], [1.0]
    at = produced

    def add(length: int) -> None:
        nonlocal at
        while length - at > most:
            at += most
            ends.append(at)
            left.append(survival.beyond(at) / reached)
        if length > at:
            at = length
            ends.append(at)
            left.append(survival.beyond(at) / reached)

    for place, corner in enumerate(survival.corners()):
        length = min(corner, cap)
        gap = length - at
        if gap > 0:
            parts = 1 if place == 0 else min(_MOST_PIECES, -(-gap // _PIECE_TOKENS))
            start = at
            for part in range(1, parts + 1):
                add(start + gap * part // parts)
    while at < cap:
        add(min(cap, max(at + _PIECE_TOKENS, int(at * _TAIL))))
    left[-1] = 0.0
    return ends, left
