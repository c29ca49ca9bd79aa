"""Judges a length model as a router would use it, on prompts that it has not seen, next to what else there is.

* cold: no memory, no history;
* warm: all test rows in random order with the memory of prompts; judged on rows whose prompt at least ``WARM_FROM``
  other models had answered before, and, against cold, on the first sight of every prompt;
* stream: the same with histories alone, in a few orders; tenants are source and model, as in the folder;
* unseen models: trained without a fifth of the models and judged on those, cold and with histories.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router_ext.predict import grouping, model_file, reference
from router_ext.predict.answers import Answer, Samples
from router_ext.predict.features import RequestFacts, Signatures, Signer, extract
from router_ext.predict.figures import coverage_by, figures, inside, interval_figures, runaway_figures
from router_ext.predict.history import History
from router_ext.predict.memory import Memory
from router_ext.predict.messages import Ask, Ended
from router_ext.predict.parts import RUNAWAY_TOKENS
from router_ext.predict.predictor import Predictor, Request
from router_ext.predict.seen import TENSOR, seen
from router_ext.predict.service import LengthService
from router_ext.predict.training import Options, Trained, train
from router_ext.predict.trees import is_available

Floats = NDArray[np.float64]
OnProgress = Callable[[float, str], None]

WARM_FROM = 3
_BATCH = 256
_TIMED = 400
_MODEL_ROWS, _KIND_ROWS = 500, 300
_NEW_TENANT, _AROUND = 200, 50
_ORDERS = 4


def split(answers: Sequence[Answer], seed: int, share: float = 0.2) -> tuple[list[Answer], list[Answer]]:
    """Train and test: prompts apart, near-duplicates together."""
    texts = sorted({answer.text for answer in answers})
    of = grouping.groups([extract(text, RequestFacts()) for text in texts])
    names = np.unique(of)
    np.random.default_rng(seed).shuffle(names)
    held = set(names[: int(len(names) * share)].tolist())
    is_test = {text: int(group) in held for text, group in zip(texts, of, strict=True)}
    return [a for a in answers if not is_test[a.text]], [a for a in answers if is_test[a.text]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cold:
    """Predictions of test rows without memory and history. Shape: ``quantiles`` [n, levels]; the others [n]."""

    quantiles: Floats
    runaway: Floats
    log_median: Floats


def evaluate(
    train_rows: Sequence[Answer],
    test_rows: Sequence[Answer],
    *,
    seed: int,
    on_progress: OnProgress,
    ablations: bool = False,
    unseen: bool = False,
    artifact: bytes | None = None,
) -> dict[str, Any]:
    """Train on some rows, judge on others. JSON-safe.

    Args:
        artifact: judge this model instead of training one.
        ablations, unseen: train again for each, minutes more.
    """
    runs = 1 + (len(_ABLATIONS) if ablations else 0) + unseen
    judge = _Judge(test_rows, seed)
    metrics: dict[str, Any] | None = None
    if artifact is None:
        trained = _train(train_rows, judge.samples, seed, Options(), _step(on_progress, 0, runs))
        artifact, metrics = trained.artifact, trained.metrics
    on_progress(0.9 / runs, "judging the model")
    predictor = Predictor.load(artifact)
    cold = judge.cold(predictor)
    result: dict[str, Any] = {
        "model": {**judge.figures(cold.quantiles), "predict_us": judge.predict_us(artifact)},
        "whole": judge.whole(cold),
        "warm": judge.warm(predictor, cold),
        "stream": judge.stream(predictor, cold),
        "runaway": runaway_figures(cold.runaway, judge.tokens, RUNAWAY_TOKENS),
        "coverage": judge.coverage(cold.quantiles),
        "baselines": {},
        "data": {
            "train_rows": len(train_rows),
            "test_rows": len(test_rows),
            "test_prompts": len({answer.text for answer in test_rows}),
            "test_prompts_seen_in_training": len({a.text for a in test_rows} & {a.text for a in train_rows}),
            "seen_by_model": judge.seen(artifact),
            "seed": seed,
        },
        "training": metrics,
    }
    on_progress(0.92 / runs, "baselines")
    medians = reference.trivial(train_rows, test_rows, judge.order) if train_rows else {}
    if train_rows and is_available():
        medians["boosting"] = reference.boosting(train_rows, test_rows, seed=seed)
    result["baselines"] = {name: _rounded(figures(of, judge.tokens)) for name, of in medians.items()}
    if "boosting" in result["baselines"]:
        result["model"]["mae_over_boosting"] = round(result["model"]["mae"] / result["baselines"]["boosting"]["mae"], 4)
    if ablations:
        result["ablations"] = {"no_memory": result["warm"]["cold_same_rows"]}
        for i, (name, options) in enumerate(_ABLATIONS.items()):
            other = _train(train_rows, judge.samples, seed, options, _step(on_progress, 1 + i, runs, name))
            result["ablations"][name] = judge.figures(judge.cold(Predictor.load(other.artifact)).quantiles)
    if unseen:
        result["unseen_models"] = _unseen(
            train_rows, test_rows, seed, _step(on_progress, runs - 1, runs, "unseen models")
        )
    on_progress(1.0, "done")
    return result


def _step(on_progress: OnProgress, i: int, n: int, name: str = "") -> OnProgress:
    """Progress of the i-th training of n."""

    def tell(share: float, line: str) -> None:
        on_progress((i + 0.9 * share) / n, f"{name}: {line}" if name and line else line)

    return tell


_ABLATIONS = {
    "one_expert": Options(experts=(1,)),
    "four_experts": Options(experts=(4,)),
    "no_kernel": Options(with_kernel=False),
    "no_trees": Options(with_trees=False),
}


def _train(rows: Sequence[Answer], samples: Samples, seed: int, options: Options, on_progress: OnProgress) -> Trained:
    return train(
        [samples.of(answer) for answer in rows], seed=seed, built_at_us=0, on_progress=on_progress, options=options
    )


class _Judge:
    """Test rows with what predictions of them are compared with."""

    def __init__(self, rows: Sequence[Answer], seed: int) -> None:
        self.rows = rows
        self.samples = Samples()
        self.tokens: Floats = np.array([answer.output_tokens for answer in rows], np.float64)
        self.logs: Floats = np.log1p(self.tokens)
        self.order = np.random.default_rng(seed).permutation(len(rows))

    def figures(self, quantiles: Floats) -> dict[str, float]:
        return _rounded(interval_figures(quantiles, self.tokens))

    def whole(self, cold: _Cold) -> dict[str, float]:
        """Of answers that came to their own end: the others are judged as if the limit had been theirs."""
        of = np.array([answer.is_complete for answer in self.rows])
        found = _rounded(interval_figures(cold.quantiles[of], self.tokens[of])) if of.any() else {}
        return {"rows": int(of.sum()), **found}

    def request(self, i: int, correction: float = 0.0, n_answers: int = 0) -> Request:
        answer = self.rows[i]
        return Request(
            features=self.samples.of(answer).features,
            model=answer.model,
            max_new_tokens=answer.facts.max_new_tokens or 0,
            correction=correction,
            n_answers=n_answers,
        )

    def seen(self, artifact: bytes) -> dict[str, int] | None:
        """How many prompts the model was trained on, of how many that can be told; None: its file does not say."""
        known = model_file.unpack(artifact)[1].get(TENSOR)
        if known is None:
            return None
        found, of = seen(known, {a.text: self.samples.of(a).features for a in self.rows}.values())
        return {"prompts": found, "of": of}

    def predict(self, predictor: Predictor, requests: Sequence[Request]) -> _Cold:
        found = [
            one
            for first in range(0, len(requests), _BATCH)
            for one in predictor.predict_batch(requests[first : first + _BATCH])
        ]
        return _Cold(
            quantiles=np.array([one.quantiles for one in found]),
            runaway=np.array([one.runaway for one in found]),
            log_median=np.array([one.log_median for one in found]),
        )

    def cold(self, predictor: Predictor) -> _Cold:
        return self.predict(predictor, [self.request(i) for i in range(len(self.rows))])

    def coverage(self, quantiles: Floats) -> dict[str, Any]:
        covered = inside(quantiles, self.tokens, 0)
        return {
            "by_model": _nested(coverage_by([answer.model for answer in self.rows], covered, _MODEL_ROWS)),
            "by_kind": _nested(coverage_by([answer.kind for answer in self.rows], covered, _KIND_ROWS)),
        }

    def warm(self, predictor: Predictor, cold: _Cold) -> dict[str, Any]:
        """Replay with the memory."""
        memory, signer = Memory(), Signer(b"evaluation")
        signatures: dict[str, Signatures] = {}
        models: dict[str, set[str]] = defaultdict(set)
        requests: list[Request] = [self.request(i) for i in range(len(self.rows))]
        is_warm, is_first = np.zeros(len(self.rows), np.bool_), np.zeros(len(self.rows), np.bool_)
        for i in self.order.tolist():
            answer = self.rows[i]
            sign = signatures.get(answer.text)
            if sign is None:
                sign = signatures[answer.text] = signer.sign(answer.text)
                is_first[i] = True
            is_warm[i] = len(models[answer.text] - {answer.model}) >= WARM_FROM
            recall = memory.recall(sign, 0.0)
            requests[i] = self.request(i, recall.correction, recall.n_exact)
            memory.add(sign, float(self.logs[i] - cold.log_median[i]), 0.0, is_complete=answer.is_complete)
            models[answer.text].add(answer.model)
        warm = self.predict(predictor, requests).quantiles
        if not is_warm.any():
            return {"rows": 0, "cold_same_rows": None, "first_sight": None}
        return {
            **_rounded(interval_figures(warm[is_warm], self.tokens[is_warm])),
            "rows": int(is_warm.sum()),
            "cold_same_rows": _rounded(interval_figures(cold.quantiles[is_warm], self.tokens[is_warm])),
            "first_sight": {
                "rows": int(is_first.sum()),
                "mae": round(float(np.abs(warm[is_first, 3] - self.tokens[is_first]).mean()), 4),
                "mae_cold": round(float(np.abs(cold.quantiles[is_first, 3] - self.tokens[is_first]).mean()), 4),
            },
        }

    def stream(self, predictor: Predictor, cold: _Cold) -> dict[str, Any]:
        """Replays with histories: figures of all rows in the first order, and over all orders how soon a new tenant's
        error is what it will be; a single order says more of which rows came when."""
        tenants = Counter(answer.tenant for answer in self.rows)
        n_of = np.array([tenants[answer.tenant] for answer in self.rows])
        long = n_of >= 2 * _NEW_TENANT
        others = np.random.default_rng(_ORDERS).permuted(np.tile(self.order, (_ORDERS - 1, 1)), axis=1)
        first: Floats | None = None
        early, around, final = [], [], []
        for order in (self.order, *others):
            quantiles, place = self._with_histories(predictor, cold, order)
            first = quantiles if first is None else first
            error = np.abs(quantiles[:, 3] - self.tokens) / self.tokens
            early.append(error[long & (place < _NEW_TENANT)])
            # As many of each tenant in both, for tenants differ more than the two do.
            around.append(error[long & (np.abs(place - _NEW_TENANT) < _AROUND)])
            final.append(error[long & (place > n_of - 2 * _AROUND)])
        assert first is not None
        without = float(np.abs(cold.quantiles[:, 3] - self.tokens).mean())
        return {
            **self.figures(first),
            "mae_over_cold": round(float(np.abs(first[:, 3] - self.tokens).mean()) / without, 4) if without else None,
            "tenants": len(tenants),
            "median_relative_error_first_200": _median(np.concatenate(early)),
            "median_relative_error_at_200": _median(np.concatenate(around)),
            "median_relative_error_final": _median(np.concatenate(final)),
        }

    def _with_histories(
        self, predictor: Predictor, cold: _Cold, order: NDArray[np.int64]
    ) -> tuple[Floats, NDArray[np.int64]]:
        """Quantiles [n, levels] of a replay that begins without histories, and how many answers of its tenant each row
        came after [n]."""
        history = History()
        seen: Counter[str] = Counter()
        place = np.zeros(len(self.rows), np.int64)
        requests: list[Request] = [self.request(i) for i in range(len(self.rows))]
        for i in order.tolist():
            answer = self.rows[i]
            correction = history.correction(answer.model, answer.tenant, "", 0.0)
            requests[i] = self.request(i, correction)
            place[i] = seen[answer.tenant]
            seen[answer.tenant] += 1
            residual = float(self.logs[i] - cold.log_median[i])
            history.add(answer.model, answer.tenant, "", residual, 0.0, is_complete=answer.is_complete)
        return self.predict(predictor, requests).quantiles, place

    def predict_us(self, artifact: bytes) -> dict[str, float]:
        """Time of whole answers of the worker's service, one at a time: features, signatures, memory, model."""
        service = LengthService(clock=lambda: 0.0)
        service.assign("pool", "digest", service.load(artifact))
        texts = [self.rows[i].text for i in self.order[:_TIMED].tolist()]
        texts += [text * (32_000 // max(1, len(text)) + 1) for text in texts[: _TIMED // 20]]  # some 8,000 tokens
        times = []
        for number, text in enumerate(texts):
            question = Ask(
                id=number,
                pool="pool",
                model=self.rows[0].model,
                tenant="tenant",
                key="key",
                prompt=text,
                is_chat=False,
                max_new_tokens=1_024,
                temperature=1.0,
                top_p=1.0,
                is_greedy=False,
                has_stop=False,
            )
            started = time.perf_counter()
            service.answer([question])
            times.append(time.perf_counter() - started)
            service.ended(Ended(number, 100, True))
        return {name: round(float(np.quantile(times, q)) * 1e6, 1) for name, q in (("p50", 0.5), ("p99", 0.99))}


def _unseen(
    train_rows: Sequence[Answer], test_rows: Sequence[Answer], seed: int, on_progress: OnProgress
) -> dict[str, Any] | None:
    """Trained without a fifth of the models, judged on the test rows of those."""
    names = np.array(sorted({answer.model for answer in train_rows}))
    np.random.default_rng(seed).shuffle(names)
    held = set(names[: max(1, len(names) // 5)].tolist())
    rows = [answer for answer in test_rows if answer.model in held]
    known = [answer for answer in train_rows if answer.model not in held]
    if not rows or not known:
        return None
    judge = _Judge(rows, seed)
    trained = _train(known, judge.samples, seed, Options(), on_progress)
    predictor = Predictor.load(trained.artifact)
    cold = judge.cold(predictor)
    return {
        "models": sorted(held),
        "rows": len(rows),
        "cold": judge.figures(cold.quantiles),
        "with_history": judge.stream(predictor, cold),
    }


def mean_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the figures of several splits, by name; what is no number in all of them is left out."""
    first = results[0]
    found: dict[str, Any] = {}
    for name, value in first.items():
        of = [result.get(name) for result in results]
        if isinstance(value, dict):
            inner = [one for one in of if isinstance(one, dict)]
            if len(inner) == len(of):
                found[name] = mean_of(inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers = [one for one in of if isinstance(one, int | float)]
            if len(numbers) == len(of):
                found[name] = round(float(np.mean(numbers)), 4)
    return found


def _median(values: Floats) -> float | None:
    return round(float(np.median(values)), 4) if len(values) else None


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in found.items()}


def _nested(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: _rounded(of) for name, of in found.items()}
