"""What the prediction worker knows and answers with: models by pool, histories of tenants, memories of prompts.

    question --> features, signatures --> model + history + memory        with a length model
                                          empirical quantiles + memory    without one, where the prompt is known
    end      --> history and memory learn the residual of what was said

Histories are kept by pool and model. Residuals against models and against empirical quantiles mean different things, so
there is a memory for each; both are shared by all pools, because a prompt that one model answers at length is mostly
answered at length by others. Signatures are keyed by a secret of this router and by the tenant: no tenant's prompts
say anything of another's.

Needs numpy. Without it there are no features and no memory, and models are refused.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router_ext.predict.baseline import LEVELS
from router_ext.predict.features import FEATURE_VERSION, Features, RequestFacts, Signatures, Signer, features_of
from router_ext.predict.history import History
from router_ext.predict.memory import NOTHING, Memory, Recall
from router_ext.predict.messages import Answer, Ask, Ended
from router_ext.predict.notes import Notes
from router_ext.predict.predictor import Predictor, Request, in_tokens
from router_ext.predict.reading import Reading
from router_ext.predict.reading import read as read_prompt
from router_ext.wire.decoding import NotDecoded

PLAIN_CAPACITY = 2_048
"""Prompts of pools without a length model that are remembered: little is gained there, and memory is scarce."""

MAX_PENDING = 8_192
"""Questions whose end is awaited; of older ones nothing is learned."""

READ_LIMIT_S = 0.0015

_KEY_BYTES = 32
_VERSION = 2
"""Of the state, signatures included: those of another kind would never be met again."""

_KNOWN_WIDTHS = (1.0, 0.8, 0.7, 0.6)
"""How much narrower empirical quantiles, which are of all of a key's prompts, are about one that was answered 0, 1, 2,
3 times or more."""

_ABSURD = (math.nan,) * len(LEVELS)


class _Head(msgspec.Struct, array_like=True, tag="head"):
    version: int
    key: bytes


class _Slice(msgspec.Struct, array_like=True, tag="slice"):
    """``of``: place among history, memory and memory against empirical quantiles."""

    of: int
    data: bytes


@dataclass(slots=True)
class _Pending:
    """What an end will be compared with. ``log_median``: of the model (its digest), or of empirical quantiles (None);
    ``history``, ``memory``: what was added to it for the tenant and for the prompt."""

    digest: str | None
    pool: str
    tenant: str
    key: str
    signatures: Signatures
    log_median: float
    history: float
    memory: float


@dataclass(slots=True)
class _Read:
    """A question that has been looked at."""

    question: Ask
    features: Features
    signatures: Signatures
    history: float = 0.0
    recall: Recall = NOTHING


def _no_time() -> float:
    return 0.0


class LengthService:
    """Answers questions about output lengths; see ``worker.Service``.

    Args:
        clock: wall seconds; what was learned outlives the process. timer: exact seconds, for ``READ_LIMIT_S``; without
            one a batch is answered whole. notes: where defects are told.
        key: of signatures, for whoever wants the same numbers again; a secret of this process if it is not given.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        timer: Callable[[], float] = _no_time,
        key: bytes | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._clock = clock
        self._timer = timer
        self._notes = notes or Notes()
        self._models: dict[str, tuple[str, Predictor]] = {}
        self._history = History()
        self._memory = Memory()
        self._plain_memory = Memory(capacity=PLAIN_CAPACITY)
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._use_key(os.urandom(_KEY_BYTES) if key is None else key)

    def _use_key(self, key: bytes) -> None:
        self._key = key
        self._signer = Signer(key)

    @property
    def known(self) -> int:
        """Prompts and histories remembered."""
        return len(self._memory) + len(self._plain_memory) + len(self._history)

    # --- models -----------------------------------------------------------------------------------------------------

    def load(self, data: bytes) -> Predictor:
        """A model from its artifact.

        Raises:
            ArtifactRefused: this router cannot serve it.
        """
        return Predictor.load(data)

    def assign(self, pool: str, digest: str | None, model: Any) -> None:
        """Answer for a pool by this model from now on; None: by none."""
        if digest is None:
            self._models.pop(pool, None)
        else:
            self._models[pool] = (digest, model)

    # --- questions --------------------------------------------------------------------------------------------------

    def answer(self, questions: Sequence[Ask]) -> tuple[list[Answer], list[int]]:
        """Answers to a batch, and the ids of questions that tripped a defect: to as many of the first as can be read in
        ``READ_LIMIT_S``, so that dear prompts do not make all others of a long batch late."""
        now_s = self._clock()
        until_s = self._timer() + READ_LIMIT_S
        by_model: dict[str | None, list[_Read]] = {}
        refused: list[int] = []
        for number, question in enumerate(questions):
            if number and self._timer() >= until_s:
                break
            try:
                read = self._read(question, now_s)
            except Exception:  # contained to its request
                self._notes.exception("predictor.question_failed", pool=question.pool)
                refused.append(question.id)
                continue
            digest, _ = self._models.get(question.pool, (None, None))
            by_model.setdefault(digest, []).append(read)
        answers: list[Answer] = []
        for digest, reads in by_model.items():
            try:
                answers += self._plain(reads) if digest is None else self._modelled(reads, digest)
            except Exception:  # a model that trips a defect must not take the others' answers
                self._notes.exception("predictor.model_failed", digest=digest)
                refused += [read.question.id for read in reads]
        return answers, refused

    def _read(self, question: Ask, now_s: float) -> _Read:
        facts = RequestFacts(
            max_new_tokens=question.max_new_tokens or None,
            temperature=question.temperature,
            top_p=question.top_p,
            top_k=question.top_k,
            typical_p=question.typical_p,
            repetition_penalty=question.repetition_penalty,
            is_greedy=question.is_greedy,
            has_stop=question.has_stop,
            is_chat=question.is_chat,
        )
        reading = read_prompt(question.prompt)
        found = _Read(question, features_of(reading, facts), self._sign(reading, question.tenant))
        if question.pool in self._models:
            place = _place(question.pool, self._models[question.pool][0])
            found.history = self._history.correction(place, question.tenant, question.key, now_s)
            found.recall = self._memory.recall(found.signatures, now_s)
        else:
            found.recall = self._plain_memory.recall(found.signatures, now_s)
        return found

    def _sign(self, reading: Reading, tenant: str) -> Signatures:
        digest = hashlib.blake2b(tenant.encode(), digest_size=8, key=self._key).digest()
        salt = int.from_bytes(digest, "little")
        plain = self._signer.of(reading)
        return Signatures(plain.exact ^ salt, tuple(band ^ salt for band in plain.near))

    def _modelled(self, reads: Sequence[_Read], digest: str) -> list[Answer]:
        model = self._models[reads[0].question.pool][1]
        predictions = model.predict_batch(
            [
                Request(
                    features=read.features,
                    model=read.question.model,
                    max_new_tokens=read.question.max_new_tokens,
                    correction=read.history + read.recall.correction,
                    n_answers=read.recall.n_exact,
                )
                for read in reads
            ]
        )
        answers = []
        for read, prediction in zip(reads, predictions, strict=True):
            quantiles = prediction.quantiles
            if math.isfinite(prediction.log_median):
                self._await_end(read, prediction.log_median, digest)
            else:
                quantiles = _ABSURD  # the router counts it and has its fallback; nothing is learned from it
            source = "model" if read.recall is NOTHING else "memory"
            answers.append(_answer(read, quantiles, source, prediction.runaway, digest))
        return answers

    def _plain(self, reads: Sequence[_Read]) -> list[Answer]:
        """Without a model: empirical quantiles, moved where the prompt was answered before; else the caller's own."""
        answers = []
        for read in reads:
            base, recall = read.question.base, read.recall
            quantiles: tuple[float, ...] | None = None
            if base is not None:
                logs = [math.log1p(tokens) for tokens in base]
                self._await_end(read, logs[len(base) // 2], None)
                if recall is not NOTHING:
                    width = _KNOWN_WIDTHS[min(recall.n_exact, len(_KNOWN_WIDTHS) - 1)]
                    limit = float(read.question.max_new_tokens or math.inf)
                    quantiles = in_tokens(logs, recall.correction, width, limit)
            answers.append(_answer(read, quantiles, "" if quantiles is None else "memory", None, None))
        return answers

    # --- ends -------------------------------------------------------------------------------------------------------

    def _await_end(self, read: _Read, log_median: float, digest: str | None) -> None:
        question = read.question
        self._pending[question.id] = _Pending(
            digest=digest,
            pool=question.pool,
            tenant=question.tenant,
            key=question.key,
            signatures=read.signatures,
            log_median=log_median,
            history=read.history,
            memory=read.recall.correction,
        )
        if len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)

    def ended(self, news: Ended) -> None:
        """Learn from the length of an answer."""
        told = self._pending.pop(news.id, None)
        if told is None or news.output_tokens <= 0:
            return
        now_s = self._clock()
        residual = math.log1p(news.output_tokens) - told.log_median
        if told.digest is None:
            self._plain_memory.add(told.signatures, residual, now_s, is_complete=news.is_complete)
            return
        # Each learns what the other leaves: a prompt that is asked again and again says little of its tenant.
        place, unexplained = _place(told.pool, told.digest), residual - told.memory
        self._history.add(place, told.tenant, told.key, unexplained, now_s, is_complete=news.is_complete)
        self._memory.add(told.signatures, residual - told.history, now_s, is_complete=news.is_complete)

    # --- across restarts --------------------------------------------------------------------------------------------

    def dump(self) -> Iterator[bytes]:
        """What was learned, for ``restore``, in slices: questions may be answered, and ends learned from, in between.
        Cost: some 0.3 ms each."""
        yield msgspec.msgpack.encode(_Head(_VERSION, self._key))
        parts = (self._history.dump(), self._memory.dump(), self._plain_memory.dump())
        for of, slices in enumerate(parts):
            for data in slices:
                yield msgspec.msgpack.encode(_Slice(of, data))

    def restore(self, slices: Iterable[bytes]) -> None:
        """Go on with what another process has learned.

        Raises:
            ValueError: it cannot be used; nothing of it is.
        """
        history, memory, plain_memory = History(), Memory(), Memory(capacity=PLAIN_CAPACITY)
        decode = msgspec.msgpack.Decoder(_Head | _Slice).decode
        found: tuple[list[bytes], ...] = ([], [], [])
        try:
            head, *rest = map(decode, slices)
            if not isinstance(head, _Head) or head.version != _VERSION or len(head.key) != _KEY_BYTES:
                raise ValueError("state of another version")
            for each in rest:
                if not isinstance(each, _Slice):
                    raise ValueError("two heads")
                found[each.of].append(each.data)
            history.restore(found[0])
            memory.restore(found[1])
            plain_memory.restore(found[2])
        except (*NotDecoded, LookupError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from error
        self._use_key(head.key)
        self._history, self._memory, self._plain_memory = history, memory, plain_memory


def _place(pool: str, digest: str) -> str:
    """Name of a pool in the histories: residuals say something about the model that left them."""
    return f"{pool}\x00{digest}"


def _answer(
    read: _Read, quantiles: tuple[float, ...] | None, source: str, runaway: float | None, digest: str | None
) -> Answer:
    return Answer(
        id=read.question.id,
        quantiles=quantiles,
        source=source,
        runaway=runaway,
        features=read.features.pack(),
        feature_version=FEATURE_VERSION,
        model=digest,
    )
