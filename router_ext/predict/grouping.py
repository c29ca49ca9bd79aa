"""Near-duplicates among prompts, from their hashed words: whoever judges a model must not split them.

Words of more than ``_COMMON`` of the prompts (a template's) are left out; two prompts are near-duplicates if what is
left agrees to ``_ALIKE`` (Jaccard). Candidates come from bands of minimal hashes, so a pair at the limit may be missed.

Cost: O(n) hashing, and for each of a prompt's bands one comparison, with the first prompt of the band: at most 12 n;
40,000 prompts take some seconds.
Source: Broder (1997).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.features import ID_BITS, Features

_COMMON = 0.02
_ALIKE = 0.5
_BANDS, _ROWS = 12, 2


def groups(prompts: Sequence[Features]) -> NDArray[np.int64]:
    """Number of the group of each prompt [n]; equal prompts share one."""
    n_with = np.bincount(np.concatenate([one.ids for one in prompts]), minlength=1 << ID_BITS)
    is_rare = n_with <= max(2.0, _COMMON * len(prompts))
    kept = [rare if len(rare := one.ids[is_rare[one.ids]]) else one.ids for one in prompts]
    words = np.random.default_rng(0).integers(1, 1 << 62, (2, _BANDS * _ROWS), dtype=np.uint64)
    leader = np.arange(len(prompts))

    def root(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = int(leader[i])
        return i

    bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for i, ids in enumerate(kept):
        if not len(ids):
            bands[-1, b""].append(i)
            continue
        mixed = (ids[:, None].astype(np.uint64) * (words[0] | np.uint64(1)) + words[1]) >> np.uint64(32)
        least = mixed.min(axis=0).astype(np.uint32).reshape(_BANDS, _ROWS)
        for band in range(_BANDS):
            bands[band, least[band].tobytes()].append(i)
    for members in bands.values():
        for other in members[1:]:
            first, second = root(members[0]), root(other)
            if first != second and _alike(kept[members[0]], kept[other]):
                leader[max(first, second)] = min(first, second)
    return np.array([root(i) for i in range(len(prompts))])


def _alike(left: NDArray[np.uint16], right: NDArray[np.uint16]) -> bool:
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common >= _ALIKE * (len(left) + len(right) - common)
