"""The backends of one pool: which may be given work, which streams are closing, how long nobody could be served.

Owns the list of backends and everything about them that changes with time alone:

- *release lags*: TGI frees the KV of a closed stream at the end of the running step (of the whole prefill, if the
  prompt was still being processed). Until then the blocks stay in the ledger.
- *assumed prefills*: work that is not streamed upstream shows no first token; its prompt counts as processed after
  twice the estimate, lest it close the prefill gate for the whole answer.
- *the outage clock*: since when no backend has been usable.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import TypeAlias

from router_ext.core.admission import Backend
from router_ext.core.config import BackendConfig
from router_ext.core.ids import BackendId
from router_ext.core.request import Request
from router_ext.core.trial import RECOVERY_S

_KEEP_HELD = 0.98
"""What the last fifty or so slices made of their reservations decides."""

_Size: TypeAlias = tuple[int, int, int, int, int, bool]


class Fleet:
    """See the module.

    Attributes:
        backends: all of them by id, retired ones included while something is left on them.
        usable: those that may be given work, in the order of their ids.
        shapes: configurations of the usable ones, those of equal size once: what a request could be held by at present.
        down_since: instant since when none has been usable, None while one is (or none was looked for yet).
        lags: heap of (instant, ticket, backend, whether KV is freed).
    """

    __slots__ = ("_fastest", "_held", "_sizes", "_token_time", "backends", "down_since", "lags", "shapes", "usable")

    def __init__(self) -> None:
        self.backends: dict[BackendId, Backend] = {}
        self.usable: list[Backend] = []
        self.shapes: tuple[BackendConfig, ...] = ()
        self._sizes: frozenset[_Size] = frozenset()
        self.down_since: float | None = None
        self.lags: list[tuple[float, int, Backend, bool]] = []
        self._fastest: tuple[float, float] | None = None
        """``first_token_line`` of the backend that is fastest for prompts."""
        self._token_time = self._held = 0.0

    # --- who is there ----------------------------------------------------------------------------------------------

    def apply(self, stated: Mapping[BackendId, BackendConfig], requests: Collection[Request]) -> None:
        """Take over what the operator states; what runs stays. Follow with ``refresh``."""
        backends = self.backends
        for backend in backends.values():
            backend.is_retired = backend.backend_id not in stated
            backend.is_up = backend.is_up and not backend.is_retired
        for backend_id, config in stated.items():
            known = backends.get(backend_id)
            if known is None:
                backends[backend_id] = Backend(config)
                continue
            rule = (known.block_size, known.config.speculate)
            known.apply(config)
            if rule != (config.block_size, config.speculate):
                for request in requests:
                    if request.backend is known:
                        known.correct(request, known.blocks(request, request.slice_tokens))
        for backend_id in [b.backend_id for b in backends.values() if b.is_retired and not b.ledger.holdings]:
            del backends[backend_id]
        for index, backend_id in enumerate(sorted(backends)):
            backends[backend_id].index = index

    def place(self, backend_id: BackendId) -> Backend:
        """The backend by id; one that is not configured is made, retired: something still runs there."""
        backend = self.backends.get(backend_id)
        if backend is None:
            backend = self.backends[backend_id] = Backend(BackendConfig(backend=backend_id, kv_tokens=1))
            backend.is_retired = True
            for index, name in enumerate(sorted(self.backends)):
                self.backends[name].index = index
        return backend

    def refresh(self, now: float) -> bool:
        """See anew which backends may be given work.

        Returns:
            whether a request may be held now that could not before, or the reverse. Losing one of several equal
            backends changes nothing in that.
        """
        self._fastest = None
        self.usable = sorted((b for b in self.backends.values() if b.is_usable), key=lambda backend: backend.index)
        if self.usable:
            self.down_since = None
        else:
            self.start_outage(now)
        shapes = {_size(backend.config): backend.config for backend in self.usable}
        self.shapes = tuple(shapes.values())
        known, self._sizes = self._sizes, frozenset(shapes)
        return known != self._sizes

    def start_outage(self, now: float) -> None:
        """Start the outage clock, if no backend is usable and it does not run yet."""
        if not self.usable and self.down_since is None:
            self.down_since = now

    def recovered_s(self) -> float | None:
        """When the last of the backends that fell under a suspect is waited for no longer; None if all are back."""
        fell = [b.exposure.fell_s for b in self.backends.values() if b.exposure.fell_s is not None]
        return max(fell) + RECOVERY_S if fell else None

    def is_wounded(self, now: float) -> bool:
        """A backend that fell under a suspect is still waited for."""
        until_s = self.recovered_s()
        return until_s is not None and now < until_s

    # --- what ends with time ---------------------------------------------------------------------------------------

    def close(self, backend: Backend, ticket: int, at_s: float) -> None:
        """The stream was closed; TGI frees its KV at ``at_s``."""
        backend.close(ticket, at_s)
        heapq.heappush(self.lags, (at_s, ticket, backend, True))

    def assume_first_token(self, request: Request, backend: Backend, now: float) -> None:
        """A dispatch has just started whose first token may stay unseen until the whole answer comes."""
        exposure = backend.exposure
        if exposure.ticket == request.ticket and exposure.is_suspect:
            # It stays alone until it has shown what it does.
            return
        over = now + 2.0 * (backend.first_token_s(request.prefill_ahead_tokens) + exposure.stall_s)
        heapq.heappush(self.lags, (over, request.ticket, backend, False))

    def end_lags(self, now: float) -> None:
        """Free what is due at ``now``."""
        lags = self.lags
        while lags and lags[0][0] <= now:
            _, ticket, backend, is_freed = heapq.heappop(lags)
            if is_freed:
                backend.free(ticket)
            else:
                backend.prefill_over(ticket)

    def closing(self) -> set[tuple[BackendId, int]]:
        """Tickets of closed streams whose KV is not free yet."""
        return {(backend.backend_id, ticket) for _, ticket, backend, is_freed in self.lags if is_freed}

    # --- what it can do --------------------------------------------------------------------------------------------

    def most_free(self) -> int:
        """Tokens (input plus new) that fit on the backend with the most free KV."""
        most = 0
        for backend in self.usable:
            free = backend.ledger.free_blocks * backend.block_size + backend.spare_tokens
            if free > most:
                most = free
        return most

    def held_blocks(self, chain: tuple[int, ...]) -> int:
        """Blocks of a prompt's chain that the usable backend with most of them holds."""
        most = 0
        for backend in self.usable:
            held = backend.prefixes.match(chain)
            if held > most:
                most = held
        return most

    def free_ratio(self) -> float:
        """Share of the usable backends' KV that nobody holds; 1 if there is none."""
        total = free = 0
        for backend in self.usable:
            total += backend.ledger.usable_blocks * backend.block_size
            free += backend.ledger.free_blocks * backend.block_size
        return free / total if total else 1.0

    def note_held(self, token_time: float, reserved_tokens: int, held_s: float) -> None:
        """A slice is over: the KV token-time it delivered, and the KV it kept reserved, for how long."""
        self._token_time = _KEEP_HELD * self._token_time + token_time
        self._held = _KEEP_HELD * self._held + reserved_tokens * held_s

    def kv_rate(self) -> float:
        """KV token-time per second that the usable backends deliver while their KV is fully reserved.

        Less than KV tokens per step: a reservation stands empty during the prefill, and is filled token by token. How
        much less the last slices say; before the first one, nothing less.
        """
        kv_tokens = sum(backend.ledger.usable_blocks * backend.block_size for backend in self.usable)
        if self._token_time > 0.0 and self._held > 0.0:
            return kv_tokens * self._token_time / self._held
        return kv_tokens / self.step_s() if kv_tokens else 0.0

    def step_s(self) -> float:
        """Mean seconds per token of a running request over the usable backends, at their present load."""
        usable = self.usable
        return sum(backend.step_s() for backend in usable) / len(usable) if usable else 0.0

    def speed_changed(self) -> None:
        """A backend's prefill was observed: which is fastest has to be looked for anew."""
        self._fastest = None

    def first_token_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token on the backend that is fastest for prompts of the size seen last.

        Asked for every head whose deadline is looked at, so the fastest is looked for only when speeds change.
        """
        line = self._fastest
        if line is None:
            if not self.usable:
                return 0.0
            fastest = min(self.usable, key=lambda backend: backend.first_token_s(prompt_tokens))
            line = self._fastest = fastest.first_token_line()
        return line[0] + line[1] * prompt_tokens


def _size(config: BackendConfig) -> _Size:
    return (
        config.kv_tokens,
        config.block_size,
        config.speculate,
        config.max_input_tokens,
        config.max_total_tokens,
        config.takes_grammars,
    )
