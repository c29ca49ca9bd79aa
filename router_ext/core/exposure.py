"""Who may not start beside whom: new grammars, and requests that may have felled a backend.

TGI compiles a grammar inside its step loop, and a request that breaks the loop takes everybody with it who waits for a
first token there. So a dispatch is *exposed* from its start to its first token if its grammar is new to the backend, or
if it is a suspect, and an exposed dispatch is alone: it starts where nobody else waits for a first token, and nobody is
sent there meanwhile. Those who stream already are innocent whatever happens, and resume elsewhere.

At most one suspect of a pool is exposed at a time, so that what fells backends meets one after the other, never two at
once (``core.trial`` says which is next).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from router_ext.core.estimates import Ratio

if TYPE_CHECKING:
    from router_ext.core.request import Request

MAX_COMPILED = 32
"""Compiled grammars that a TGI shard keeps."""


class Exposure:
    """Of one backend.

    Attributes:
        ticket: of the dispatch that is exposed here, 0 if none is. is_suspect: that one is a suspect.
        is_compiling: its grammar is new here. stall_s: how long the backend is expected to stall for it.
        speed: what stalls took here over what they were predicted to take.
        fell_s: when the backend fell while a suspect was exposed here, None once it is back.
    """

    __slots__ = ("_compiled", "fell_s", "is_compiling", "is_suspect", "speed", "stall_s", "ticket")

    def __init__(self) -> None:
        self.ticket = 0
        self.is_suspect = False
        self.is_compiling = False
        self.stall_s = 0.0
        self.speed = Ratio()
        self.fell_s: float | None = None
        self._compiled: OrderedDict[str, None] = OrderedDict()

    def is_new(self, request: Request) -> bool:
        """The backend would have to compile the request's grammar."""
        return request.grammar is not None and request.grammar not in self._compiled

    def exposes(self, request: Request) -> bool:
        """A dispatch of this request here would have to be alone."""
        return request.is_suspect or self.is_new(request)

    def begin(self, request: Request) -> None:
        """A dispatch has started here; without grammar or suspicion nothing changes."""
        if self.exposes(request):
            self.ticket = request.ticket
            self.is_suspect = request.is_suspect
            self.is_compiling = self.is_new(request)
            self.stall_s = request.stall_s * self.speed.value if self.is_compiling else 0.0
        elif request.grammar is not None:
            self._compiled.move_to_end(request.grammar)

    def end(self) -> None:
        """The exposed dispatch has its first token, or is gone."""
        self.ticket = 0
        self.is_suspect = self.is_compiling = False
        self.stall_s = 0.0

    def compiled(self, request: Request, stalled_s: float | None) -> None:
        """The request's grammar has been compiled here, in so many seconds if that was seen."""
        assert request.grammar is not None
        if stalled_s is not None and request.stall_s > 0.0:
            self.speed.observe(max(stalled_s, 0.0) / request.stall_s)
        compiled = self._compiled
        compiled[request.grammar] = None
        if len(compiled) > MAX_COMPILED:
            compiled.popitem(last=False)

    def went_down(self, now: float) -> None:
        """The backend will begin anew: it has compiled nothing then."""
        self._compiled.clear()
        if self.is_suspect:
            self.fell_s = now

    @property
    def num_compiled(self) -> int:
        """Grammars it has, as far as is known."""
        return len(self._compiled)
