"""The end of a request in the books and in the metrics: one usage event, whatever happened."""

from __future__ import annotations

import asyncio
from collections.abc import Container

from router_ext.core.scheduler import Scheduler
from router_ext.errors import FairlaneError
from router_ext.gateway.call import MAX_EXPLANATION, Call
from router_ext.gateway.ends import tell_end
from router_ext.gateway.explained import Explanations
from router_ext.gateway.foresight import Predictions
from router_ext.gateway.recent import Recent
from router_ext.gateway.refused import Refused, shortened, texts
from router_ext.obs.metrics import Metrics, TierMetrics
from router_ext.sync.ledger import Ledger, now_us
from router_ext.wire.controlplane import MomentRecord, ReasonRecord

EXPLAINED_S = 1.0
"""A wait from here on is explained in the books."""


SOFT_QUOTA = "soft_quota"
"""Cause of a tier that is lower than the one asked for."""


class Books:
    """Writes what became of the calls of one pool.

    Attributes:
        explanations: why its requests waited, those that live and the newest of those that have ended.
        recent: what happened in the last minutes.
        name: the pool's public name, a label. tenant_tokens: prompt and output tokens since start, by tenant.
    """

    def __init__(
        self, *, name: str, ledger: Ledger, metrics: Metrics, scheduler: Scheduler, predictions: Predictions
    ) -> None:
        self.name = name
        self.tenant_tokens: dict[str, list[int]] = {}
        self._loop = asyncio.get_running_loop()
        self._ledger = ledger
        self._metrics = metrics
        self._predictions = predictions
        self.explanations = Explanations(scheduler)
        self.recent = Recent(now_us())
        self._observers: dict[str, TierMetrics] = {}
        # A series that begins with its first event hides that one from rates.
        for counter in (metrics.recomputed, metrics.resumed_prefill, metrics.stalled_clients):
            counter.labels(name)

    def keep(self, *tenants: Container[str]) -> None:
        """Forget the sums of tenants that are in none of these."""
        self.tenant_tokens = {
            name: sums for name, sums in self.tenant_tokens.items() if any(name in each for each in tenants)
        }

    def refused(self, call: Call, error: FairlaneError) -> None:
        """A request that was never queued: nothing is booked, and its tenant may ask why."""
        now = self._loop.time()
        self.explanations.dropped(call)
        self.explanations.refusals.remember(refused_call(call, error, now))
        self._ledger.discard(call.slot)
        self._metrics.count_refusal(error.code, model=self.name, tier=call.tier)
        self.recent.refused(error.code, now_us())
        self._observer(call.tier).ended("refused", error.code)
        tell_end(call, model=self.name, outcome="refused", code=error.code, now=now)

    def ended(self, call: Call, *, outcome: str, code: str | None) -> None:
        """Write the one usage event of a call, and its metrics."""
        now = self._loop.time()
        event = call.slot.start.event
        reasons: list[ReasonRecord] = []
        timeline: list[MomentRecord] = []
        if self._is_explained(call, outcome, now):
            reasons = self.explanations.reasons(event)
            timeline = self.explanations.whole_timeline(call, outcome, now)
        if call.demotion is not None:
            reasons.append(ReasonRecord(cause=SOFT_QUOTA, text=call.demotion))
        self.explanations.ended(call, outcome=outcome, code=code, now=now)
        self._ledger.finish(
            call.slot,
            outcome=outcome,
            ended_at_us=now_us(),
            finish_reason=call.finish_reason,
            resume_class=call.resume_class,
            backends=call.backends,
            error_code=code,
            explanation=[*(r.text for r in reasons), *call.explanation][:MAX_EXPLANATION] if reasons else [],
            reasons=reasons,
            timeline=timeline,
            prediction=call.foresight.record(),
        )
        self._predictions.ended(call, outcome, model=self.name)
        sums = self.tenant_tokens.setdefault(call.identity.tenant, [0, 0])
        sums[0] += call.prompt_tokens if call.first_token_s is not None else 0
        sums[1] += call.output_tokens
        self._observe(call, outcome, code, now)
        tell_end(call, model=self.name, outcome=outcome, code=code, now=now)

    def _is_explained(self, call: Call, outcome: str, now: float) -> bool:
        """Whether it waited or ended badly; of the many that did neither nothing is told, to keep the books narrow."""
        waited_s = (now if call.dispatched_s is None else call.dispatched_s) - call.validated_s
        return outcome != "completed" or waited_s >= EXPLAINED_S or len(call.backends) > 1 or call.preemptions > 0

    def _observer(self, tier: str) -> TierMetrics:
        seen = self._observers.get(tier)
        if seen is None or seen.model != self.name:
            seen = self._observers[tier] = self._metrics.for_tier(self.name, tier)
        return seen

    def _observe(self, call: Call, outcome: str, code: str | None, now: float) -> None:
        seen = self._observer(call.tier)
        seen.ended(outcome, code or "")
        if outcome == "expired" and code is not None:
            self._metrics.count_refusal(code, model=self.name, tier=call.tier)
            self.recent.refused(code, now_us())
        if code == "client_stalled":
            self._metrics.stalled_clients.labels(self.name).inc()
        seen.duration.observe(now - call.arrived_s)
        if call.dispatched_s is not None:
            seen.queue_wait.observe(call.dispatched_s - call.validated_s)
        if call.first_token_s is not None:
            seen.ttft.observe(call.first_token_s - call.arrived_s)
            seen.overhead.observe(call.validated_s - call.arrived_s)
            seen.prompt_tokens.inc(call.prompt_tokens)
            seen.output_tokens.inc(call.output_tokens)
            last = call.last_token_s if call.last_token_s is not None else now
            if call.output_tokens > 1:
                seen.tpot.observe((last - call.first_token_s) / (call.output_tokens - 1))
        if call.recomputed_tokens:
            self._metrics.recomputed.labels(self.name).inc(call.recomputed_tokens)
        if call.resumed_prompt_tokens:
            self._metrics.resumed_prefill.labels(self.name).inc(call.resumed_prompt_tokens)
        if outcome == "completed" and call.predicted_tokens and call.output_tokens:
            seen.predicted.observe(call.predicted_tokens / call.output_tokens)


def refused_call(call: Call, error: FairlaneError, now: float) -> Refused:
    """What is remembered of a call that was not queued."""
    start = call.slot.start
    return Refused(
        request=start.request,
        event=start.event,
        tenant=start.tenant,
        tier=call.tier,
        tier_reason=call.demotion,
        arrived_at_us=start.arrived_at_us,
        code=error.code,
        status=call.status,
        message=shortened(error.message),
        retry_after_s=error.retry_after_s,
        limits=texts(call.limit_headers()),
        total_s=now - call.arrived_s,
    )
