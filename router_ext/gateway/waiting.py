"""What waits before the queue, while it is being measured: bounded like the queue, and tenants take turns.

places = Places(lambda: config, hint_s=...)
with places.take(tenant): ...                 # QueueRefused if the tenant, or everybody together, has too many
async with turns.take(tenant): ...            # one at a time; tenants that wait come in rotation
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from router_ext.core.actions import RejectCode
from router_ext.core.config import PoolConfig
from router_ext.core.ids import TenantId
from router_ext.errors import QueueRefused

UNNAMED_LIMIT = 2_000
"""Places of a tenant that the pool's configuration does not name."""


class Places:
    """Counts who waits outside the queue, by tenant, against the limits of the queue itself.

    Args:
        config: the pool's configuration in force. hint_s: seconds until it may be worth another try.
    """

    def __init__(self, config: Callable[[], PoolConfig], *, hint_s: Callable[[], float]) -> None:
        self._config = config
        self._hint_s = hint_s
        self._by_tenant: dict[TenantId, int] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Requests of all tenants that wait."""
        return self._count

    @contextlib.contextmanager
    def take(self, tenant: TenantId) -> Iterator[None]:
        """Wait inside the block.

        Raises:
            QueueRefused: too many wait already.
        """
        config = self._config()
        share = config.tenants.get(tenant)
        mine, limit = self._by_tenant.get(tenant, 0), UNNAMED_LIMIT if share is None else share.max_queued
        if mine >= limit or self._count >= config.max_queued:
            whose = f"{mine} requests of this tenant" if mine >= limit else f"{self._count} requests"
            raise QueueRefused(
                f"{whose} are waiting to be measured.", code=RejectCode.QUEUE_FULL, retry_after_s=self._hint_s()
            )
        self._by_tenant[tenant] = mine + 1
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            left = self._by_tenant[tenant] - 1
            if left:
                self._by_tenant[tenant] = left
            else:
                del self._by_tenant[tenant]


class Turns:
    """One holder at a time. Whoever waits is served in rotation by tenant, and in order within each."""

    def __init__(self) -> None:
        self._is_free = True
        self._waiting: dict[TenantId, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def take(self, tenant: TenantId) -> AsyncIterator[None]:
        """Hold it for the block."""
        if self._is_free:
            self._is_free = False
        else:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    # It was handed over in the very turn in which its request ended.
                    self._pass_on()
                else:
                    self._leave(tenant, mine)
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _leave(self, tenant: TenantId, mine: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is None or mine not in queue:
            return  # passed over meanwhile
        queue.remove(mine)
        if not queue:
            del self._waiting[tenant]

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            mine = queue.popleft()
            if queue:
                # Behind the others.
                self._waiting[tenant] = queue
            if not mine.done():
                mine.set_result(None)
                return
        self._is_free = True
