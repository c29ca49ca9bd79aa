"""The two differences of delivered service that are watched while a run goes on, because samples would miss them."""

from __future__ import annotations

from collections.abc import Sequence


class Gaps:
    """Service per weight of every tenant, and how far apart it gets.

    Attributes:
        service: delivered service per weight, by tenant.
        accumulated: largest difference between any two tenants, counted from the beginning.
        while_waiting: within one spell in which all tenants wait, the largest change between two moments of the
            difference of any pair. None if there was no such spell, or only one tenant.
    """

    __slots__ = (
        "_first",
        "_has_spell",
        "_highs",
        "_lows",
        "_num_idle",
        "_waiting",
        "accumulated",
        "service",
        "while_waiting",
    )

    def __init__(self, num_tenants: int) -> None:
        self.service = [0.0] * num_tenants
        self.accumulated = 0.0
        self.while_waiting: float | None = None
        self._waiting = [0] * num_tenants
        self._num_idle = num_tenants
        self._has_spell = False
        self._first: list[float] = []
        self._lows: list[float] = []
        self._highs: list[float] = []

    def queued(self, tenant: int) -> None:
        """One more request of the tenant waits."""
        self._waiting[tenant] += 1
        if self._waiting[tenant] == 1:
            self._num_idle -= 1
            if not self._num_idle and len(self._waiting) > 1:
                self._begin()

    def unqueued(self, tenant: int) -> None:
        """One fewer waits."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            self._num_idle += 1
            self._has_spell = False

    def waiting(self) -> Sequence[int]:
        """Waiting requests by tenant."""
        return self._waiting

    def moment(self) -> None:
        """Service has been delivered."""
        service = self.service
        gap = max(service) - min(service)
        if gap > self.accumulated:
            self.accumulated = gap
        if self._has_spell:
            self._note()

    def _begin(self) -> None:
        self._has_spell = True
        service = self.service
        self._lows = [first - second for index, first in enumerate(service) for second in service[:index]]
        self._highs = self._lows.copy()
        if self.while_waiting is None:
            self.while_waiting = 0.0

    def _note(self) -> None:
        service, lows, highs = self.service, self._lows, self._highs
        largest = self.while_waiting or 0.0
        pair = 0
        for index, first in enumerate(service):
            for second in service[:index]:
                difference = first - second
                if difference < lows[pair]:
                    lows[pair] = difference
                elif difference > highs[pair]:
                    highs[pair] = difference
                else:
                    pair += 1
                    continue
                change = highs[pair] - lows[pair]
                if change > largest:
                    largest = change
                pair += 1
        self.while_waiting = largest
