"""The scheduler of one pool."""

from __future__ import annotations

from router_ext.core.actions import Action
from router_ext.core.config import PoolConfig
from router_ext.core.events import Event


class Scheduler:
    """Orchestrates queues, fairness, KV ledger, admission and placement; no arithmetic of its own."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event at instant ``now`` (seconds, never decreasing) and return what to do, in order."""
        raise NotImplementedError
