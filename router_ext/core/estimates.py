"""What the scheduler learns on line about a backend's speed. Estimates buy latency, never safety or fairness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router_ext.core.admission import Backend


_LEAST_RATIO, _MOST_RATIO = 0.125, 8.0


class LinearFit:
    """Least squares ``y = intercept + slope * x`` with exponential forgetting.

    A server's speed changes with its load and its neighbours, so old observations fade: with ``keep`` 0.98 the
    last fifty or so decide. Until the observations spread enough to tell slope from intercept, the fit is the
    line through the origin and their mean.

    Cost: O(1) per observation. The line is an attribute, because decisions read it far more often than it changes.

    Attributes:
        line: (intercept, slope), both >= 0; None before the first observation.
    """

    __slots__ = ("_keep", "_n", "_sx", "_sxx", "_sxy", "_sy", "count", "line")

    def __init__(self, *, keep: float = 0.98) -> None:
        self._keep = keep
        self._n = self._sx = self._sy = self._sxx = self._sxy = 0.0
        self.line: tuple[float, float] | None = None
        self.count = 0

    def observe(self, x: float, y: float) -> None:
        """Add one observation."""
        keep = self._keep
        self._n = self._n * keep + 1.0
        self._sx = self._sx * keep + x
        self._sy = self._sy * keep + y
        self._sxx = self._sxx * keep + x * x
        self._sxy = self._sxy * keep + x * y
        self.count += 1
        self.line = self._solve()

    def mean(self) -> float | None:
        """Mean of the recent observations."""
        return self._sy / self._n if self.count else None

    def _solve(self) -> tuple[float, float]:
        n, sx, sy = self._n, self._sx, self._sy
        spread = n * self._sxx - sx * sx
        # A relative spread below 1% cannot carry a slope; neither can fewer than four observations.
        if self.count >= 4 and spread > 0.01 * n * self._sxx:
            slope = (n * self._sxy - sx * sy) / spread
            intercept = (sy - slope * sx) / n
            if slope > 0.0 and intercept >= 0.0:
                return intercept, slope
            if slope <= 0.0:
                return sy / n, 0.0
        return (0.0, sy / sx) if sx > 0.0 else (sy / n, 0.0)


class Ratio:
    """What was seen over what was predicted: geometric mean of about the last ten, within bounds.

    Attributes:
        value: 1 before the first observation.
    """

    __slots__ = ("_log", "value")

    def __init__(self) -> None:
        self._log: float | None = None
        self.value = 1.0

    def observe(self, ratio: float) -> None:
        """Add one observation."""
        seen = math.log(min(max(ratio, _LEAST_RATIO), _MOST_RATIO))
        self._log = seen if self._log is None else self._log + 0.1 * (seen - self._log)
        self.value = math.exp(self._log)


class Throughput:
    """Output tokens per second of the pool, smoothed over about half a minute of work.

    Only time in which something ran counts, so an idle night does not make the next estimate pessimistic.

    Attributes:
        rate: None before the first second of work. peak_rate: largest of a single second, 0 before.
    """

    __slots__ = ("_since_s", "_total", "peak_rate", "rate")

    def __init__(self) -> None:
        self.rate: float | None = None
        self.peak_rate = 0.0
        self._since_s: float | None = None
        self._total = 0

    def tick(self, now: float, produced_total: int, *, is_busy: bool) -> None:
        """Look at the running total of output tokens; closes a window of a second or more."""
        if not is_busy or self._since_s is None:
            self._since_s = now if is_busy else None
            self._total = produced_total
            return
        elapsed = now - self._since_s
        if elapsed < 1.0:
            return
        seen = (produced_total - self._total) / elapsed
        share = min(1.0, elapsed / 30.0)
        self.rate = seen if self.rate is None else self.rate + share * (seen - self.rate)
        if seen > self.peak_rate:
            self.peak_rate = seen
        self._since_s = now
        self._total = produced_total


class ServiceRate:
    """What one busy backend delivers per second while somebody waits, smoothed over about half a minute.

    Only spells in which somebody waits all the time count: then backends are as full as the policy lets them be.

    Attributes:
        per_backend_s: service per second, None before the first second of such a spell.
        tokens_per_backend_s: output tokens, likewise. measured_s: how long such spells have been watched.
    """

    __slots__ = ("_busy", "_produced", "_served", "_since_s", "measured_s", "per_backend_s", "tokens_per_backend_s")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was measured: service is counted in other units from now on."""
        self.per_backend_s: float | None = None
        self.tokens_per_backend_s: float | None = None
        self.measured_s = 0.0
        self._since_s: float | None = None
        self._served = 0.0
        self._produced = 0
        self._busy = 0

    def idle(self) -> None:
        """Nobody waits, or nobody can be served: the spell is over."""
        self._since_s = None

    def tick(self, now: float, served_total: float, produced_total: int, usable: Sequence[Backend]) -> None:
        """Somebody waits: look at the running totals of service and output; closes a window of a second or more."""
        since = self._since_s
        if since is not None:
            elapsed = now - since
            if elapsed < 1.0:
                return
            busy = _num_busy(usable)
            # Who came or went during the window counts half.
            backend_s = elapsed * (busy + self._busy) / 2.0
            if backend_s > 0.0:
                self.measured_s += elapsed
                # A plain mean at first, so that the seconds in which the pool filled do not weigh on for long.
                share = min(1.0, elapsed / min(30.0, self.measured_s))
                served = (served_total - self._served) / backend_s
                produced = (produced_total - self._produced) / backend_s
                self.per_backend_s = _toward(self.per_backend_s, served, share)
                self.tokens_per_backend_s = _toward(self.tokens_per_backend_s, produced, share)
        else:
            busy = _num_busy(usable)
        self._since_s = now
        self._served = served_total
        self._produced = produced_total
        self._busy = busy


def _toward(known: float | None, seen: float, share: float) -> float:
    return seen if known is None else known + share * (seen - known)


def _num_busy(usable: Sequence[Backend]) -> int:
    return sum(1 for backend in usable if backend.num_running)


class PredictionBias:
    """How long outputs proved to be, by how long they were predicted: about the last hundred finished requests.

    Attributes:
        ratio: None before ``_MIN_FINISHED`` requests have finished.
    """

    __slots__ = ("_actual", "_count", "_predicted", "ratio")

    def __init__(self) -> None:
        self.ratio: float | None = None
        self._actual = 0.0
        self._predicted = 0.0
        self._count = 0

    def finished(self, predicted_tokens: int, output_tokens: int) -> None:
        """A request has ended by itself, or at its cap."""
        self._actual = self._actual * _KEPT + output_tokens
        self._predicted = self._predicted * _KEPT + max(1, predicted_tokens)
        self._count += 1
        if self._count >= _MIN_FINISHED:
            self.ratio = self._actual / self._predicted


_MIN_FINISHED = 20
_KEPT = 0.99
