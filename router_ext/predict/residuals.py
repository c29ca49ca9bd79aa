"""How wrong a predictor proved for one name of something: the newest few log residuals, oldest forgotten.

A residual is ln(1 + tokens) minus the predicted median's, pulled in to ``REACH``. An answer that was cut says only that
its residual is larger: it counts where it lies above what is believed, and is left out below.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

REACH = 1.5
"""A runaway answer is a factor of 4.5 at most; the rest of it is chance, not something to expect again."""

SLICE = 256
"""Rows that are written down at once, in some 0.3 ms: meanwhile nobody is answered."""

_Name = TypeVar("_Name", int, str)

_QUARTILES = 0.741
"""Standard deviation over the distance of the quartiles, of normal numbers."""


class Residuals:
    """A ring of residuals of one name. Cost: O(size) for ``middle``, O(1) otherwise; 64 bytes at 16."""

    __slots__ = ("n", "used_s", "values")

    def __init__(self, used_s: float, values: array[float] | None = None, n: int = 0) -> None:
        self.values = array("f") if values is None else values
        self.n = n
        self.used_s = used_s

    def add(self, residual: float, *, size: int, now_s: float) -> None:
        """One more, in the place of the oldest once there are ``size``."""
        residual = min(max(residual, -REACH), REACH)
        if len(self.values) < size:
            self.values.append(residual)
        else:
            self.values[self.n % size] = residual
        self.n += 1
        self.used_s = now_s

    def middle(self) -> float:
        """Their median, the mean of the two in the middle where their number is even."""
        return _middle(sorted(self.values))

    def middle_and_variance(self, *, prior: float, weight: float) -> tuple[float, float]:
        """``middle``, and the variance of one of them by their quartiles, ``prior`` counting for ``weight`` of them."""
        ordered, n = sorted(self.values), len(self.values)
        deviation = (ordered[3 * n // 4] - ordered[n // 4]) * _QUARTILES
        return _middle(ordered), (n * deviation * deviation + weight * prior) / (n + weight)


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


class Table(Generic[_Name]):
    """Residuals by name: at most ``capacity`` names, those not used for longest forgotten, none after ``expiry_s``."""

    __slots__ = ("_capacity", "_expiry_s", "_rows", "_size")

    def __init__(self, *, capacity: int, size: int, expiry_s: float) -> None:
        self._rows: OrderedDict[_Name, Residuals] = OrderedDict()
        self._capacity = capacity
        self._size = size
        self._expiry_s = expiry_s

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, name: _Name, now_s: float) -> Residuals | None:
        """What is known of a name; None: nothing, or nothing recent."""
        row = self._rows.get(name)
        if row is not None and now_s - row.used_s > self._expiry_s:
            del self._rows[name]
            return None
        return row

    def add(self, name: _Name, residual: float, now_s: float) -> _Name | None:
        """One more residual. Returns the name that was forgotten for it, if one was."""
        row = self.find(name, now_s)
        forgotten: _Name | None = None
        if row is None:
            row = self._rows[name] = Residuals(now_s)
            if len(self._rows) > self._capacity:
                forgotten, _ = self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(name)
        row.add(residual, size=self._size, now_s=now_s)
        return forgotten

    def rows(self) -> Iterator[tuple[_Name, Residuals]]:
        """All of them, those not used for longest first."""
        yield from self._rows.items()

    def dump(self) -> Iterator[list[tuple[_Name, float, int, bytes]]]:
        """For ``restore``, in slices of ``SLICE``: the names of when the first was taken, each as it is when its slice
        is taken, those forgotten meanwhile left out."""
        names = list(self._rows)
        for first in range(0, len(names), SLICE):
            kept = ((name, self._rows.get(name)) for name in names[first : first + SLICE])
            yield [(name, row.used_s, row.n, row.values.tobytes()) for name, row in kept if row is not None]

    def restore(self, rows: list[tuple[_Name, float, int, bytes]]) -> None:
        """Raises:
        ValueError: rows that no table writes.
        """
        fresh: OrderedDict[_Name, Residuals] = OrderedDict()
        for name, used_s, n, data in rows[-self._capacity :]:
            values = array("f")
            values.frombytes(data)
            if not 1 <= len(values) <= self._size or n < len(values) or not all(-REACH <= v <= REACH for v in values):
                raise ValueError(f"{len(values)} residuals of {n}")
            fresh[name] = Residuals(used_s, values, n)
        self._rows = fresh


def is_news(residual: float, believed: float, *, is_complete: bool) -> bool:
    """Whether an answer says something: it came to its end, or outlived what is believed of its name."""
    return is_complete or residual > believed
