"""Bounded memory of prompts answered before: keyed signatures and how far their answers were from predictions.

    exact prompt known    -> median of its residuals, shrunk toward its neighbours'
    near-duplicate known  -> median of its group's residuals, shrunk toward none

Residuals are against what the predictor says for the served model at hand, so an answer of one model teaches the
expectation for every other one. A prompt belongs to the group of the first prompt with which it shares ``_MIN_BANDS``
bands of its signature. Groups whose members differ much (a template with many fillings) are believed less.

No text: signatures are keyed 64-bit hashes. Nothing is shown to tenants. A prompt seen for the first time is
predicted as without a memory, unless it is a near-duplicate of known ones.

Cost: O(1) per request: some look-ups and two sorts of at most ``SIZE`` numbers; about 1.1 kB a prompt, 9 MB when full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from router_ext.predict.features import Signatures
from router_ext.predict.residuals import REACH, Residuals, Table, is_news

SIZE = 16
CAPACITY = 8_192
EXPIRY_S = 14 * 86_400.0
SHRINK_EXACT, SHRINK_NEAR = 1.2, 4.0
_MIN_BANDS = 2
_TYPICAL_SPREAD = 0.3
"""Mean distance of residuals of one prompt from their median, with different models; more in a group is doubt."""
_Row: TypeAlias = tuple[int, float, int, bytes]


@dataclass(frozen=True, slots=True)
class Recall:
    """What is remembered of a prompt: what to add to the log of its predicted length, and from how many answers."""

    correction: float = 0.0
    n_exact: int = 0
    n_near: int = 0


NOTHING = Recall()


class _Slice(msgspec.Struct, array_like=True):
    exact: list[_Row] = []
    near: list[_Row] = []
    bands: list[list[int]] = []


class Memory:
    """See the module. Times are wall seconds, so that they outlive the process."""

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._exact: Table[int] = Table(capacity=capacity, size=SIZE, expiry_s=EXPIRY_S)
        self._near: Table[int] = Table(capacity=capacity, size=SIZE, expiry_s=EXPIRY_S)
        self._group_of: dict[int, int] = {}
        self._bands_of: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._exact)

    def recall(self, signatures: Signatures, now_s: float) -> Recall:
        """What is remembered of a prompt."""
        exact = self._exact.find(signatures.exact, now_s)
        group = self._group(signatures)
        near = None if group is None else self._near.find(group, now_s)
        if group is not None and near is None:
            self._forget(group)
        if exact is None and near is None:
            return NOTHING
        toward = 0.0 if near is None else _of_group(near)
        if exact is None:
            return Recall(toward, 0, len(near.values) if near else 0)
        n = len(exact.values)
        correction = (exact.middle() * n + toward * SHRINK_EXACT) / (n + SHRINK_EXACT)
        return Recall(correction, n, len(near.values) if near else 0)

    def add(self, signatures: Signatures, residual: float, now_s: float, *, is_complete: bool = True) -> None:
        """An answer came out ``residual`` above (in logs) what would have been predicted without the memory."""
        if not is_news(residual, self.recall(signatures, now_s).correction, is_complete=is_complete):
            return
        self._exact.add(signatures.exact, residual, now_s)
        if not signatures.near:
            return
        group = self._group(signatures)
        if group is None:
            group = signatures.exact
            self._forget(group)
            self._bands_of[group] = []
        bands = self._bands_of[group]
        for band in signatures.near:
            if band not in self._group_of and len(bands) < _MAX_BANDS:
                self._group_of[band] = group
                bands.append(band)
        forgotten = self._near.add(group, residual, now_s)
        if forgotten is not None:
            self._forget(forgotten)

    def _group(self, signatures: Signatures) -> int | None:
        votes = Counter(self._group_of[band] for band in signatures.near if band in self._group_of)
        if not votes:
            return None
        group, n = votes.most_common(1)[0]
        return group if n >= _MIN_BANDS else None

    def _forget(self, group: int) -> None:
        for band in self._bands_of.pop(group, ()):
            del self._group_of[band]

    def dump(self) -> Iterator[bytes]:
        """For ``restore``, in slices that are as old as they are when they are taken."""
        for rows in self._exact.dump():
            yield msgspec.msgpack.encode(_Slice(exact=rows))
        for rows in self._near.dump():
            yield msgspec.msgpack.encode(_Slice(near=rows, bands=[self._bands_of[group] for group, *_ in rows]))

    def restore(self, slices: Iterable[bytes]) -> None:
        """Go on with what ``dump`` gave.

        Raises:
            ValueError: damaged.
        """
        whole = _Slice()
        for data in slices:
            one = msgspec.msgpack.decode(data, type=_Slice)
            whole.exact += one.exact
            whole.near += one.near
            whole.bands += one.bands
        self._exact.restore(whole.exact)
        self._near.restore(whole.near)
        groups = {name for name, _ in self._near.rows()}
        self._group_of, self._bands_of = {}, {group: [] for group in groups}
        for (group, *_), bands in zip(whole.near, whole.bands, strict=True):
            for band in bands[:_MAX_BANDS]:
                # While slices were taken a band may have gone from one group to another.
                if group in groups and band not in self._group_of:
                    self._group_of[band] = group
                    self._bands_of[group].append(band)


_MAX_BANDS = 16
"""Of one group: a group that many prompts join keeps the bands of the first ones."""


def _of_group(near: Residuals) -> float:
    """Correction by a group, believed less the more its residuals differ."""
    n, middle = len(near.values), near.middle()
    spread = sum(abs(value - middle) for value in near.values) / n
    doubt = max(1.0, spread / _TYPICAL_SPREAD) ** 2
    return min(max(middle * n / (n + SHRINK_NEAR * doubt), -REACH), REACH)
