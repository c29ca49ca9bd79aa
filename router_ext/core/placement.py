"""Which backend, and which backend a request that fits nowhere claims.

Among backends where a request may start: the one it ran on before, then one that has compiled its grammar
(``core.exposure``), then the one that holds most of its prompt's start (``core.prefix``), then the one with the least
prefill backlog, then the most free KV, then the order of ids. A backend that just failed the request comes last.

A claim names the backend where a request in turn fits soonest, by the expected ends of what runs there. Claims
belong to one decision and are computed only when somebody else could use a backend meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from router_ext.core.admission import Backend, Gates
from router_ext.core.explain import Gate
from router_ext.core.ids import BackendId
from router_ext.core.request import Request

_FOREVER = float("inf")


class Claim(NamedTuple):
    """Where a request fits soonest, when, and how many blocks are over then.

    ``is_kv``: only KV is missing there, so smaller work may use what is over without delaying the claimant.
    """

    backend: Backend
    at_s: float
    spare_blocks: int
    is_kv: bool


class Placement:
    """Chooses backends."""

    __slots__ = ("_backends", "_gates")

    def __init__(self, gates: Gates, backends: Mapping[BackendId, Backend]) -> None:
        self._gates = gates
        self._backends = backends

    def options(
        self, request: Request, new_tokens: int, usable: list[Backend], *, is_urgent: bool, is_onward: bool = False
    ) -> tuple[list[tuple[Backend, int]], Gate]:
        """Backends where the request may start now, with the blocks it takes, and the last gate that said no."""
        found: list[tuple[Backend, int]] = []
        gate = Gate.KV
        input_tokens = request.input_tokens
        total = input_tokens + new_tokens
        sequences = request.num_sequences
        is_odd = request.grammar is not None or request.is_suspect
        if request.is_suspect and self._is_suspect_exposed():
            return found, Gate.ALONE
        for backend in usable:
            config = backend.config
            blocks = -(-(total + config.speculate - 1) // backend.block_size) * sequences
            if blocks > backend.ledger.free_blocks or input_tokens > config.max_input_tokens:
                continue
            if total > config.max_total_tokens:
                continue
            if backend.exposure.ticket or (is_odd and backend.prefill and backend.exposure.exposes(request)):
                if gate < Gate.ALONE:
                    gate = Gate.ALONE
                continue
            if is_odd and request.grammar is not None and not config.takes_grammars:
                continue
            if backend.seats + sequences > backend.max_seats and backend.seats:
                if gate < Gate.CONCURRENCY:
                    gate = Gate.CONCURRENCY
                continue
            if not is_urgent:
                closed = self._gates.check(backend, request, blocks, usable, is_onward=is_onward)
                if closed:
                    if gate < closed:
                        gate = closed
                    continue
            found.append((backend, blocks))
        return found, gate

    def _is_suspect_exposed(self) -> bool:
        """A suspect is being tried somewhere; a backend that has gone meanwhile counts until the dispatch has ended."""
        return any(backend.exposure.is_suspect for backend in self._backends.values())

    def choose(self, request: Request, options: list[tuple[Backend, int]]) -> tuple[Backend, int]:
        """The best of ``options`` (at least one)."""
        if len(options) == 1:
            return options[0]
        home = request.last_backend
        avoid = request.avoid
        chain = request.prefix
        return min(
            options,
            key=lambda option: (
                option[0] is avoid,
                option[0] is not home,
                option[0].exposure.is_new(request),
                -option[0].prefixes.match(chain),
                option[0].prefill_tokens,
                -option[0].ledger.free_blocks * option[0].block_size,
                option[0].index,
            ),
        )

    def claim(
        self, request: Request, new_tokens: int, usable: list[Backend], now: float, *, is_urgent: bool
    ) -> Claim | None:
        """The backend where a request that may start nowhere fits soonest; None if it fits on none of them.

        Where closed streams give back enough goes before where ends are only expected, lest somebody else take there
        what running work was cut for. Cost: a few expected releases per backend.
        """
        best: Claim | None = None
        is_best_sure = False
        if request.is_suspect and self._is_suspect_exposed():
            return None
        for backend in usable:
            is_sure = bool(backend.closing) and self._needed(backend, request, new_tokens, is_urgent=is_urgent) <= (
                backend.ledger.free_blocks + backend.closing_blocks(_FOREVER)
            )
            if is_best_sure and not is_sure:
                continue
            before_s = _FOREVER if best is None or is_sure is not is_best_sure else best.at_s
            claim = self._claim_on(backend, request, new_tokens, now, before_s, is_urgent=is_urgent)
            if claim is not None and (best is None or claim.at_s < before_s):
                best = claim
                is_best_sure = is_sure
        return best

    def _needed(self, backend: Backend, request: Request, new_tokens: int, *, is_urgent: bool) -> int:
        """Blocks that must be free for the request to start there."""
        blocks = backend.blocks(request, new_tokens)
        return blocks if is_urgent else blocks + self._gates.headroom_blocks(backend)

    def _claim_on(
        self, backend: Backend, request: Request, new_tokens: int, now: float, before_s: float, *, is_urgent: bool
    ) -> Claim | None:
        """The claim on this backend; None if the request never fits there, or not before ``before_s``."""
        if not backend.can_hold(request, new_tokens):
            return None
        gates = self._gates
        needed = self._needed(backend, request, new_tokens, is_urgent=is_urgent)
        when = backend.free_from(needed, now, before_s)
        if when is None:
            return None
        at_s, free = when
        is_kv = True
        if backend.seats + request.num_sequences > backend.max_seats and backend.releases:
            at_s = max(at_s, backend.releases[0][0])
        if not is_urgent and gates.is_on and backend.prefill_tokens:
            window = backend.window_tokens(gates.tightest_target_s, backend.prefill_rate())
            if backend.prefill_tokens + request.input_tokens > window:
                at_s = max(at_s, now + backend.first_token_s(backend.prefill_tokens))
                is_kv = False
        exposure = backend.exposure
        if backend.prefill and (exposure.ticket or exposure.exposes(request)):
            at_s = max(at_s, now + backend.first_token_s(backend.prefill_tokens) + exposure.stall_s)
            is_kv = False
        return Claim(backend, at_s, max(0, free - needed), is_kv)


class Claims:
    """What those claim who come first and fit nowhere. Belongs to one pass, until the next admission.

    Args:
        refused: (request, new tokens, whether it is urgent), in order; may grow while the claims are in use.
    """

    __slots__ = ("_claims", "_now", "_placement", "_refused", "_usable")

    def __init__(
        self, placement: Placement, usable: list[Backend], refused: list[tuple[Request, int, bool]], now: float
    ) -> None:
        self._placement = placement
        self._usable = usable
        self._refused = refused
        self._now = now
        self._claims: list[Claim | None] = []

    def unclaimed(self, options: list[tuple[Backend, int]], *, is_backfill: bool) -> list[tuple[Backend, int]]:
        """Options that take nothing from those who come first. Claims are computed here, on first need.

        Backfill may use what a claimant leaves over, unless that one is urgent.
        """
        claims = self._claims
        for position, (request, new_tokens, is_urgent) in enumerate(self._refused):
            if position == len(claims):
                claims.append(self._placement.claim(request, new_tokens, self._usable, self._now, is_urgent=is_urgent))
            claim = claims[position]
            if claim is None:
                continue
            for index, (backend, blocks) in enumerate(options):
                if claim.backend is backend:
                    if is_urgent or not is_backfill or not claim.is_kv or blocks > claim.spare_blocks:
                        options = options[:index] + options[index + 1 :]
                        if not options:
                            return options
                    break
        return options
