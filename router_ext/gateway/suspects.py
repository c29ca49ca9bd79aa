"""Who felled a backend? Suspects are tried again where they can hurt nobody, and refused at the second strike.

A failed dispatch is judged by what it had shown:

    something since it was dispatched          innocent: it goes on elsewhere at once
    nothing, and the backend never had it      innocent: no connection, frozen before, or too much to do, as it said
    nothing, and the backend died, froze or    suspect: it is dispatched again alone, one suspect of the pool at a time
    answered that a batch had failed           (``core.exposure``); a second strike ends it with a clear error

What struck twice is refused for ``REFUSED_S``, whoever sends it, and the requests of its tenant are suspects from the
start for as long: at most two backends fall to one request, one to each of its variations.
"""

from __future__ import annotations

import asyncio
import enum
from collections import OrderedDict, deque
from dataclasses import dataclass

from router_ext.backends.base import BackendClosed, BackendRefused, BackendTimeout, BackendUnreachable
from router_ext.errors import FairlaneError, HazardousRequest, UpstreamFailed
from router_ext.gateway.auth import Identity
from router_ext.obs.logs import get_logger
from router_ext.sync.ledger import new_event_id, now_us
from router_ext.wire.controlplane import HazardRecord

STRIKES = 2
"""Backends that may fail under one request."""

REFUSED_S = 600.0
"""How long a request that struck twice is refused, and its tenant's are suspects."""

MAX_REFUSED = 1_024
MAX_RECENT = 64
"""Hazards that the next heartbeats tell of."""

FREEZE_S = 5.0
"""Without a word from any of its streams and from ``/health`` for so long a backend is frozen."""

QUIET_CHECKS = 2.0
"""Health checks. A backend that has been silent for so long was frozen by what it had by then."""

_log = get_logger(__name__)


class HazardKind(enum.StrEnum):
    """What happened to the backend."""

    DEATH = "death"
    FREEZE = "freeze"
    BATCH = "batch"


class BackendFrozen(BackendUnreachable):
    """Connected, and neither a token nor a health answer came for too long."""


@dataclass(frozen=True, slots=True)
class Offender:
    """What is known of a request that failed: who sent it, where it was, its digest."""

    identity: Identity
    request: str
    backend: str
    digest: str


def hazard_of(error: FairlaneError) -> HazardKind | None:
    """What a failure without a token says of the backend; None: nothing that a request could have caused."""
    if isinstance(error, BackendFrozen | BackendTimeout):
        return HazardKind.FREEZE
    if isinstance(error, BackendRefused):
        return None
    if isinstance(error, BackendUnreachable | BackendClosed):
        return HazardKind.DEATH
    return HazardKind.BATCH if isinstance(error, UpstreamFailed) and error.is_batch else None


class Suspects:
    """Of one pool. Event loop's thread only.

    Attributes:
        strikes: by kind of hazard since start. recent: the newest culprits, for the control plane.
    """

    def __init__(self, pool: str) -> None:
        self.strikes = dict.fromkeys(HazardKind, 0)
        self.recent: deque[HazardRecord] = deque(maxlen=MAX_RECENT)
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._refused: OrderedDict[str, float] = OrderedDict()
        self._watched: dict[str, float] = {}

    @property
    def has_refused(self) -> bool:
        """Digests have to be looked at."""
        self._forget()
        return bool(self._refused)

    def check(self, digest: str) -> None:
        """Let a new request through.

        Raises:
            HazardousRequest: the same has felled backends lately.
        """
        until = self._refused.get(digest)
        if until is not None and until > self._loop.time():
            raise HazardousRequest(
                f"This request made {STRIKES} backends fail; it is refused for another "
                f"{until - self._loop.time():.0f} s. Change it, or ask the operator."
            )

    def is_watched(self, tenant: str) -> bool:
        """New requests of this tenant are suspects."""
        return self._watched.get(tenant, 0.0) > self._loop.time()

    def strike(self, offender: Offender, kind: HazardKind, strikes: int) -> FairlaneError | None:
        """A suspect has failed for the ``strikes``-th time; what to end it with, None if it may be tried again."""
        self.strikes[kind] += 1
        identity = offender.identity
        _log.warning(
            "hazard.strike",
            pool=self._pool,
            backend=offender.backend,
            kind=kind,
            strikes=strikes,
            request=offender.request,
            tenant=identity.tenant,
            key=identity.key,
        )
        if strikes < STRIKES:
            return None
        until = self._loop.time() + REFUSED_S
        self._refused[offender.digest] = until
        self._refused.move_to_end(offender.digest)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        self._watched[identity.tenant] = until
        now = now_us()
        self.recent.append(
            HazardRecord(
                hazard=new_event_id(now),
                at_us=now,
                kind=kind,
                backend=offender.backend,
                tenant=identity.tenant,
                key=identity.public_id,
                request=offender.request,
                digest=offender.digest,
                refused_until_us=now + int(REFUSED_S * 1e6),
            )
        )
        _log.error("hazard.refused", pool=self._pool, digest=offender.digest, tenant=identity.tenant, key=identity.key)
        return HazardousRequest(
            f"Backends failed while they began this request ({_WORDS[kind]}); it is refused for {REFUSED_S:.0f} s."
        )

    def _forget(self) -> None:
        now = self._loop.time()
        while self._refused and next(iter(self._refused.values())) <= now:
            self._refused.popitem(last=False)
        self._watched = {tenant: until for tenant, until in self._watched.items() if until > now}


_WORDS = {
    HazardKind.DEATH: "one closed all its connections",
    HazardKind.FREEZE: "one stopped answering",
    HazardKind.BATCH: "one failed a whole batch",
}
