"""The distribution of one request's output length, and what is left of it once some of the answer has been written.

A prediction is seven quantiles (``LEVELS``). ``S(x) = P(length > x)`` runs straight between them, from ``S(0) = 1``.
Beyond the 0.95 quantile it falls as a power that goes on as the last two quantiles began, and from the 0.99 quantile on
no faster than ``_STEEPEST_TAIL``: answers that outlive their prediction are the long ones.

    P(length > x | length > k)      = S(x) / S(k)
    quantile p of the whole length  = the x with S(x) = (1 - p) S(k)                 > k
    expected rest up to a cap       = integral of S from k to the cap / S(k)

Rests of heavy tails *grow* with what has been written, so decisions must not be taken anew for every token:
``next_look`` says when it is worth it.

Cost: O(1), a scan of eight segments. No number of a prediction decides safety or fairness.

Source: survival update of an output-length predictor while a stream runs; the tail is Pareto's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Levels at which a prediction states quantiles, everywhere."""

_SURVIVAL = (1.0, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01)
"""``S`` at 0, at the stated quantiles and at the 0.99 quantile."""

_TOP, _LAST = 7, 8
"""Places of the 0.95 and the 0.99 quantile in it."""

_STEEPEST, _FLATTEST = 64.0, 1.25
"""Exponents beyond the 0.95 quantile: where quantiles agree the 0.99 quantile lies 3% above them, and ones that are far
apart do not send it to infinity."""

_STEEPEST_TAIL = 4.0
"""Whoever outlives even the 0.99 quantile was mispredicted: half of them write 19% more at least, not the 1% that
sharp quantiles would say, or a request would be continued in many small slices."""

_LOOK_TOKENS = 32
_LOOK_SHARE = 0.125


class Survival:
    """See the module.

    Args:
        quantiles: tokens at ``LEVELS``, each at least 1 and none below the one before (what states them sees to it).
    """

    __slots__ = ("_exponent", "_lengths", "_tail_exponent")

    def __init__(self, quantiles: Sequence[int]) -> None:
        high, top = float(quantiles[5]), float(quantiles[6])
        spread = math.log(top / high)
        exponent = _STEEPEST if spread <= math.log(2.0) / _STEEPEST else max(math.log(2.0) / spread, _FLATTEST)
        self._exponent: float = exponent
        self._tail_exponent: float = min(exponent, _STEEPEST_TAIL)
        self._lengths: tuple[float, ...] = (0.0, *map(float, quantiles), top * float(5.0 ** (1.0 / exponent)))

    def beyond(self, tokens: float) -> float:
        """``S``: the probability that the answer is longer than this. Never 0."""
        lengths = self._lengths
        if tokens >= lengths[_LAST]:
            return float(_SURVIVAL[_LAST] * (lengths[_LAST] / tokens) ** self._tail_exponent)
        if tokens >= lengths[_TOP]:
            return float(_SURVIVAL[_TOP] * (lengths[_TOP] / tokens) ** self._exponent)
        upper = 1
        while lengths[upper] <= tokens:
            upper += 1
        low, high = lengths[upper - 1], lengths[upper]
        share = (tokens - low) / (high - low)
        return _SURVIVAL[upper - 1] + share * (_SURVIVAL[upper] - _SURVIVAL[upper - 1])

    def total(self, produced: int, level: float) -> int:
        """The whole length that an answer of ``produced`` tokens, not at its end, will not exceed with this
        probability; at least one token more than it has. Rises with both arguments."""
        left = (1.0 - level) * self.beyond(produced)
        lengths = self._lengths
        if left <= _SURVIVAL[_LAST]:
            length = lengths[_LAST] * float((_SURVIVAL[_LAST] / left) ** (1.0 / self._tail_exponent))
        elif left <= _SURVIVAL[_TOP]:
            length = lengths[_TOP] * float((_SURVIVAL[_TOP] / left) ** (1.0 / self._exponent))
        else:
            upper = 1
            while _SURVIVAL[upper] > left:
                upper += 1
            low, high = _SURVIVAL[upper - 1], _SURVIVAL[upper]
            length = lengths[upper] - (left - high) / (low - high) * (lengths[upper] - lengths[upper - 1])
        # Rounding up must not make a whole token of what floats leave of an exact one.
        return max(produced + 1, math.ceil(length - 1e-6))

    def corners(self) -> list[int]:
        """Lengths at which the curve bends."""
        return [int(length) for length in self._lengths[1:]]

    def expected_rest(self, produced: int, cap: int) -> float:
        """Tokens still to come on average, if the answer ends at ``cap`` at the latest; at least 1."""
        left = height = self.beyond(produced)
        lengths = self._lengths
        area, at, limit = 0.0, float(produced), float(cap)
        for upper in range(1, _TOP + 1):
            length = lengths[upper]
            if length > at:
                end = min(length, limit)
                if end <= at:
                    break
                fall = (height - _SURVIVAL[upper]) * (end - at) / (length - at)
                area += (end - at) * (height - fall / 2.0)
                at = end
            if length >= limit:
                break
            if length == at:
                # Where quantiles agree the curve drops at once, past all of them.
                height = _SURVIVAL[upper]
        if at < limit and at < lengths[_LAST]:
            end = min(lengths[_LAST], limit)
            area += _under_power(lengths[_TOP], _SURVIVAL[_TOP], self._exponent, at, end)
            at = end
        if at < limit:
            area += _under_power(lengths[_LAST], _SURVIVAL[_LAST], self._tail_exponent, at, limit)
        return max(1.0, area / left)


def _under_power(length: float, height: float, exponent: float, start: float, end: float) -> float:
    """Integral of ``height * (length / x) ** exponent`` from start to end."""
    power = 1.0 - exponent
    return length * height * float((end / length) ** power - (start / length) ** power) / power


def next_look(produced: int) -> int:
    """At how many tokens what is known of the rest should be looked at again: 32 more, or an eighth if that is more."""
    return produced + max(_LOOK_TOKENS, int(_LOOK_SHARE * produced))
