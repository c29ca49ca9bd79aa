"""Preemption: which running work is told to stop, so that its KV comes free for somebody who waits.

TGI takes a request's whole reservation at admission and never gives any back before the end; the only way to free KV
is to close a stream and to send prompt and output so far again later. So a cut must be worth it:

- *deadline trigger*: an urgent head that can still be on time, fits nowhere for lack of KV, and will not be on time by
  the next natural release. What is expected is believed until the last moment at which a cut still helps.
- *gap trigger*: the request in turn is held by KV. Victims: work of tenants with ``(c - V) * w > theta``.

Victims are work of tiers without a TTFT target, for both: a tenant that is ahead by right of its urgency pass is not
to lose what it got by it (adversary-flood: the honest tenant's p99 1.19 -> 0.96 s, difference while all wait halved).
They lie on one backend: in the order of ``lost / freed``, the smallest prefix that frees enough, less what proves
superfluous (largest first); if all together free too little, nobody is cut. KV that is on its way (cut before, or of a
closed stream) counts as free at its instant, so nobody is cut twice for the same head.

Guards: at most ``max_preemptions`` cuts per request; nobody that has produced more than 0.8 of its prediction; nobody
whose prompt plus output exceed the prefill budget, nor the longest prompt the backend takes; only work that shows
tokens and can be resumed. A victim resumes at the front of its tenant's queue, and never as backfill: only when it is
its tenant's turn. The waste budget (``core.waste``) is open; the gap trigger may use its upper half only, lest the
deadline trigger find it empty.

Bounds: counters are charged by high-water marks and admissions keep to their passes, so those of ``core.bounds`` hold
as without preemption.

Cost: O(1) per decision while no trigger can fire; a search is O(n log n) in what runs on the backends, and one that
found nobody is not repeated before something that matters may have changed.

Source: gap trigger: named as future work by Sheng et al. (OSDI 2024). Late-run protection: TRAIL. The rest is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router_ext.core.actions import Action, Preempt
from router_ext.core.admission import Backend, Gates
from router_ext.core.books import Books
from router_ext.core.bounds import peak_service
from router_ext.core.config import PoolConfig
from router_ext.core.explain import Gate
from router_ext.core.fairness.base import FairnessPolicy, Standing
from router_ext.core.fairness.counters import Counters
from router_ext.core.fleet import Fleet
from router_ext.core.lifecycle import State
from router_ext.core.request import Request
from router_ext.core.tiers import Tiers

DEADLINE, GAP = "deadline", "gap"
"""The triggers, as they are counted and reported."""

_SEAM_TOKENS = 4
"""Tokenised again, the text of what is kept may be so much longer; a router lets run on what might then be too long."""

_LATE_RUN = 0.8
"""No cut beyond this share of the predicted output (TRAIL found 0.8 best): the KV comes back soon anyway."""

_GAP_RESERVE = 0.5
"""Share of the waste budget that the gap trigger leaves to the deadline trigger."""

_CHANCE_MARGIN_S = 0.02
"""So much before the last moment at which a cut still helps an urgent head, it is looked at again."""

_LOOK_AGAIN_S = 0.01
"""A search for an urgent head that found nobody is not repeated sooner: victims appear and KV goes by steps."""

_THETA_STEPS = 4.0
"""A search for the one in turn that found nobody is repeated after so many parts of theta have been delivered."""

_REASONS = {
    DEADLINE: "an urgent request could not start in time otherwise",
    GAP: "a request in turn found no KV, and this tenant was ahead of its share",
}

_FOREVER = float("inf")


class Cut(NamedTuple):
    """Victims on one backend and what they lose together. No victims: what is on its way there is enough."""

    backend: Backend
    victims: list[Request]
    lost_tokens: int


class Preemption:
    """Looks for victims at the end of a decision that left somebody waiting.

    Attributes:
        preempted: requests told to stop so far, by trigger.
        look_again_s: when the releases counted on will have proved true or false; infinity if none is counted on.
    """

    __slots__ = (
        "_books",
        "_config",
        "_counters",
        "_fleet",
        "_floor",
        "_gap_from_service",
        "_gates",
        "_is_on",
        "_judged",
        "_judged_until_s",
        "_largest_lead",
        "_policy",
        "_room",
        "_theta",
        "_tiers",
        "look_again_s",
        "preempted",
    )

    def __init__(self, *, books: Books, counters: Counters, fleet: Fleet, tiers: Tiers, gates: Gates) -> None:
        self._config: PoolConfig
        self._policy: FairnessPolicy
        self._books = books
        self._room = books.room
        self._counters = counters
        self._fleet = fleet
        self._tiers = tiers
        self._gates = gates
        self._is_on = False
        self._theta = 0.0
        self._judged: Request | None = None
        self._judged_until_s = 0.0
        self._gap_from_service = 0.0
        self._floor = _FOREVER
        self._largest_lead = 0.0
        self.preempted: dict[str, int] = {DEADLINE: 0, GAP: 0}
        self.look_again_s = _FOREVER

    def adopt(self, config: PoolConfig, policy: FairnessPolicy) -> None:
        """Follow another configuration and policy from now on."""
        self._config = config
        self._policy = policy
        self._is_on = policy.is_preemptive and config.max_preemptions > 0
        self._theta = config.theta_ratio * peak_service(config)
        self._judged = None
        self._gap_from_service = 0.0

    def consider(self, held_by: Gate, now: float, actions: list[Action]) -> None:
        """A decision has ended and somebody waits: cut for whoever deserves it."""
        waste = self._books.waste
        level = waste.level_tokens
        if not self._is_on or level <= 0.0:
            return
        counters = self._counters
        floor = counters.floor()
        if floor is None:
            return
        # With no target active there is no deadline trigger to starve.
        reserve = _GAP_RESERVE * waste.capacity_tokens if self._tiers.tightest_target_s is not None else 0.0
        is_gap_due = (
            held_by is Gate.KV
            and level > reserve
            and (counters.total_service >= self._gap_from_service or floor < self._floor)
        )
        first = self._policy.first_urgent(now, floor)
        is_urgent_due = first is not None and (first is not self._judged or now >= self._judged_until_s)
        if not is_urgent_due and not is_gap_due:
            return
        urgent, pick = self._heads(now)
        promised: dict[Backend, int] = {}
        if is_urgent_due:
            self.look_again_s = _FOREVER
            for head in urgent:
                cut = self._for_deadline(head, promised, now)
                if cut is not None and cut.victims:
                    self._perform(cut, DEADLINE, now, actions)
                    self._judged = None
                    return
            self._judged = urgent[0] if urgent else None
            self._judged_until_s = min(now + _LOOK_AGAIN_S, self.look_again_s)
        if is_gap_due and pick is not None and pick not in urgent:
            cut = self._for_gap(pick, floor, promised, now)
            if cut is not None and cut.victims:
                self._perform(cut, GAP, now, actions)

    def _heads(self, now: float) -> tuple[list[Request], Request | None]:
        """Urgent heads that can still be on time, in order, and the request in turn."""
        urgent: list[Request] = []
        pick: Request | None = None
        candidates = self._policy.candidates(now)
        for request, standing in candidates:
            if standing is Standing.URGENT:
                urgent.append(request)
            elif standing >= Standing.URGENT_PICK:
                pick = request
                break
        if not isinstance(candidates, tuple):
            candidates.close()
        return urgent, pick

    # --- triggers --------------------------------------------------------------------------------------------------

    def _for_deadline(self, head: Request, promised: dict[Backend, int], now: float) -> Cut | None:
        """Victims for an urgent head, None if it will be on time without, or not even with them."""
        deadline_s = head.deadline_s
        assert deadline_s is not None
        new_tokens = self._new_tokens(head)
        best: tuple[float, Backend, int] | None = None
        for backend in self._fleet.usable:
            if not backend.can_hold(head, new_tokens):
                continue
            needed = backend.blocks(head, new_tokens) + promised.get(backend, 0)
            before_s = _FOREVER if best is None else best[0]
            when = backend.free_from(needed, now, before_s)
            if when is not None and when[0] < before_s:
                best = when[0], backend, needed
        if best is None:
            return None
        at_s, backend, needed = best
        first_token_s = backend.first_token_s(backend.prefill_tokens + head.input_tokens)
        last_chance_s = deadline_s - first_token_s - backend.cut_lag_s() - _CHANCE_MARGIN_S
        if at_s + first_token_s <= deadline_s and now < last_chance_s:
            # Predictions slip: what is expected is believed until the last moment at which a cut still helps.
            promised[backend] = needed
            self.look_again_s = min(self.look_again_s, last_chance_s)
            return None
        until_s = max(now, deadline_s - first_token_s)
        cut = self._cheapest(head, new_tokens, promised, now, until_s)
        if cut is None or not cut.victims:
            promised[backend] = needed
        return cut

    def _for_gap(self, pick: Request, floor: float, promised: dict[Backend, int], now: float) -> Cut | None:
        """Victims for the request in turn, among tenants that are far ahead of the floor."""
        self._largest_lead = 0.0
        cut = self._cheapest(pick, self._new_tokens(pick), promised, now, _FOREVER, floor)
        if cut is None:
            # Nobody's lead grows faster than service is delivered to him.
            theta = self._theta
            more = max(theta - self._largest_lead, theta / _THETA_STEPS)
            self._gap_from_service = self._counters.total_service + more
            self._floor = floor
        return cut

    def _new_tokens(self, request: Request) -> int:
        return request.slice_busy if self._room.count > 1 else request.slice_idle

    # --- victims ---------------------------------------------------------------------------------------------------

    def _cheapest(
        self,
        head: Request,
        new_tokens: int,
        promised: dict[Backend, int],
        now: float,
        until_s: float,
        floor: float | None = None,
    ) -> Cut | None:
        """The victims that lose least, over all backends; None if no backend has enough of them.

        Args:
            until_s: streams that are closing count as gone if they are by then, give or take a step or two (their
                instants were estimated under another load).
            floor: only work of tenants that are theta above it; None for an urgent head, which passes the gates.
        """
        best: Cut | None = None
        for backend in self._fleet.usable:
            if not backend.can_hold(head, new_tokens):
                continue
            needed = backend.blocks(head, new_tokens) + promised.get(backend, 0)
            if floor is not None:
                needed += self._gates.headroom_blocks(backend)
                if not self._is_open(backend, head):
                    continue
            missing = needed - backend.ledger.free_blocks - backend.closing_blocks(until_s + 2.0 * backend.cut_lag_s())
            if missing <= 0:
                # What is on its way is enough (or KV is not what it lacks here).
                return Cut(backend, [], 0)
            victims = self._victims(backend, missing, floor)
            if not victims:
                continue
            lost = sum(map(lost_tokens, victims))
            if best is None or lost < best.lost_tokens:
                best = Cut(backend, victims, lost)
        return best

    def _is_open(self, backend: Backend, head: Request) -> bool:
        """Whether the prefill gate would let a head that is not urgent in."""
        backlog = backend.prefill_tokens
        if not backlog or not self._gates.is_on:
            return True
        target_s = self._gates.tightest_target_s
        return backlog + head.input_tokens <= backend.window_tokens(target_s, backend.prefill_rate())

    def _victims(self, backend: Backend, missing_blocks: int, floor: float | None) -> list[Request]:
        """Whom to cut on this backend to free so many blocks; empty if that is impossible."""
        limit = self._config.max_preemptions
        among = backend.running.values() if floor is None else self._ahead(backend, floor)
        eligible = [request for request in among if not is_protected(request, backend, limit)]
        return choose_victims(eligible, missing_blocks) if eligible else []

    def _ahead(self, backend: Backend, floor: float) -> list[Request]:
        """Work here without a target, of tenants that are theta above the floor. Notes the largest lead seen."""
        theta, largest = self._theta, self._largest_lead
        found: list[Request] = []
        for request in backend.running.values():
            tenant = request.tenant
            lead = (tenant.counter - floor) * tenant.weight
            if lead > theta or lead > largest:
                if request.queue.ttft_target_s is not None:
                    continue
                if lead > largest:
                    largest = lead
                if lead > theta:
                    found.append(request)
        self._largest_lead = largest
        return found

    def _perform(self, cut: Cut, trigger: str, now: float, actions: list[Action]) -> None:
        reason = _REASONS[trigger]
        self.preempted[trigger] += len(cut.victims)
        for request in cut.victims:
            self._books.preempt(request, lost_tokens(request), f"{trigger}: {reason}")
            cut.backend.expect_release(request, now + cut.backend.cut_lag_s())
            actions.append(
                Preempt(request_id=request.request_id, backend=cut.backend.backend_id, reason=f"{trigger}: {reason}")
            )


def choose_victims(eligible: Sequence[Request], missing_blocks: int) -> list[Request]:
    """Whom of these to cut to free so many blocks; empty if all together do not.

    In the order of tokens lost per block freed (ties: the lowest tier, then the latest start) the smallest prefix that
    suffices, less those that prove superfluous, largest first.
    """
    if sum(request.blocks for request in eligible) < missing_blocks:
        return []
    order = sorted(eligible, key=lambda r: (lost_tokens(r) / r.blocks, -r.queue.rank, -r.ticket))
    chosen: list[Request] = []
    freed = 0
    for request in order:
        chosen.append(request)
        freed += request.blocks
        if freed >= missing_blocks:
            break
    for request in sorted(chosen, key=lambda r: -r.blocks):
        if freed - request.blocks >= missing_blocks:
            chosen.remove(request)
            freed -= request.blocks
    return chosen


def lost_tokens(request: Request) -> int:
    """What cutting a running request loses: everything it has, for in a full pool its prompt is evicted as well."""
    return request.input_tokens + request.slice_output


def is_protected(request: Request, backend: Backend, max_preemptions: int) -> bool:
    """Whether a running request may not be cut, whoever asks."""
    if (
        request.state is not State.DECODING
        or not request.is_sliceable
        or request.queue.ttft_target_s is not None
        or request.num_preempted >= max_preemptions
        or request.output_tokens > _LATE_RUN * request.predicted_output_tokens
    ):
        return True
    config = backend.config
    return lost_tokens(request) > min(config.prefill_budget_tokens, config.max_input_tokens - _SEAM_TOKENS)
