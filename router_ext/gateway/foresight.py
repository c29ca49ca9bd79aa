"""How long an answer will probably be: asked of the prediction worker early, awaited for some milliseconds, else the
empirical quantiles.

    body decoded --ask--> worker          tokens are counted meanwhile
    measured     <--answer--              model, or memory of prompts that were answered before
                 late, down, absurd  -->  quantiles of the key, the tenant, the pool (``predict.baseline``), or nothing
    ended        --tell--> worker         what the length proved to be

Whatever comes from the worker is checked here: finite, rising, within what a model can write. Nothing else of it
reaches the scheduler, whose safety and fairness rest on no prediction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from router_ext.gateway.auth import Identity
from router_ext.gateway.generation import GenerationRequest
from router_ext.obs.logs import get_logger
from router_ext.obs.metrics import Metrics
from router_ext.predict.baseline import Quantiles, is_complete
from router_ext.predict.client import PredictionClient, worker_command
from router_ext.predict.messages import Answer, Ask, Assigned, Ended, plausible
from router_ext.predict.prompts import bounded
from router_ext.settings import RouterSettings
from router_ext.wire.controlplane import PredictionRecord

if TYPE_CHECKING:
    from router_ext.gateway.call import Call
    from router_ext.gateway.engine import PoolEngine

_log = get_logger(__name__)

LATE, DOWN, ABSURD = "late", "down", "absurd"


@dataclass(slots=True, kw_only=True)
class PoolForesight:
    """What a pool predicts with.

    Attributes:
        wanted: digest of the model its configuration names. digest: of the one that answers.
        refused: why they differ, None while there is nothing to say.
        by_source, fallbacks: requests queued so far, as in ``wire.controlplane.PoolState``.
    """

    wanted: str | None = None
    digest: str | None = None
    refused: str | None = None
    by_source: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Foreseen:
    """What is known of one answer's length.

    Attributes:
        quantiles: the distribution from a model or the memory; None: ``fallback`` holds.
        reason: why a pool with a model uses its fallback. model: digest of the one that was asked.
    """

    fallback: Quantiles
    quantiles: tuple[int, ...] | None = None
    source: str = "default"
    reason: str | None = None
    model: str | None = None
    runaway: float | None = None

    @property
    def distribution(self) -> tuple[int, ...] | None:
        """What the scheduler is told; None if nothing is known."""
        if self.quantiles is not None:
            return self.quantiles
        return None if self.fallback.source == "default" else self.fallback.values

    @property
    def median(self) -> int | None:
        """Tokens; None if nothing is known."""
        known = self.distribution
        return None if known is None else known[3]


class Foresight:
    """The questions of one request, one per prompt, and their answers.

    Attributes:
        answers: one per prompt, once they are ``settled``.
    """

    __slots__ = ("_asked", "_deadline", "_is_collected", "_pool", "answers", "questions")

    def __init__(
        self,
        pool: PoolForesight,
        questions: list[int],
        asked: list[asyncio.Future[Answer | None] | None],
        fallback: Quantiles,
        *,
        deadline: float,
        missing: str,
        is_collected: bool,
    ) -> None:
        self.questions = questions
        self.answers = [Foreseen(fallback, source=fallback.source, reason=missing) for _ in questions]
        self._pool = pool
        self._asked = asked
        self._deadline = deadline
        self._is_collected = is_collected

    async def settled(self) -> None:
        """Wait for the answers as long as the limit, counted from the questions, allows.

        Without a length model nothing is waited for: what the memory alone says of a prompt is used if it is there by
        the time the prompt has been measured, and is worth less than the wait.
        """
        pool = self._pool
        if pool.digest is not None:
            pending = [answer for answer in self._asked if answer is not None and not answer.done()]
            rest_s = self._deadline - asyncio.get_running_loop().time()
            if pending and rest_s > 0:
                await asyncio.wait(pending, timeout=rest_s)
        for foreseen, asked in zip(self.answers, self._asked, strict=True):
            if asked is not None:
                _take(foreseen, asked, pool.digest)
            if pool.digest is None:
                foreseen.reason = None

    def count(self) -> None:
        """The request was queued: what is refused needs no prediction, and is in no book."""
        pool = self._pool
        for foreseen in self.answers:
            if foreseen.reason is not None:
                pool.fallbacks[foreseen.reason] = pool.fallbacks.get(foreseen.reason, 0) + 1
            pool.by_source[foreseen.source] = pool.by_source.get(foreseen.source, 0) + 1

    def record(self, *, has_features: bool = True) -> PredictionRecord:
        """For the books: of a request with several prompts, whose lengths are booked as a sum, without features."""
        foreseen = self.answers[0]
        fallback = foreseen.fallback
        known = None if fallback.source == "default" else list(fallback.values)
        answer = self._answer() if has_features and self._is_collected and len(self.answers) == 1 else None
        return PredictionRecord(
            quantiles=known if foreseen.quantiles is None else list(foreseen.quantiles),
            source=foreseen.source,
            fallback=known,
            fallback_reason=foreseen.reason,
            runaway=foreseen.runaway,
            length_model=foreseen.model,
            features=None if answer is None else answer.features,
            feature_version=None if answer is None else answer.feature_version,
        )

    def _answer(self) -> Answer | None:
        """The worker's, even if it came too late to be used."""
        asked = self._asked[0]
        return asked.result() if asked is not None and asked.done() else None


def _take(foreseen: Foreseen, asked: asyncio.Future[Answer | None], model: str | None) -> None:
    """Use what the worker said, if it said it in time and it can be. ``model``: whose answer is due."""
    foreseen.model = model
    if not asked.done():
        foreseen.reason = LATE
        return
    answer = asked.result()
    if answer is None:
        foreseen.reason = DOWN
        return
    foreseen.model = answer.model
    if answer.quantiles is None:
        # A worker that was just started has not loaded the model yet.
        foreseen.reason = None if answer.model is not None or model is None else DOWN
        return
    foreseen.reason = None
    quantiles = plausible(answer.quantiles)
    if quantiles is None or not (answer.runaway is None or 0.0 <= answer.runaway <= 1.0):
        foreseen.reason = ABSURD
        return
    foreseen.quantiles, foreseen.source, foreseen.runaway = quantiles, answer.source, answer.runaway


class Predictions:
    """The router's prediction worker, and who asks it.

    Args:
        on_changed: a model was loaded or refused; to be reported soon.

    Attributes:
        client: None if the settings want none.
    """

    def __init__(
        self,
        settings: RouterSettings,
        metrics: Metrics,
        engines: dict[str, PoolEngine],
        *,
        on_changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._engines = engines
        self._on_changed = on_changed
        self._loop = asyncio.get_running_loop()
        self.client: PredictionClient | None = None
        if settings.predictor:
            limit_s = settings.prediction_limit_s
            command = worker_command(
                directory=settings.dir, log_level=settings.log_level, router=settings.id, limit_s=limit_s
            )
            self.client = PredictionClient(command, self, limit_s=limit_s)

    # --- requests ---------------------------------------------------------------------------------------------------

    def ask(self, engine: PoolEngine, identity: Identity, request: GenerationRequest) -> Foresight:
        """Ask how long the answers of a request will be, before anything else is known of it. Never fails."""
        fallback = engine.predictor.predict(identity.key, identity.tenant, engine.record.pool)
        client = self.client
        texts = request.prompts or (None,)
        is_up = client is not None and client.is_up
        questions: list[int] = []
        asked: list[asyncio.Future[Answer | None] | None] = []
        for text in texts:
            question = 0
            answer = None
            if client is not None and is_up:
                question = client.next_id()
                answer = client.ask(_question(question, engine, identity, request, text, fallback))
            questions.append(question)
            asked.append(answer)
        return Foresight(
            engine.foresight,
            questions,
            asked,
            fallback,
            deadline=self._loop.time() + self._settings.prediction_limit_s,
            # Up, but with more questions than it can answer in time: these were not asked.
            missing=LATE if is_up else DOWN,
            is_collected=self._settings.collect_features and request.num_sequences == 1,
        )

    def ended(self, call: Call, outcome: str, *, model: str) -> None:
        """A request is over: the worker learns from its length, the metrics tell how good the prediction was."""
        foresight = call.foresight
        tokens = call.output_tokens
        if tokens <= 0 or len(foresight.questions) != 1 or call.request.num_sequences != 1:
            return
        is_whole = is_complete(outcome, call.finish_reason)
        foreseen = foresight.answers[0]
        if is_whole and foreseen.quantiles is not None:
            for interval, first, last in (("80", 1, 5), ("90", 0, 6)):
                is_inside = foreseen.quantiles[first] <= tokens <= foreseen.quantiles[last]
                self._metrics.prediction_intervals.labels(model, interval, "yes" if is_inside else "no").inc()
        if self.client is not None and foresight.questions[0]:
            self.client.ended(Ended(foresight.questions[0], tokens, is_whole))

    # --- models -----------------------------------------------------------------------------------------------------

    def want(self, engine: PoolEngine, digest: str | None) -> None:
        """The configuration names another model for a pool, or none. Until it is loaded the one before answers."""
        foresight = engine.foresight
        if foresight.wanted == digest:
            return
        foresight.wanted, foresight.refused = digest, None
        if digest is None:
            foresight.digest = None
            if self.client is not None:
                self.client.assign(engine.record.pool, None)

    def load(self, engine: PoolEngine, digest: str, path: Path) -> None:
        """The wanted model's file is there."""
        if self.client is None:
            self.refuse(engine, "this router runs without a prediction worker (FAIRLANE_ROUTER_PREDICTOR is false)")
        elif engine.foresight.wanted == digest:
            self.client.assign(engine.record.pool, digest, str(path.absolute()))

    def refuse(self, engine: PoolEngine, reason: str) -> None:
        """The wanted model cannot be used; the one before answers on."""
        engine.foresight.refused = reason
        _log.error(
            "predictor.model_refused", pool=engine.name, digest=(engine.foresight.wanted or "")[:12], reason=reason
        )
        self._on_changed()

    def forget(self, pool: str) -> None:
        """A pool is gone."""
        if self.client is not None:
            self.client.assign(pool, None)

    # --- from the client ----------------------------------------------------------------------------------------------

    def answered(self, seconds: float) -> None:
        """A question was answered so long after it was asked."""
        self._metrics.prediction_seconds.observe(seconds)

    def batch_answered(self, count: int, seconds: float) -> None:
        """The worker has answered a batch, in so much of its own time."""
        self._metrics.prediction_batch.observe(count)

    def model_assigned(self, outcome: Assigned) -> None:
        """A model is in force in the worker, or was refused there."""
        engine = self._engines.get(outcome.pool)
        if engine is None or engine.foresight.wanted != outcome.digest:
            return
        digest = engine.foresight.digest = outcome.current
        if outcome.refused is not None:
            self.refuse(engine, outcome.refused)
            return
        engine.foresight.refused = None
        _log.info("predictor.model_in_force", pool=engine.name, digest=None if digest is None else digest[:12])
        self._on_changed()

    def worker_ended(self) -> None:
        """The worker is gone and will be started again."""
        self._metrics.prediction_restarts.inc()

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For an operator."""
        client = self.client
        worker = (
            {"state": "off"}
            if client is None
            else {
                "state": client.state,
                "pid": client.pid,
                "restarts": client.restarts,
                "outstanding": client.outstanding,
                "why_down": None if client.is_up else client.why_down,
            }
        )
        return {
            "worker": worker,
            "pools": {
                engine.name: {
                    "model": engine.foresight.digest,
                    "wanted": engine.foresight.wanted,
                    "refused": engine.foresight.refused,
                    "fallback": engine.predictor_digest,
                    "predictions": engine.foresight.by_source,
                    "fallbacks": engine.foresight.fallbacks,
                    "slice_level": engine.scheduler.stats(only_seen=True).slice_level,
                }
                for engine in self._engines.values()
            },
        }


def _question(
    question: int,
    engine: PoolEngine,
    identity: Identity,
    request: GenerationRequest,
    text: str | None,
    fallback: Quantiles,
) -> Ask:
    messages = () if request.chat_body is None else request.chat_body["messages"]
    parameters = request.parameters
    return Ask(
        id=question,
        pool=engine.record.pool,
        model=engine.name,
        tenant=identity.tenant,
        key=identity.key,
        prompt=bounded(text, messages),
        is_chat=request.chat_body is not None,
        max_new_tokens=request.max_new_tokens or 0,
        temperature=float(parameters.get("temperature") or (0.0 if request.is_greedy else 1.0)),
        top_p=float(parameters.get("top_p") or 1.0),
        is_greedy=request.is_greedy,
        has_stop=bool(request.stop),
        base=None if fallback.source == "default" else fallback.values,
        top_k=parameters.get("top_k"),
        typical_p=parameters.get("typical_p"),
        repetition_penalty=parameters.get("repetition_penalty"),
    )
