"""The client's end of one request: a stream on its connection or one whole answer, and what happens when it leaves.

Nothing is sent before there is something to send: a refusal keeps its real status as long as no byte has gone out.
A client that does not read pauses its upstream; one that reads nothing for ``stall_limit_s`` is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from router_ext.gateway.exchange import Exchange
from router_ext.gateway.peers import NOBODY, Peer
from router_ext.wire.headers import Headers


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, to be sent by plain ASGI."""

    status: int
    headers: Headers
    body: bytes


class Client:
    """Where an answer goes. ``done`` resolves with the whole answer, or with None once a stream has ended.

    Attributes:
        on_gone: called once, in the turn in which the connection closed, unless the answer is complete.
        exchange: its connection. peer: where it came from, for logs.
        on_pause, on_resume: the client has stopped, or begun again, to read.
    """

    __slots__ = (
        "_loop",
        "_stall_limit_s",
        "_stall_timer",
        "done",
        "exchange",
        "is_stalled",
        "on_gone",
        "on_pause",
        "on_resume",
        "peer",
    )

    def __init__(self, exchange: Exchange, *, stall_limit_s: float, peer: Peer = NOBODY) -> None:
        self.peer = peer
        self._loop = asyncio.get_running_loop()
        self.exchange = exchange
        self._stall_limit_s = stall_limit_s
        self._stall_timer: asyncio.TimerHandle | None = None
        self.done: asyncio.Future[Response | None] = self._loop.create_future()
        self.is_stalled = False
        self.on_gone: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        exchange.on_gone = self._left
        exchange.on_pause = self._paused
        exchange.on_resume = self._resumed

    @property
    def is_gone(self) -> bool:
        """The connection has closed."""
        return self.exchange.is_gone

    @property
    def has_begun(self) -> bool:
        """A stream's head has been written: its status can no longer change."""
        return self.exchange.is_open

    @property
    def is_paused(self) -> bool:
        """The client does not read."""
        return self.exchange.is_paused

    def begin(self, headers: Headers) -> None:
        """Open the stream with status 200."""
        self.exchange.open(200, headers)

    def write(self, data: bytes) -> None:
        """Hand bytes to the connection."""
        self.exchange.write(data)

    def finish(self) -> None:
        """End the stream; the dialect's own end has been written."""
        self._release()
        self.exchange.finish()
        self._resolve(None)

    def answer(self, response: Response) -> None:
        """Give the whole answer (or a refusal of a stream that has not begun)."""
        self._release()
        self._resolve(response)

    def cut(self) -> None:
        """Give up on the client: its connection is cut, so that it takes nothing for a complete answer."""
        self._release()
        self.exchange.abort()
        self._resolve(None)

    def _resolve(self, response: Response | None) -> None:
        if not self.done.done():
            self.done.set_result(response)

    def _release(self) -> None:
        exchange = self.exchange
        exchange.on_gone = exchange.on_pause = exchange.on_resume = None
        # A call and its client refer to each other; both are done with.
        self.on_gone = self.on_pause = self.on_resume = None
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _left(self) -> None:
        callback = self.on_gone
        self._release()
        if callback is not None:
            callback()
        self._resolve(None)

    def _paused(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self._loop.call_later(self._stall_limit_s, self._stalled)
        if self.on_pause is not None:
            self.on_pause()

    def _resumed(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if self.on_resume is not None:
            self.on_resume()

    def _stalled(self) -> None:
        # Cutting the connection runs the same way as a client that leaves.
        self.is_stalled = True
        self.exchange.abort()
