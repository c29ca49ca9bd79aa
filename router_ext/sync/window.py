"""What a tenant or a key has taken of this router in the last minute: a sliding window in buckets of two seconds.

Rule: what is taken counts for ``N_BUCKETS`` buckets, its own included, which is between 60 and 62 s. So no 60 s ever
hold more than the limit, whatever the bursts. A token bucket (GCRA) needs one number instead of thirty, but lets up to
twice its limit through in the minute that follows an idle one. And a bucket can be given back to: what a request
reserved and did not use, or a request that was refused later, comes off where it was added.

Pure: time is passed in, as the number of a bucket. Cost: O(1) but for the at most 31 buckets that leave or are looked
through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

BUCKET_S = 2.0
N_BUCKETS = 31

REQUESTS, TOKENS = 0, 1


def hash_name(tenant: str, key: str = "") -> str:
    """Where routers share a window. What is counted together lies in one slot of a cluster."""
    return f"fairlane:minute:{{{tenant}}}:{key}"


class MinuteWindow:
    """Own counts by bucket, and what was last heard of the others'.

    Attributes:
        name: of the hash the routers share, which is all that leaves the process.
        sums: requests and tokens in the window, as of the last ``advance``.
        dirty: buckets that the shared store does not know as they are.
    """

    __slots__ = ("_buckets", "_others", "_others_until", "dirty", "name", "sums")

    def __init__(self, name: str) -> None:
        self.name = name
        self.sums = [0, 0]
        self.dirty: set[int] = set()
        self._buckets: deque[list[int]] = deque()
        self._others = (0, 0)
        self._others_until = 0

    def advance(self, now: int) -> None:
        """Let go of what is older than the window; ``now`` is the number of the present bucket."""
        buckets = self._buckets
        while buckets and buckets[0][0] <= now - N_BUCKETS:
            bucket, requests, tokens = buckets.popleft()
            self.sums[REQUESTS] -= requests
            self.sums[TOKENS] -= tokens
            self.dirty.discard(bucket)

    def add(self, bucket: int, requests: int, tokens: int) -> None:
        """Count in a bucket."""
        entry = self._entry(bucket)
        entry[1] += requests
        entry[2] += tokens
        self.sums[REQUESTS] += requests
        self.sums[TOKENS] += tokens

    def take_back(self, bucket: int, requests: int, tokens: int) -> bool:
        """Uncount what was counted in a bucket; False if there is nothing of it any more."""
        for entry in reversed(self._buckets):
            if entry[0] == bucket:
                requests, tokens = min(requests, entry[1]), min(tokens, entry[2])
                entry[1] -= requests
                entry[2] -= tokens
                self.sums[REQUESTS] -= requests
                self.sums[TOKENS] -= tokens
                return requests > 0 or tokens > 0
        return False

    def _entry(self, bucket: int) -> list[int]:
        buckets = self._buckets
        at = len(buckets)
        while at and buckets[at - 1][0] > bucket:
            at -= 1
        if at and buckets[at - 1][0] == bucket:
            return buckets[at - 1]
        entry = [bucket, 0, 0]
        buckets.insert(at, entry)
        return entry

    def counts(self, bucket: int) -> tuple[int, int]:
        """Requests and tokens of a bucket."""
        for number, requests, tokens in reversed(self._buckets):
            if number == bucket:
                return requests, tokens
        return 0, 0

    def spread(self) -> Iterator[int]:
        """Numbers of the buckets that are kept, oldest first."""
        return (entry[0] for entry in self._buckets)

    @property
    def is_empty(self) -> bool:
        """Nothing in the window as of the last ``advance``, nothing to tell the store."""
        return not self._buckets and not self.dirty

    # --- others -----------------------------------------------------------------------------------------------------

    def heard(self, now: int, requests: int, tokens: int) -> None:
        """The store has just said what all routers together have taken."""
        self._others = (max(0, requests - self.sums[REQUESTS]), max(0, tokens - self.sums[TOKENS]))
        self._others_until = now + N_BUCKETS

    def others(self, now: int, kind: int) -> int:
        """What the others had taken when it was last heard of, until that can no longer be in the window."""
        return self._others[kind] if now < self._others_until else 0

    # --- when -------------------------------------------------------------------------------------------------------

    def free_at(self, kind: int, amount: int) -> int | None:
        """The bucket at whose begin ``amount`` of what is counted has left the window; None: there is not so much."""
        for bucket, *counts in self._buckets:
            amount -= counts[kind]
            if amount <= 0:
                return bucket + N_BUCKETS
        return None

    def empty_at(self, kind: int, now: int) -> int:
        """The bucket at whose begin nothing is counted any more."""
        for bucket, *counts in reversed(self._buckets):
            if counts[kind]:
                own = bucket + N_BUCKETS
                return max(own, self._others_until) if self.others(now, kind) else own
        return self._others_until if self.others(now, kind) else now
