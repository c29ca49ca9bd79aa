"""``raw``: no router. Each request goes at once to the server with the fewest open requests, with its client's own
``max_new_tokens``; the server's FIFO decides. Meets the part of the scheduler's interface that the engine uses.
"""

from __future__ import annotations

from router_ext.core.actions import Action, Dispatch
from router_ext.core.config import PoolConfig
from router_ext.core.events import Arrived, Event, Finished
from router_ext.core.ids import BackendId, RequestId

RAW = "raw"


class RawRouter:
    """See the module. Cost: O(servers) per arrival."""

    def __init__(self, config: PoolConfig) -> None:
        self._open: dict[BackendId, int] = dict.fromkeys(config.backends, 0)
        self._placed: dict[RequestId, BackendId] = {}

    def handle(self, event: Event, now: float) -> list[Action]:
        """Place what arrives; forget what is over."""
        match event:
            case Arrived(request=spec):
                # ``min`` takes the first of equals, and the servers are in the order of their ids.
                backend = min(self._open, key=self._open.__getitem__)
                self._open[backend] += 1
                self._placed[spec.request_id] = backend
                return [
                    Dispatch(
                        request_id=spec.request_id,
                        backend=backend,
                        slice_tokens=spec.max_new_tokens,
                        segment=0,
                        reason="least open requests",
                    )
                ]
            case Finished(request_id=request_id):
                self._open[self._placed.pop(request_id)] -= 1
        return []
