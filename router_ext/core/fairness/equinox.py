"""``equinox``: two counters per tenant, of what its users got and of what it made the machine do.

Rule: what runs is charged from predictions when it starts, and settled with measured values when its slice is over.

    user counter      U += (p + w * d) / (1 + delta * slowdown) / weight
    resource counter  R += (speed / usual speed) * utilisation / weight
    key               H  = alpha * U + beta * (exchange rate) * R             beta = 1 - alpha

``p``: unpaid prompt tokens; ``d``: output tokens, predicted within the slice; ``w``: ``equinox_w_output``.
``slowdown``: (waiting + service) / service, so that a tenant that had to wait for its answers is charged less and comes
sooner. ``speed``: tokens per second of this request, against that of the last ones; ``utilisation``: share of its
backend's KV in use. The exchange rate is the pool's total ``U`` over its total ``R``, so both counters weigh alike
whatever their units. The head of the backlogged tenant with the smallest ``H`` goes next; if it does not fit, nobody
goes. A tenant that becomes backlogged is lifted in both counters to the one in turn.

Output beyond the prediction is charged as it comes, and settlement leaves no trace of a prediction: what a tenant has
been charged for ended work depends on what was measured only.

Guarantee: with ``alpha`` 1 and ``delta`` 0 it is predicted VTC as published, at the prices 1 and ``w``, decision for
decision. Larger
latency never lowers a tenant's priority. Multiplying a counter of all by the same number changes nothing. No bound on
the difference of service: that of a mixture of two counters says little about either.

Cost: O(log n) amortised per decision. When the exchange rate has moved by a twentieth, all keys are taken anew in O(n);
it is a ratio of sums over thousands of requests, so that happens less and less often.

Failure mode: the resource counter favours those who use the machine badly: small, slow requests gain. Measure before
choosing it over ``vtc-predict``. Like that it knows no latency targets.

Source: Equinox (arXiv 2508.16646). Only its abstract is known to us: the two counters, their predicted quantities, a
tunable mixture. All formulas here are this product's own parametrisation, and so are the exchange rate in place of a
normalisation by the largest counter and the settlement; the paper's constants may differ. Its mixture of prediction
experts is the predictor's affair, its adaptive batching the servers'.
"""

from __future__ import annotations

from typing import Any, ClassVar

from router_ext.core.admission import Backend
from router_ext.core.fairness.base import Surroundings
from router_ext.core.fairness.vtc import Keyed
from router_ext.core.queues import Tenant
from router_ext.core.request import Request

_USUAL_KEEP = 0.98
"""The usual speed is that of about the last fifty slices."""

_TOTALS_KEEP = 0.9999
"""The exchange rate follows the last ten thousand requests or so."""

_DRIFT = 0.05
"""Keys are taken anew when the exchange rate is off by so much: less would cost more than it changes."""


class _Account:
    """Both counters of a tenant."""

    __slots__ = ("resource", "user")

    def __init__(self) -> None:
        self.user = self.resource = 0.0


class _Run:
    """What a running slice was charged."""

    __slots__ = ("discount", "paid_out", "prompt", "resource", "tokens", "used", "user")

    def __init__(self, prompt: int, paid_out: int) -> None:
        self.prompt = prompt
        self.paid_out = paid_out
        self.tokens = 0
        self.discount = 1.0
        self.used = self.user = self.resource = 0.0


class Equinox(Keyed):
    """See the module. ``Tenant.account``: both counters."""

    is_bounded: ClassVar[bool] = False

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        config = around.config
        self.charge = self._charge
        self._alpha = config.equinox_alpha
        self._delta = config.equinox_delta
        self._w_output = config.equinox_w_output
        self._runs: dict[Request, _Run] = {}
        self._usual_speed = 0.0
        self._total_user = self._total_resource = 0.0
        self._beta = 0.0
        """``beta`` times the exchange rate that the keys are made with."""

    # --- the order -------------------------------------------------------------------------------------------------

    def ahead(self, request: Request, now: float) -> tuple[float, float] | None:
        """Shares follow two counters; nothing is certain."""
        return None

    def key(self, tenant: Tenant) -> float:
        """``H``."""
        account: _Account = tenant.account
        return self._alpha * account.user + self._beta * account.resource

    def inherit(self, before: Any) -> None:
        """Go on with what is known of the machine and of what runs."""
        self._runs = before._runs
        self._usual_speed = before._usual_speed
        self._total_user, self._total_resource = before._total_user, before._total_resource
        self._exchange()

    def adopt(self, tenant: Tenant) -> None:
        """Enter a tenant that waits already. After another policy all start even."""
        if tenant.account is None:
            tenant.account = _Account()
        super().adopt(tenant)

    def backlogged(self, tenant: Tenant) -> None:
        """Lift both counters, and enter the order of keys."""
        account: _Account | None = tenant.account
        if account is None:
            account = tenant.account = _Account()
        first = self._keys.top() or self._counters.last_left
        if first is not None and first.account is not None:
            account.user = max(account.user, first.account.user)
            account.resource = max(account.resource, first.account.resource)
        super().backlogged(tenant)

    # --- charges ---------------------------------------------------------------------------------------------------

    def started(self, request: Request, now: float) -> None:
        """Charge what it is predicted to take."""
        run = _Run(request.paid_in if request.segment == 1 else 0, request.paid_out)
        self._runs[request] = run
        until = min(request.predicted_output_tokens, request.output_tokens + request.slice_tokens)
        run.tokens = max(0, until - request.paid_out)
        assert request.backend is not None
        run.used = _used(request.backend)
        service_s = request.release_at_s - now
        run.discount = self._discount(now - request.arrival_s, service_s)
        self._settle(request, run, run.tokens, service_s, run.used)

    def stopped(self, request: Request, now: float) -> None:
        """Replace the prediction by what was measured."""
        run = self._runs.pop(request, None)
        if run is None:
            return
        if run.prompt:
            run.prompt = request.paid_in
        service_s = now - request.dispatched_s
        speed = (run.prompt + request.slice_output) / service_s if service_s > 0.0 else 0.0
        run.discount = self._discount(request.dispatched_s - request.arrival_s, service_s)
        assert request.last_backend is not None
        used = (run.used + _used(request.last_backend)) / 2.0
        self._settle(request, run, max(0, request.paid_out - run.paid_out), service_s, used)
        if speed > 0.0:
            usual = self._usual_speed
            self._usual_speed = _USUAL_KEEP * usual + (1.0 - _USUAL_KEEP) * speed if usual else speed
        self._total_user = _TOTALS_KEEP * self._total_user + run.user
        self._total_resource = _TOTALS_KEEP * self._total_resource + run.resource
        self._exchange()

    def _discount(self, waited_s: float, service_s: float) -> float:
        """What a slow answer's tokens are divided by."""
        if not self._delta or service_s <= 0.0:
            return 1.0
        return 1.0 + self._delta * (waited_s + service_s) / service_s

    def _settle(self, request: Request, run: _Run, tokens: int, service_s: float, used: float) -> None:
        """Make the charge of a slice that of so many tokens, in such a time, at such a utilisation."""
        tenant = request.tenant
        user = (run.prompt + self._w_output * tokens) / run.discount
        speed = (run.prompt + tokens) / service_s if service_s > 0.0 else 0.0
        resource = used * (speed / self._usual_speed if self._usual_speed else 1.0)
        account: _Account = tenant.account
        account.user += (user - run.user) / tenant.weight
        account.resource += (resource - run.resource) / tenant.weight
        run.user, run.resource = user, resource
        if tenant.since:
            self._keys.lowered(tenant)

    def _charge(self, request: Request, service: float) -> None:
        """Keep the service counters, and charge output beyond the prediction."""
        self._counters.charge(request, service)
        run = self._runs.get(request)
        if run is None:
            return
        beyond = request.paid_out - run.paid_out - run.tokens
        if beyond > 0:
            run.tokens += beyond
            more = self._w_output * beyond / run.discount
            run.user += more
            request.tenant.account.user += more / request.tenant.weight

    def _exchange(self) -> None:
        """Take the exchange rate anew, if it has moved."""
        if self._alpha == 1.0 or self._total_resource <= 0.0:
            return
        beta = (1.0 - self._alpha) * self._total_user / self._total_resource
        if abs(beta - self._beta) > _DRIFT * self._beta:
            self._beta = beta
            self._keys.rebuild()


def _used(backend: Backend) -> float:
    """Share of a backend's KV that somebody holds."""
    ledger = backend.ledger
    return ledger.reserved_blocks / ledger.usable_blocks if ledger.usable_blocks > 0 else 1.0
