"""Counters of one level of siblings (keys of a tenant and tier, members of a group), kept the slow and obvious way."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Level:
    """Who waits, what each has received, how far two drifted apart while both waited.

    ``bound``: of one with weight 1. ``weights``: by name, 1 if it is not there.
    """

    bound: float
    weights: dict[str, float] = field(default_factory=dict)
    counter: dict[str, float] = field(default_factory=dict)
    delivered: dict[str, float] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    last_left: str | None = None
    pairs: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    worst: float = 0.0

    def floor(self) -> float | None:
        """Smallest counter of those that wait; while nobody does, that of whoever stopped last."""
        if self.waiting:
            return min(self.counter[name] for name in self.waiting)
        return None if self.last_left is None else self.counter[self.last_left]

    def enter(self, name: str) -> None:
        if name in self.waiting:
            return
        floor = self.floor()
        self.delivered.setdefault(name, 0.0)
        self.counter[name] = max(self.counter.get(name, 0.0), 0.0 if floor is None else floor)
        for other in self.waiting:
            pair = (min(name, other), max(name, other))
            gap = self._gap(pair)
            self.pairs[pair] = (gap, gap)
        self.waiting.append(name)

    def leave(self, name: str) -> None:
        self.waiting.remove(name)
        self.last_left = name
        self.pairs = {pair: span for pair, span in self.pairs.items() if name not in pair}

    def charge(self, name: str, service: float) -> float:
        """Book it; how much of its bound is used up, by the counter above the least or by the drift of a pair."""
        self.counter[name] += service / self.weight(name)
        self.delivered[name] += service / self.weight(name)
        worst = 0.0
        if name in self.waiting:
            worst = self.ahead(name) * self.weight(name) / self.bound
        for pair, (low, high) in self.pairs.items():
            if name in pair:
                gap = self._gap(pair)
                self.pairs[pair] = (min(low, gap), max(high, gap))
                allowed = self.bound * sum(1.0 / self.weight(each) for each in pair)
                worst = max(worst, (self.pairs[pair][1] - self.pairs[pair][0]) / allowed)
        self.worst = max(self.worst, worst)
        return worst

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)

    def ahead(self, name: str) -> float:
        """Counter above the least of those that wait."""
        return self.counter[name] - min(self.counter[other] for other in self.waiting)

    def _gap(self, pair: tuple[str, str]) -> float:
        return self.delivered[pair[0]] - self.delivered[pair[1]]
