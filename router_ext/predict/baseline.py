"""Empirical quantiles of output lengths: the fallback predictor, everywhere the same.

Rule: the key's own quantiles, else the tenant's in this pool, else the pool's, each only with 20 finished answers or
more; else 1,024.

Censoring: an answer that ended by its natural end (EOS, stop string) shows its length. One that ended by ``length``
(the client's cap), by a client that left, a failure or a kill shows only that the length is larger than what was seen.
Leaving those out would bias every quantile down (long answers are cut more often), counting them as lengths would
too, so quantiles come from the Kaplan-Meier estimate of the survival function, which uses both kinds. Where cuts
leave an upper quantile undetermined it is the larger of 1,024 and the longest length seen. Only natural ends count
toward the 20. Cuts before the first token say nothing and are left out.

Assumption: whether an answer is cut does not depend on how much longer it would have been.
Source: Kaplan and Meier, Nonparametric Estimation from Incomplete Observations (1958).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from router_ext.core.survival import LEVELS as LEVELS
from router_ext.errors import ArtifactRefused
from router_ext.predict.artifact import pack, unpack

KIND = "baseline"
MIN_SAMPLES = 20
DEFAULT_TOKENS = 1_024
MAX_TOKENS = 10_000_000
"""No model writes that much; a larger number in an artifact is damage."""
MAX_ENTRIES = 200_000
"""Per kind of entry; the keys and tenants with most answers are kept."""

NATURAL_ENDS = frozenset(("eos_token", "stop_sequence", "stop", "tool_calls"))
"""Finish reasons (TGI's and OpenAI's words) of an answer that shows its whole length."""

Source: TypeAlias = Literal["key", "tenant", "pool", "default"]


class LengthSample(NamedTuple):
    """One row of the books as training sees it. ``is_complete``: the answer came to its natural end."""

    key: str
    tenant: str
    pool: str
    output_tokens: int
    is_complete: bool


def is_complete(outcome: str, finish_reason: str | None) -> bool:
    """Whether a usage row shows the whole length of its answer: completed, and not cut by its cap."""
    return outcome == "completed" and finish_reason in NATURAL_ENDS


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Predicted output length, in tokens, at ``LEVELS``; monotone, each at least 1.

    ``source`` and ``n_samples`` say whose answers it rests on.
    """

    values: tuple[int, ...]
    source: Source
    n_samples: int

    @property
    def median(self) -> int:
        return self.values[3]

    @property
    def q95(self) -> int:
        return self.values[6]

    def at(self, level: float) -> int:
        """The quantile at a level between 0 and 1: linear between the levels, the outermost ones beyond them."""
        if level <= LEVELS[0]:
            return self.values[0]
        if level >= LEVELS[-1]:
            return self.values[-1]
        upper = bisect.bisect_left(LEVELS, level)
        low, high = LEVELS[upper - 1], LEVELS[upper]
        share = (level - low) / (high - low)
        return round(self.values[upper - 1] + share * (self.values[upper] - self.values[upper - 1]))


DEFAULT = Quantiles((DEFAULT_TOKENS,) * len(LEVELS), "default", 0)


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    """Finished answers behind an entry, and its quantiles at ``LEVELS``."""

    n: int
    q: list[int]


class _Payload(msgspec.Struct, kw_only=True, frozen=True):
    levels: list[float]
    min_samples: int
    n_rows: int
    keys: dict[str, _Entry]
    tenants: dict[str, dict[str, _Entry]]
    pools: dict[str, _Entry]


class Baseline:
    """Immutable look-up of quantiles. ``Baseline()`` without an artifact predicts the default for everybody.

    Cost: at most three dict look-ups.
    """

    def __init__(self, payload: _Payload | None = None, *, built_at_us: int = 0) -> None:
        self.built_at_us = built_at_us
        self.n_rows = payload.n_rows if payload else 0
        self._keys: dict[str, Quantiles] = {}
        self._tenants: dict[tuple[str, str], Quantiles] = {}
        self._pools: dict[str, Quantiles] = {}
        if payload is None:
            return
        self._keys = {key: _quantiles(entry, "key") for key, entry in payload.keys.items()}
        self._tenants = {
            (pool, tenant): _quantiles(entry, "tenant")
            for pool, tenants in payload.tenants.items()
            for tenant, entry in tenants.items()
        }
        self._pools = {pool: _quantiles(entry, "pool") for pool, entry in payload.pools.items()}

    @classmethod
    def from_bytes(cls, data: bytes) -> Baseline:
        """Load an artifact. 100,000 keys take about 0.3 s: call it in a worker thread.

        Raises:
            ArtifactRefused: damaged, foreign, of another version, too large, or with absurd numbers.
        """
        plain, built_at_us = unpack(data, kind=KIND)
        try:
            payload = msgspec.convert(plain, _Payload)
        except msgspec.ValidationError as error:
            raise ArtifactRefused(f"not a baseline: {error}") from error
        if tuple(payload.levels) != LEVELS:
            raise ArtifactRefused(f"levels {payload.levels} are not {list(LEVELS)}")
        return cls(payload, built_at_us=built_at_us)

    def predict(self, key: str, tenant: str, pool: str) -> Quantiles:
        """Quantiles of the output length of a request; never fails, never more than three look-ups."""
        return self._keys.get(key) or self._tenants.get((pool, tenant)) or self._pools.get(pool) or DEFAULT

    @property
    def n_entries(self) -> Mapping[str, int]:
        """Number of keys, tenants (by pool) and pools with enough answers."""
        return {"keys": len(self._keys), "tenants": len(self._tenants), "pools": len(self._pools)}


def _quantiles(entry: _Entry, source: Source) -> Quantiles:
    values = entry.q
    if len(values) != len(LEVELS) or entry.n < MIN_SAMPLES:
        raise ArtifactRefused(f"an entry has {len(values)} quantiles from {entry.n} answers")
    if values[0] < 1 or values[-1] > MAX_TOKENS or any(a > b for a, b in itertools.pairwise(values)):
        raise ArtifactRefused(f"quantiles {values} are not rising numbers from 1 to {MAX_TOKENS}")
    return Quantiles(tuple(values), source, entry.n)


class _Lengths:
    """Counts of finished and cut answers by length, of one key, tenant or pool."""

    __slots__ = ("cut", "finished", "n_finished")

    def __init__(self) -> None:
        self.finished: dict[int, int] = {}
        self.cut: dict[int, int] = {}
        self.n_finished = 0

    def add(self, length: int, *, is_complete: bool) -> None:
        counts = self.finished if is_complete else self.cut
        counts[length] = counts.get(length, 0) + 1
        self.n_finished += is_complete

    def entry(self) -> _Entry:
        return _Entry(self.n_finished, kaplan_meier_quantiles(self.finished, self.cut))


def kaplan_meier_quantiles(finished: Mapping[int, int], cut: Mapping[int, int]) -> list[int]:
    """Quantiles at ``LEVELS`` of a length, from finished answers and from those known to be longer than seen.

    A cut at length t means the true length is larger than t: it is at risk at t and leaves afterwards. Without cuts
    this is the empirical quantile (the smallest length whose share of answers reaches the level).

    Args:
        finished, cut: number of answers by length (>= 1 token).

    Cost: O(n log n) in the number of different lengths.
    """
    lengths = sorted(finished.keys() | cut.keys())
    at_risk = sum(finished.values()) + sum(cut.values())
    beyond = max(DEFAULT_TOKENS, lengths[-1]) if lengths else DEFAULT_TOKENS
    values: list[int] = []
    survival = 1.0
    for length in lengths:
        n_finished = finished.get(length, 0)
        if n_finished:
            survival *= 1.0 - n_finished / at_risk
            while len(values) < len(LEVELS) and survival <= 1.0 - LEVELS[len(values)] + 1e-12:
                values.append(length)
        at_risk -= n_finished + cut.get(length, 0)
    return values + [beyond] * (len(LEVELS) - len(values))


def build_baseline(rows: Iterable[LengthSample], *, built_at_us: int) -> bytes:
    """Artifact bytes from usage rows of any order and number (one pass, memory by different lengths).

    Rows without output tokens, or with an impossible number, are left out. Deterministic: the same rows in any order
    give the same bytes.
    """
    keys: dict[str, _Lengths] = {}
    tenants: dict[tuple[str, str], _Lengths] = {}
    pools: dict[str, _Lengths] = {}
    n_rows = 0
    for key, tenant, pool, output_tokens, complete in rows:
        if not 1 <= output_tokens <= MAX_TOKENS:
            continue
        n_rows += 1
        for lengths in (_at(keys, key), _at(tenants, (pool, tenant)), _at(pools, pool)):
            lengths.add(output_tokens, is_complete=complete)
    by_tenant: dict[str, dict[str, _Entry]] = {}
    for (pool, tenant), entry in _entries(tenants).items():
        by_tenant.setdefault(pool, {})[tenant] = entry
    payload = _Payload(
        levels=list(LEVELS),
        min_samples=MIN_SAMPLES,
        n_rows=n_rows,
        keys=_entries(keys),
        tenants=by_tenant,
        pools=_entries(pools),
    )
    return pack(payload, kind=KIND, built_at_us=built_at_us)


def _at(groups: dict[Any, _Lengths], name: Hashable) -> _Lengths:
    lengths = groups.get(name)
    if lengths is None:
        lengths = groups[name] = _Lengths()
    return lengths


def _entries(groups: Mapping[Any, _Lengths]) -> dict[Any, _Entry]:
    enough = [(lengths.n_finished, name) for name, lengths in groups.items() if lengths.n_finished >= MIN_SAMPLES]
    enough.sort(key=lambda item: (-item[0], item[1]))
    return {name: groups[name].entry() for _, name in enough[:MAX_ENTRIES]}
