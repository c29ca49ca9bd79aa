"""What the prediction worker knows and answers with: models by pool, histories, and a memory of prompts.

    question --features--> model of its pool, or without one the empirical quantiles it brought
             --signatures--> memory   (+) history --> correction --> quantiles
    end      --> residual of the uncorrected prediction: what history leaves of it to the memory, and vice versa

Histories are kept by pool and model: a residual says something about the predictor it was left by. The memory is
common to all pools: what one model writes much about, others do.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from router_ext.obs.logs import get_logger
from router_ext.predict.baseline import MAX_TOKENS
from router_ext.predict.features import Features, RequestFacts, Signatures, Signer, extract
from router_ext.predict.history import History
from router_ext.predict.memory import NOTHING, Memory, Recall
from router_ext.predict.messages import Answer, Ask, Ended
from router_ext.predict.predictor import Predictor, Request, in_tokens
from router_ext.predict.versions import FEATURE_VERSION

_log = get_logger(__name__)

MAX_PENDING = 16_384
"""Questions whose answers are not over; of more, the oldest teach nothing."""
_KEY_BYTES = 32


class _Pending(NamedTuple):
    """``log_median``: the uncorrected prediction; None: there was none. Then what either side corrected."""

    pool: str
    tenant: str
    key: str
    signatures: Signatures
    log_median: float | None
    by_history: float
    by_memory: float


class _Look(NamedTuple):
    question: Ask
    features: Features
    signatures: Signatures
    recall: Recall
    by_history: float


class _State(msgspec.Struct):
    key: bytes
    history: bytes
    memory: bytes


class LengthService:
    """See the module.

    Args:
        clock: wall seconds; what was learned outlives the process.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._signer = Signer(self._key)
        self._history, self._memory = History(), Memory()
        self._models: dict[str, tuple[str, Predictor]] = {}
        self._pending: OrderedDict[int, _Pending] = OrderedDict()

    @property
    def known(self) -> int:
        """Prompts and histories remembered."""
        return len(self._memory) + len(self._history)

    def warm_up(self) -> None:
        """Fill what a first question would wait for."""
        extract("warm up", RequestFacts())

    def load(self, data: bytes) -> Predictor:
        """A model from its artifact.

        Raises:
            ArtifactRefused: this router cannot serve it.
        """
        return Predictor.load(data)

    def assign(self, pool: str, digest: str | None, model: Predictor | None) -> None:
        """Answer for a pool by this model from now on; None: by none."""
        if digest is None or model is None:
            self._models.pop(pool, None)
        else:
            self._models[pool] = (digest, model)

    def answer(self, questions: Sequence[Ask]) -> tuple[list[Answer], list[int]]:
        """Answers to a batch, and the ids of questions that tripped a defect."""
        now_s = self._clock()
        looks: list[_Look] = []
        refused: list[int] = []
        for question in questions:
            try:
                looks.append(self._look(question, now_s))
            except Exception:  # whatever a prompt may trip: the others of the batch are not to pay for it
                _log.exception("predictor.question_failed")
                refused.append(question.id)
        answers: list[Answer] = []
        by_pool: dict[str, list[_Look]] = {}
        for look in looks:
            by_pool.setdefault(look.question.pool, []).append(look)
        for pool, of in by_pool.items():
            digest, model = self._models.get(pool, (None, None))
            answers += self._by_base(of) if digest is None or model is None else self._by_model(of, digest, model)
        return answers, refused

    def _look(self, question: Ask, now_s: float) -> _Look:
        facts = RequestFacts(
            max_new_tokens=question.max_new_tokens or None,
            temperature=question.temperature,
            top_p=question.top_p,
            is_greedy=question.is_greedy,
            has_stop=question.has_stop,
            is_chat=question.is_chat,
        )
        signatures = self._signer.sign(question.prompt)
        by_history = self._history.correction(self._place(question.pool), question.tenant, question.key, now_s)
        return _Look(
            question,
            extract(question.prompt, facts),
            signatures,
            self._memory.recall(signatures, now_s),
            by_history,
        )

    def _place(self, pool: str) -> str:
        """Name of a pool in the histories."""
        return f"{pool}\x00{self._models[pool][0]}" if pool in self._models else pool

    def _by_model(self, looks: Sequence[_Look], digest: str, model: Predictor) -> list[Answer]:
        predictions = model.predict_batch(
            [
                Request(
                    features=look.features,
                    model=look.question.model,
                    max_new_tokens=look.question.max_new_tokens,
                    correction=look.recall.correction + look.by_history,
                    n_answers=look.recall.n_exact,
                )
                for look in looks
            ]
        )
        answers = []
        for look, prediction in zip(looks, predictions, strict=True):
            self._await_end(look, prediction.log_median)
            source = "model" if look.recall == NOTHING else "memory"
            answers.append(_answer(look, prediction.quantiles, source, prediction.runaway, digest))
        return answers

    def _by_base(self, looks: Sequence[_Look]) -> list[Answer]:
        """Empirical quantiles, corrected where the prompt is known: the histories are in them already."""
        answers = []
        for look in looks:
            base = look.question.base
            self._await_end(look._replace(by_history=0.0), None if base is None else math.log1p(base[len(base) // 2]))
            if base is None or look.recall == NOTHING:
                answers.append(_answer(look, None, "", None, None))
                continue
            limit = float(look.question.max_new_tokens or MAX_TOKENS)
            tokens = in_tokens(
                np.log1p(np.array([base], np.float32)),
                np.array([look.recall.correction], np.float32),
                np.ones(1, np.float32),
                np.array([limit]),
            )
            answers.append(_answer(look, tuple(tokens[0].tolist()), "memory", None, None))
        return answers

    def _await_end(self, look: _Look, log_median: float | None) -> None:
        question = look.question
        self._pending[question.id] = _Pending(
            self._place(question.pool),
            question.tenant,
            question.key,
            look.signatures,
            log_median,
            look.by_history,
            look.recall.correction,
        )
        if len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)

    def ended(self, news: Ended) -> None:
        """Learn from the length of an answer."""
        pending = self._pending.pop(news.id, None)
        if pending is None or pending.log_median is None or news.output_tokens < 1:
            return
        now_s = self._clock()
        residual = math.log1p(news.output_tokens) - pending.log_median
        self._history.add(
            pending.pool,
            pending.tenant,
            pending.key,
            residual - pending.by_memory,
            now_s,
            is_complete=news.is_complete,
        )
        self._memory.add(pending.signatures, residual - pending.by_history, now_s, is_complete=news.is_complete)

    def dump(self) -> bytes:
        """What was learned, for ``restore``; with the key of the signatures, which belongs to them."""
        return msgspec.msgpack.encode(_State(self._key, self._history.dump(), self._memory.dump()))

    def restore(self, data: bytes) -> None:
        """Go on with what another process has learned.

        Raises:
            ValueError: it cannot be used.
        """
        state = msgspec.msgpack.decode(data, type=_State)
        if len(state.key) != _KEY_BYTES:
            raise ValueError(f"a key of {len(state.key)} bytes")
        history, memory = History(), Memory()
        history.restore(state.history)
        memory.restore(state.memory)
        self._key, self._signer = state.key, Signer(state.key)
        self._history, self._memory = history, memory


def _answer(
    look: _Look, quantiles: tuple[float, ...] | None, source: str, runaway: float | None, digest: str | None
) -> Answer:
    return Answer(
        id=look.question.id,
        quantiles=quantiles,
        source=source,
        runaway=runaway,
        features=look.features.pack(),
        feature_version=FEATURE_VERSION,
        model=digest,
    )
