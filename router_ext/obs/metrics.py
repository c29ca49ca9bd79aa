"""Prometheus metrics of the router. Label values are bounded: pool names, tiers, backends, outcomes, codes.

Two registries: ``public`` stands open beside the data plane and names no tenant; ``admin`` (behind a token, on its own
port) has the same and the tenants' shares. State that lives elsewhere (queues, reservations, spool) is read at scrape
time from ``Readings``, so nothing is kept twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from router_ext import __version__, compiled
from router_ext.obs.shares import Claim, shares

BACKEND_STATES = ("warming", "up", "down", "cordoned")
"""States of a backend, as in the heartbeat."""

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""From one millisecond of overhead to two minutes of queue."""

PER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
RATIO = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

PREDICTION_SECONDS = (0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Around what a request waits for its prediction."""

BATCH = (1, 2, 4, 8, 16, 32, 64)

MAX_TENANTS = 500
"""Tenants named in the admin registry; the rest are summed as ``other``."""

MAX_VALUES = 256
"""Values of one label; whatever comes after them is counted as ``other``."""

OTHER = "other"


class Bounded:
    """The first ``MAX_VALUES`` values of a label as they are, all later ones as ``other``.

    Labels are configured names and codes written in the source. This is for the day when one of them is not.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= MAX_VALUES:
            return OTHER
        self._known.add(value)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReading:
    """One backend at scrape time. Units: tokens; ``queue_size`` is what the backend itself said, None if stale."""

    pool: str
    backend: str
    is_up: bool
    running: int
    reserved_tokens: int
    kv_tokens: int
    queue_size: float | None
    breaker: str = "closed"
    openings: int = 0
    state: str = "up"
    reservations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantReading:
    """One tenant of one pool at scrape time."""

    pool: str
    tenant: str
    queued: int
    running: int
    weight: float
    prompt_tokens: int
    output_tokens: int
    counter: float = 0.0
    group: str | None = None
    group_weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReading:
    """One pool at scrape time; fields as in ``core.snapshot.PoolStats``."""

    pool: str
    running: int
    parked: int
    bound_service: float | None
    largest_gap_service: float
    bound_gpu_s: float | None
    largest_gap_gpu_s: float | None
    preempted_total: dict[str, int]
    waste_tokens: float
    predictions: dict[str, int]
    prediction_fallbacks: dict[str, int]
    is_length_model_refused: bool
    slice_level: float
    queued_bytes: int = 0
    paused_clients: int = 0
    """Clients that have stopped reading at present."""
    strikes: dict[str, int] = field(default_factory=dict)
    """Dispatches that may have felled a backend, by kind."""
    retries: int = 0
    retries_refused: int = 0
    retries_left: int = 0
    """What ``gateway.retries`` granted and refused since start, and would grant now."""


@dataclass(slots=True, kw_only=True)
class Readings:
    """Everything read at scrape time."""

    queued: dict[tuple[str, str], int] = field(default_factory=dict)
    """Waiting requests by pool and tier."""
    ttft_targets: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds to the first token that a tier of a pool is promised, where it is."""
    pools: list[PoolReading] = field(default_factory=list)
    backends: list[BackendReading] = field(default_factory=list)
    tenants: list[TenantReading] = field(default_factory=list)
    spool_events: int = 0
    spool_bytes: int = 0
    ledger_overflow_events: int = 0
    """Ended requests the disk has not taken; anything but 0 is an alarm."""
    ledger_damaged_bytes: int = 0
    """Bytes of the spool that could not be read; anything but 0 is an alarm."""
    keys_without_pepper: int = 0
    """Keys of the configuration whose version of the pepper is not here; anything but 0 is an alarm."""
    ledger_set_aside_events: int = 0
    """Events the control plane would not take; anything but 0 is an alarm."""
    ledger_lag_s: float | None = None
    """Age of the oldest usage event that was not acknowledged, 0 if all were; None without a control plane."""
    reservations: int = 0
    reserved_tokens: int = 0
    """Requests that count against limits and have not ended; tokens reserved for them."""
    is_minute_store_up: bool | None = None
    """Whether requests are counted over all routers; None: no Valkey is configured."""
    totals_age_s: float | None = None
    """Since the control plane told what is used of quotas; None: it has not."""
    applied_revision: int = 0
    is_draining: bool = False


_BREAKER = {"closed": 0.0, "half-open": 1.0, "open": 2.0}


class _Snapshotted(Collector):
    """Gauges read from ``Readings`` at scrape time."""

    def __init__(self, read: Callable[[], Readings], *, has_tenants: bool) -> None:
        self._read = read
        self._has_tenants = has_tenants

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        now = self._read()
        yield InfoMetricFamily(
            "fairlane_build",
            "Version, and whether the scheduler runs from its sources or compiled.",
            {"version": __version__, "core": compiled.running()},
        )
        queued = GaugeMetricFamily("fairlane_queue_length", "Waiting requests.", labels=["model", "tier"])
        for (pool, tier), count in now.queued.items():
            queued.add_metric([pool, tier], count)
        yield queued
        target = GaugeMetricFamily(
            "fairlane_time_to_first_token_target_seconds",
            "What the tier is promised; absent where it is promised nothing.",
            labels=["model", "tier"],
        )
        for (pool, tier), seconds in now.ttft_targets.items():
            target.add_metric([pool, tier], seconds)
        yield target
        yield from _pool_metrics(now.pools)
        labels = ["model", "backend"]
        up = GaugeMetricFamily("fairlane_backend_up", "1 if the backend may be used.", labels=labels)
        running = GaugeMetricFamily("fairlane_backend_running_requests", "Streams open.", labels=labels)
        reserved = GaugeMetricFamily("fairlane_backend_reserved_tokens", "KV tokens reserved.", labels=labels)
        kv = GaugeMetricFamily("fairlane_backend_kv_tokens", "KV tokens that can be reserved.", labels=labels)
        own = GaugeMetricFamily(
            "fairlane_backend_queue_size", "Requests in the backend's own queue (should be 0).", labels=labels
        )
        breaker = GaugeMetricFamily(
            "fairlane_backend_breaker_state",
            "0: closed. 1: half-open, one request at a time until it has shown a token. 2: open.",
            labels=labels,
        )
        openings = CounterMetricFamily("fairlane_backend_breaker_openings", "Failures that opened it.", labels=labels)
        reservations = GaugeMetricFamily(
            "fairlane_backend_reservations", "Reservations of KV that are open.", labels=labels
        )
        state = GaugeMetricFamily(
            "fairlane_backend_state", "1 for the state the backend is in.", labels=[*labels, "state"]
        )
        for b in now.backends:
            name = [b.pool, b.backend]
            breaker.add_metric(name, _BREAKER[b.breaker])
            openings.add_metric(name, b.openings)
            reservations.add_metric(name, b.reservations)
            for each in BACKEND_STATES:
                state.add_metric([*name, each], float(each == b.state))
            up.add_metric(name, float(b.is_up))
            running.add_metric(name, b.running)
            reserved.add_metric(name, b.reserved_tokens)
            kv.add_metric(name, b.kv_tokens)
            if b.queue_size is not None:
                own.add_metric(name, b.queue_size)
        yield from (up, running, reserved, kv, own, breaker, openings, reservations, state)
        yield GaugeMetricFamily("fairlane_ledger_pending_events", "Usage events not acknowledged.", now.spool_events)
        yield GaugeMetricFamily("fairlane_ledger_pending_bytes", "Bytes of the usage spool.", now.spool_bytes)
        yield GaugeMetricFamily(
            "fairlane_ledger_overflow_events", "Ended requests the disk has not taken.", now.ledger_overflow_events
        )
        yield GaugeMetricFamily(
            "fairlane_ledger_damaged_bytes", "Spool bytes that could not be read.", now.ledger_damaged_bytes
        )
        yield GaugeMetricFamily(
            "fairlane_ledger_set_aside_events",
            "Usage events the control plane would not take.",
            now.ledger_set_aside_events,
        )
        if now.ledger_lag_s is not None:
            yield GaugeMetricFamily(
                "fairlane_ledger_lag_seconds", "Age of the oldest usage event not acknowledged.", now.ledger_lag_s
            )
        yield from _limit_metrics(now)
        yield GaugeMetricFamily("fairlane_applied_revision", "Configuration in force.", now.applied_revision)
        yield GaugeMetricFamily(
            "fairlane_keys_without_pepper", "Keys refused for lack of their pepper.", now.keys_without_pepper
        )
        yield GaugeMetricFamily("fairlane_draining", "1 while the router ends its streams.", float(now.is_draining))
        if self._has_tenants:
            yield from _tenant_metrics(now.tenants)


def _limit_metrics(now: Readings) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "fairlane_limit_reservations", "Requests that count against limits and have not ended.", now.reservations
    )
    yield GaugeMetricFamily("fairlane_limit_reserved_tokens", "Tokens reserved for them.", now.reserved_tokens)
    if now.is_minute_store_up is not None:
        yield GaugeMetricFamily(
            "fairlane_limit_store_up",
            "1 while limits per minute are counted over all routers, 0: each by its share.",
            float(now.is_minute_store_up),
        )
    if now.totals_age_s is not None:
        yield GaugeMetricFamily(
            "fairlane_limit_totals_age_seconds", "Since it was learnt what is used of quotas.", now.totals_age_s
        )


def _pool_metrics(readings: list[PoolReading]) -> Iterable[Metric]:
    labels = ["model"]
    inflight = GaugeMetricFamily("fairlane_inflight_requests", "Running requests.", labels=labels)
    paused = GaugeMetricFamily("fairlane_paused_clients", "Clients that do not read at present.", labels=labels)
    parked = GaugeMetricFamily(
        "fairlane_parked_requests", "Waiting requests that only a backend not in use could hold.", labels=labels
    )
    bound = GaugeMetricFamily(
        "fairlane_fairness_bound_service", "Largest gap the policy allows, in units of the cost model.", labels=labels
    )
    gap = GaugeMetricFamily(
        "fairlane_fairness_largest_gap_service", "Largest gap seen, in units of the cost model.", labels=labels
    )
    bound_s = GaugeMetricFamily(
        "fairlane_fairness_bound_gpu_seconds",
        "Largest gap the policy allows, in seconds of a busy backend; absent before its rate was measured.",
        labels=labels,
    )
    gap_s = GaugeMetricFamily(
        "fairlane_fairness_largest_gap_gpu_seconds",
        "Largest gap seen, in seconds of a busy backend; absent before its rate was measured.",
        labels=labels,
    )
    preempted = CounterMetricFamily(
        "fairlane_preemptions", "Streams told to stop so that their KV comes free.", labels=["model", "trigger"]
    )
    queued_bytes = GaugeMetricFamily(
        "fairlane_queue_bytes", "Memory that the bodies of waiting requests take.", labels=labels
    )
    waste = GaugeMetricFamily(
        "fairlane_waste_budget_tokens", "Tokens that may be computed again for preemptions.", labels=labels
    )
    predictions = CounterMetricFamily(
        "fairlane_predictions", "Answers, by whose prediction of their length was used.", labels=["model", "source"]
    )
    fallbacks = CounterMetricFamily(
        "fairlane_prediction_fallbacks",
        "Answers of models with a length model that had to do without it, by reason.",
        labels=["model", "reason"],
    )
    refused = GaugeMetricFamily(
        "fairlane_prediction_model_refused",
        "1 while the length model that is configured cannot be used; the one before answers, or none.",
        labels=labels,
    )
    level = GaugeMetricFamily(
        "fairlane_slice_level_ratio",
        "Quantile of what is left of a predicted answer that is asked of a backend at once, mean of the last slices.",
        labels=labels,
    )
    strikes = CounterMetricFamily(
        "fairlane_hazard_strikes",
        "Requests that showed nothing when their backend died, froze or failed a batch, by kind.",
        labels=["model", "kind"],
    )
    retries = CounterMetricFamily(
        "fairlane_retries", "Requests sent again that had shown nothing, a suspect's trial included.", labels=labels
    )
    retries_refused = CounterMetricFamily(
        "fairlane_retries_refused",
        "Requests that ended with their error because the retry budget was spent.",
        labels=labels,
    )
    retries_left = GaugeMetricFamily(
        "fairlane_retry_budget_requests", "Retries that the budget would grant now.", labels=labels
    )
    for r in readings:
        name = [r.pool]
        queued_bytes.add_metric(name, r.queued_bytes)
        retries.add_metric(name, r.retries)
        retries_refused.add_metric(name, r.retries_refused)
        retries_left.add_metric(name, r.retries_left)
        for kind, count in r.strikes.items():
            strikes.add_metric([r.pool, kind], count)
        for source, count in r.predictions.items():
            predictions.add_metric([r.pool, source], count)
        for reason, count in r.prediction_fallbacks.items():
            fallbacks.add_metric([r.pool, reason], count)
        refused.add_metric(name, r.is_length_model_refused)
        level.add_metric(name, r.slice_level)
        inflight.add_metric(name, r.running)
        paused.add_metric(name, r.paused_clients)
        parked.add_metric(name, r.parked)
        if r.bound_service is not None:
            bound.add_metric(name, r.bound_service)
        gap.add_metric(name, r.largest_gap_service)
        if r.bound_gpu_s is not None:
            bound_s.add_metric(name, r.bound_gpu_s)
        if r.largest_gap_gpu_s is not None:
            gap_s.add_metric(name, r.largest_gap_gpu_s)
        for trigger, count in r.preempted_total.items():
            preempted.add_metric([r.pool, trigger], count)
        waste.add_metric(name, r.waste_tokens)
    return (
        inflight,
        paused,
        parked,
        bound,
        gap,
        bound_s,
        gap_s,
        preempted,
        waste,
        predictions,
        fallbacks,
        refused,
        level,
        strikes,
        retries,
        retries_refused,
        retries_left,
        queued_bytes,
    )


def _tenant_metrics(readings: list[TenantReading]) -> Iterable[Metric]:
    labels = ["model", "tenant"]
    queued = GaugeMetricFamily("fairlane_tenant_queue_length", "Waiting requests.", labels=labels)
    running = GaugeMetricFamily("fairlane_tenant_inflight_requests", "Running requests.", labels=labels)
    prompt = CounterMetricFamily("fairlane_tenant_prompt_tokens", "Prompt tokens served.", labels=labels)
    output = CounterMetricFamily("fairlane_tenant_output_tokens", "Tokens handed to clients.", labels=labels)
    delivered = GaugeMetricFamily(
        "fairlane_tenant_delivered_share_ratio", "Part of all output tokens since start.", labels=labels
    )
    entitled = GaugeMetricFamily(
        "fairlane_tenant_entitled_share_ratio",
        "Part that weights give it among the tenants that have used the pool since start or want to.",
        labels=labels,
    )
    counter = GaugeMetricFamily(
        "fairlane_tenant_counter_service",
        "Service per weight above the least of those it competes with; negative: below.",
        labels=labels,
    )
    claims: dict[str, list[Claim]] = {}
    for r in readings:
        is_using = bool(r.output_tokens or r.queued or r.running)
        claim = Claim(r.tenant, r.weight, r.group, r.group_weight, r.output_tokens, is_using)
        claims.setdefault(r.pool, []).append(claim)
    parts = {pool: shares(each) for pool, each in claims.items()}
    named = sorted(readings, key=lambda r: -r.output_tokens)
    sums: dict[tuple[str, str], list[float]] = {}
    for position, r in enumerate(named):
        is_named = position < MAX_TENANTS
        if is_named:
            counter.add_metric([r.pool, r.tenant], r.counter)
        row = sums.setdefault((r.pool, r.tenant if is_named else OTHER), [0.0] * 6)
        part = parts[r.pool][r.tenant]
        for column, value in enumerate(
            (r.queued, r.running, r.prompt_tokens, r.output_tokens, part.delivered, part.entitled)
        ):
            row[column] += value
    for (pool, tenant), (n_queued, n_running, n_prompt, n_output, got, due) in sums.items():
        name = [pool, tenant]
        queued.add_metric(name, n_queued)
        running.add_metric(name, n_running)
        prompt.add_metric(name, n_prompt)
        output.add_metric(name, n_output)
        delivered.add_metric(name, got)
        entitled.add_metric(name, due)
    return queued, running, prompt, output, delivered, entitled, counter


class TierMetrics:
    """The per-request metrics of one model and tier, looked up once instead of at every request."""

    def __init__(self, metrics: Metrics, model: str, tier: str) -> None:
        self.model = model
        self._requests = metrics.requests
        self._bounded_code = metrics.bounded_code
        model, tier = metrics.bounded_model(model), metrics.bounded_tier(tier)
        self._labels = (model, tier)
        self._ended: dict[tuple[str, str], Counter] = {}
        self.queue_wait = metrics.queue_wait.labels(model, tier)
        self.ttft = metrics.ttft.labels(model, tier)
        self.tpot = metrics.tpot.labels(model, tier)
        self.duration = metrics.duration.labels(model, tier)
        self.overhead = metrics.overhead.labels(model, tier)
        self.predicted = metrics.predicted.labels(model, tier)
        self.prompt_tokens = metrics.prompt_tokens.labels(model, tier)
        self.output_tokens = metrics.output_tokens.labels(model, tier)

    def ended(self, outcome: str, code: str) -> None:
        """Count one ended request."""
        counter = self._ended.get((outcome, code))
        if counter is None:
            counter = self._ended[outcome, code] = self._requests.labels(
                *self._labels, outcome, self._bounded_code(code)
            )
        counter.inc()


class Metrics:
    """Counters and histograms written by the gateway, and the two pages made of them."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self.public = CollectorRegistry()
        self.admin = CollectorRegistry()
        self.bounded_model, self.bounded_tier, self.bounded_code = Bounded(), Bounded(), Bounded()
        by = ["model", "tier"]
        self.requests = Counter("fairlane_requests", "Ended requests.", [*by, "outcome", "code"], registry=None)
        self.guard_verdicts = Counter(
            "fairlane_guard_verdicts",
            "Requests with a grammar, by what the guard said: proven, or the code of the refusal.",
            ["model", "verdict"],
            registry=None,
        )
        self.rejected = Counter(
            "fairlane_rejected",
            "Refused requests, by reason; model and tier are empty where they were not known yet.",
            [*by, "code"],
            registry=None,
        )
        self.displaced = Counter(
            "fairlane_displaced_requests",
            "Waiting requests that gave their place to one of a higher tier because the queue was full.",
            ["model", "tier"],
            registry=None,
        )
        self.stalled_clients = Counter(
            "fairlane_stalled_clients", "Clients that were cut because they did not read.", ["model"], registry=None
        )
        self.queue_wait = Histogram(
            "fairlane_queue_wait_seconds", "Arrival to first dispatch.", by, buckets=SECONDS, registry=None
        )
        self.ttft = Histogram(
            "fairlane_time_to_first_token_seconds",
            "Arrival to first token handed to the client.",
            by,
            buckets=SECONDS,
            registry=None,
        )
        self.tpot = Histogram(
            "fairlane_time_per_output_token_seconds",
            "(last token - first token) / (tokens - 1).",
            by,
            buckets=PER_TOKEN_SECONDS,
            registry=None,
        )
        self.duration = Histogram(
            "fairlane_request_duration_seconds", "Arrival to end.", by, buckets=SECONDS, registry=None
        )
        self.overhead = Histogram(
            "fairlane_overhead_seconds",
            "Time to first token less waiting for a turn and for the backend.",
            by,
            buckets=SECONDS,
            registry=None,
        )
        self.prompt_tokens = Counter("fairlane_prompt_tokens", "Prompt tokens served.", by, registry=None)
        self.output_tokens = Counter("fairlane_output_tokens", "Tokens handed to clients.", by, registry=None)
        self.predicted = Histogram(
            "fairlane_predicted_to_actual_ratio",
            "Predicted by actual output tokens of completed requests.",
            by,
            buckets=RATIO,
            registry=None,
        )
        self.recomputed = Counter(
            "fairlane_recomputed_tokens",
            "Tokens generated and dropped, or processed again after a preemption.",
            ["model"],
            registry=None,
        )
        self.resumed_prefill = Counter(
            "fairlane_resumed_prefill_tokens", "Prompt tokens of continuations.", ["model"], registry=None
        )
        self.retries = Counter(
            "fairlane_upstream_failures", "Broken upstream streams.", ["backend", "kind"], registry=None
        )
        self.prediction_seconds = Histogram(
            "fairlane_prediction_seconds",
            "Question to the worker to its answer.",
            buckets=PREDICTION_SECONDS,
            registry=None,
        )
        self.prediction_batch = Histogram(
            "fairlane_prediction_batch_size", "Questions the worker answered at once.", buckets=BATCH, registry=None
        )
        self.prediction_restarts = Counter(
            "fairlane_prediction_worker_ends", "Ends of the prediction worker that nobody asked for.", registry=None
        )
        self.prediction_intervals = Counter(
            "fairlane_prediction_intervals",
            "Complete answers inside and outside the predicted interval of 80 or 90 percent.",
            ["model", "interval", "inside"],
            registry=None,
        )
        self.resumes = Counter(
            "fairlane_resumes", "Answers that went on in another slice, by class.", ["model", "class"], registry=None
        )
        self.unresumable = Counter(
            "fairlane_unresumable_requests",
            "Requests that are served in one piece because they cannot be resumed, by reason.",
            ["model", "reason"],
            registry=None,
        )
        for registry, has_tenants in ((self.public, False), (self.admin, True)):
            for collector in (
                self.requests,
                self.guard_verdicts,
                self.rejected,
                self.displaced,
                self.stalled_clients,
                self.queue_wait,
                self.ttft,
                self.tpot,
                self.duration,
                self.overhead,
                self.prompt_tokens,
                self.output_tokens,
                self.predicted,
                self.recomputed,
                self.resumed_prefill,
                self.retries,
                self.resumes,
                self.unresumable,
                self.prediction_seconds,
                self.prediction_batch,
                self.prediction_restarts,
                self.prediction_intervals,
            ):
                registry.register(collector)
            registry.register(_Snapshotted(read, has_tenants=has_tenants))

    def count_refusal(self, code: str, *, model: str = "", tier: str = "") -> None:
        """One request was refused; what is not known of it stays empty."""
        names = self.bounded_model(model), self.bounded_tier(tier), self.bounded_code(code)
        self.rejected.labels(*names).inc()

    def displaced_one(self, model: str, tier: str) -> None:
        """Count a request that was displaced from a full queue."""
        self.displaced.labels(self.bounded_model(model), self.bounded_tier(tier)).inc()

    def for_tier(self, model: str, tier: str) -> TierMetrics:
        """The metrics of one model and tier, to be kept."""
        return TierMetrics(self, model, tier)

    def page(self, *, is_admin: bool = False) -> bytes:
        """The text format of one registry."""
        return generate_latest(self.admin if is_admin else self.public)
