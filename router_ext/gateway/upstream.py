"""What every request of the scheduler does with its backend, whatever its answer looks like.

    QUEUED --dispatch--> RUNNING --slice end, broken stream, preempt--> CUTTING --report--> QUEUED
                            '--complete, refused for good--> ENDED           (client gone, error: ENDED from anywhere)

The report is ``SliceEnded``, ``Failed`` (to be tried again) or ``Preempted``.

``slices.TextGeneration`` runs slice after slice, ``relay.WholeGeneration`` goes in one piece (it has no CUTTING). Both
say what to send, read the answer, and know whether they can go on after a failure; the rest is here.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from router_ext.backends.base import BackendRefused, Headers, StreamHandle
from router_ext.core.actions import Dispatch
from router_ext.core.events import Failed, RequestSpec
from router_ext.errors import FairlaneError, UpstreamFailed
from router_ext.gateway.call import Call
from router_ext.gateway.refusals import refusal_of
from router_ext.gateway.suspects import BackendFrozen, Offender, hazard_of
from router_ext.obs.logs import get_logger
from router_ext.wire.tgi import ErrorKind, UpstreamError

if TYPE_CHECKING:
    from router_ext.gateway.engine import PoolEngine
    from router_ext.gateway.model import Member

MAX_ERROR_BYTES = 65_536
"""How much of a backend's error answer is read."""

_log = get_logger(__name__)


class Step(enum.Enum):
    """Where a generation stands; see the module's diagram."""

    QUEUED = "queued"
    RUNNING = "running"
    CUTTING = "cutting"
    ENDED = "ended"


class Opening(msgspec.Struct, frozen=True):
    """What a dispatch sends: ``body`` to ``path``.

    ``resumed_prompt_tokens``: 0 for the first slice. ``is_after_preemption``: they are sent again because of one.
    """

    path: str
    body: bytes
    kv_tokens: int
    resumed_prompt_tokens: int = 0
    is_after_preemption: bool = False


class UpstreamGeneration:
    """Implements ``Generation`` and receives its backend's answer. A defect in reading it ends this request alone.

    Attributes:
        started_s: instant of the last dispatch. heard_s: of the last bytes since then, 0 before the first.
    """

    __slots__ = (
        "_engine",
        "_failures",
        "_handle",
        "_is_retry",
        "_kv_tokens",
        "_strikes",
        "call",
        "heard_s",
        "member",
        "request_id",
        "spec",
        "started_s",
        "step",
    )

    def __init__(self, engine: PoolEngine, call: Call, *, spec: RequestSpec) -> None:
        self._engine = engine
        self.call = call
        self.spec = spec
        self.request_id = spec.request_id
        self.step = Step.QUEUED
        self.member: Member | None = None
        self._handle: StreamHandle | None = None
        self._failures = 0
        self._is_retry = False
        self._strikes = 1 if spec.is_suspect else 0
        self._kv_tokens = 0
        self.started_s = 0.0
        self.heard_s = 0.0

    # --- what differs -----------------------------------------------------------------------------------------------

    @property
    def next_prompt_tokens(self) -> int:
        """Input length of what would be sent next."""
        raise NotImplementedError

    @property
    def is_upstream_over(self) -> bool:
        """The backend has said everything: its connection may end by itself."""
        return False

    @property
    def has_spoken(self) -> bool:
        """The backend has shown a token since the last dispatch."""
        raise NotImplementedError

    def digest(self) -> str:
        """Hex digest of what is sent upstream, the same for every request that asks for the same."""
        raise NotImplementedError

    def _open(self, action: Dispatch) -> Opening:
        """What to send; called once per dispatch."""
        raise NotImplementedError

    def _on_head(self, status: int, headers: Headers) -> None:
        raise NotImplementedError

    def _on_data(self, data: bytes) -> None:
        raise NotImplementedError

    def _on_end(self, error: UpstreamFailed | None) -> None:
        raise NotImplementedError

    def _go_on(self, error: FairlaneError) -> bool:
        """Queue again after ``error``; False if that is impossible."""
        raise NotImplementedError

    # --- from the engine --------------------------------------------------------------------------------------------

    def dispatch(self, action: Dispatch, member: Member) -> None:
        """Send the next piece of work."""
        if self._strikes and self.has_spoken:
            # It was tried, and its backend lives.
            self._strikes = 0
        opening = self._open(action)
        self.member = member
        self.step = Step.RUNNING
        self.started_s = self._engine.loop.time()
        self.heard_s = 0.0
        if self._is_retry:
            self._is_retry = False
        else:
            self._engine.retries.dispatched(self.started_s)
        self._kv_tokens = opening.kv_tokens
        self.call.dispatched(
            member.backend,
            resumed_prompt_tokens=opening.resumed_prompt_tokens,
            is_after_preemption=opening.is_after_preemption,
            reason=action.reason,
        )
        trace = self.call.trace
        headers = b"" if trace is None else trace.upstream_headers
        self._handle = member.client.open_stream(opening.path, opening.body, self, headers)
        if self.call.client.is_paused:
            self._handle.pause_reading()

    def preempt(self) -> None:
        """Give the backend back in this turn, if the answer can go on later; otherwise it runs to its end.

        Nothing to do either when its end, or a failure, has come first: what becomes of it is being reported.
        """

    def move(self) -> None:
        """Go on with another backend, if the answer can; otherwise it runs to its end here."""

    def cancel(self) -> None:
        step, self.step = self.step, Step.ENDED
        self._close()
        if step is not Step.ENDED:
            self._engine.cancelled(self)

    def expired(self, error: FairlaneError) -> None:
        """The scheduler gave the request up; it knows of its end already."""
        self.step = Step.ENDED
        self.call.fail(error, outcome="expired")

    def refused(self, error: FairlaneError) -> None:
        """The scheduler never queued it."""
        self.step = Step.ENDED
        self.call.refuse(error)

    def undispatched(self) -> None:
        """The backend chosen is gone from the configuration: queue again, nothing was sent."""
        self._report_failed()

    def pause(self) -> None:
        if self._handle is not None:
            self._handle.pause_reading()

    def resume(self) -> None:
        if self._handle is not None:
            self._handle.resume_reading()

    # --- from the backend -------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: Headers) -> None:
        try:
            self._on_head(status, headers)
        except Exception:  # contained to its request
            self._met_defect()

    def on_data(self, data: bytes) -> None:
        self.heard_s = self._engine.loop.time()
        try:
            self._on_data(data)
        except Exception:
            self._met_defect()

    def on_end(self, error: UpstreamFailed | None) -> None:
        self._handle = None
        if self.step is not Step.RUNNING:
            return
        try:
            self._on_end(error)
        except Exception:
            self._met_defect()

    def _met_defect(self) -> None:
        _log.exception("answer.failed", pool=self._engine.name, request=self.call.request_id)
        self._engine.abandon(self, FairlaneError("The router failed to serve this request."))

    # --- ends -------------------------------------------------------------------------------------------------------

    def _refused_upstream(self, error: UpstreamError) -> None:
        """The backend answered with an error: its verdict on the request itself is final, anything else is not."""
        self._broken(refusal_of(error), is_final=error.kind is ErrorKind.VALIDATION)

    def _broken(self, error: FairlaneError, *, is_final: bool = False) -> None:
        """The stream broke: go on elsewhere if that is possible and allowed, else end with the error."""
        engine, member = self._engine, self.member
        assert member is not None
        self._close()
        if not is_final:
            engine.upstream_failed(member, error, self.call)
            verdict = self._judged(error)
            if verdict is not None:
                error, is_final = verdict, True
        limit = engine.settings.retry_limit
        if limit and isinstance(error, BackendRefused):
            # Nothing came of it for anybody, and where it was is left alone now: all of them may fall in a row.
            limit += len(engine.backends.members)
        if is_final or not limit or self._failures > limit or not self._may_retry(error) or not self._go_on(error):
            self.end_with(error)
        else:
            self.call.attempts += 1

    def _may_retry(self, error: FairlaneError) -> bool:
        """The pool's budget allows another dispatch, if that counts as a retry (``gateway.retries``)."""
        if self.has_spoken or isinstance(error, BackendRefused):
            return True
        engine = self._engine
        self._is_retry = engine.retries.take(engine.loop.time())
        return self._is_retry

    def _judged(self, error: FairlaneError) -> FairlaneError | None:
        """Count the failure against whoever may have caused it; what to end with, if it is not to be tried again."""
        if self.has_spoken:
            # Innocent, and it has come further: only failures in a row without a token count.
            self._failures = 0
            return None
        kind = hazard_of(error)
        if kind is None:
            self._failures += 1
            return None
        self._strikes += 1
        assert self.member is not None
        call = self.call
        offender = Offender(call.identity, call.request_id, self.member.backend, self.digest())
        return self._engine.suspects.strike(offender, kind, self._strikes)

    def frozen(self, error: BackendFrozen | BackendRefused) -> None:
        """Its backend has said nothing for too long (``BackendRefused``: already when this was sent)."""
        if self.step is Step.RUNNING:
            self._broken(error)

    def _report_failed(self, *, dropped_tokens: int = 0) -> None:
        """Wait for another dispatch after a failure."""
        self.step = Step.QUEUED
        self._engine.report(
            self,
            Failed(
                request_id=self.request_id,
                is_retryable=True,
                dropped_tokens=dropped_tokens,
                next_prompt_tokens=self.next_prompt_tokens,
                is_suspect=self._strikes > 0 and not self.has_spoken,
            ),
        )

    def end_with(self, error: FairlaneError) -> None:
        """Give up: the scheduler forgets the request, the client gets the error."""
        self._close()
        if self.step is not Step.ENDED:
            self.step = Step.ENDED
            self._engine.report(self, Failed(request_id=self.request_id, is_retryable=False))
            self._engine.forget(self)
        self.call.fail(error)

    def give_up(self, error: FairlaneError) -> None:
        """End its call from outside, after a defect or at a word of the scheduler's process."""
        self._engine.end_call(self.call, error)

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            if self.is_upstream_over:
                handle.release()
            else:
                handle.abort()
        if self._kv_tokens:
            self.call.held(self._kv_tokens, self._engine.loop.time() - self.started_s)
            self._kv_tokens = 0
