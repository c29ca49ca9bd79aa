"""A trained length model as the worker serves it: numpy only, immutable, the same numbers as when it was trained.

    Features, served model --basis--> kernel --> mixtures --> blend with the trees --conformal--> log quantiles
    log quantiles + correction (memory, history), narrowed where the prompt is known --> tokens, within the limit

Whatever the weights are, quantiles are finite, rising, at least 1, within ``MAX_TOKENS`` and the request's limit. Where
the arithmetic overflows ``log_median`` is not finite, and nothing of the prediction is to be used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from router_ext.errors import ArtifactRefused
from router_ext.predict import conformal, model_file, probes
from router_ext.predict.baseline import LEVELS, MAX_TOKENS
from router_ext.predict.basis import Basis
from router_ext.predict.features import DENSE, Features, RequestFacts, extract
from router_ext.predict.forward import Mixtures
from router_ext.predict.kernel import Kernel
from router_ext.predict.parts import Scaling, blend
from router_ext.predict.quick_basis import QuickBasis
from router_ext.predict.quick_trees import QuickTrees
from router_ext.predict.trees import Trees

Array = NDArray[np.float32]

_MAX_MIXTURES = 16
MAX_CORRECTION = math.log(8.0)
"""What memory and history may move a prediction by, together."""
_Part = TypeVar("_Part", Basis, Kernel, Scaling, Trees)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a prediction is asked for. ``max_new_tokens``: 0 for none. ``correction``: of the log length, by memory and
    history. ``n_answers``: answers to this very prompt that it rests on."""

    features: Features
    model: str
    max_new_tokens: int = 0
    correction: float = 0.0
    n_answers: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """``quantiles``: tokens at ``LEVELS``, rising, at least 1. ``runaway``: probability of more than 2,000 tokens.
    ``log_median``: ln(1 + tokens) of the model alone, against which residuals are taken."""

    quantiles: tuple[float, ...]
    runaway: float
    log_median: float

    @property
    def median(self) -> float:
        return self.quantiles[len(LEVELS) // 2]


class Predictor:
    """See the module.

    Cost: about 0.12 ms for one request, with trees 0.2.
    """

    def __init__(self, header: model_file.Header, tensors: model_file.Tensors) -> None:
        n_mixtures, widths = header.settings["mixtures"], header.settings["memory_widths"]
        if n_mixtures not in ([float(n)] for n in range(1, _MAX_MIXTURES + 1)):
            raise ValueError(f"{n_mixtures} mixtures")
        if not widths or not all(0.0 < width <= 1.0 for width in widths):
            raise ValueError(f"widths {widths[:20]}")
        self.header = header
        self._place = {model: i for i, model in enumerate(header.models)}
        basis, kernel = _part(Basis, "basis", tensors), _part(Kernel, "kernel", tensors)
        self._scaling = _part(Scaling, "scaling", tensors)
        trees = _part(Trees, "trees", tensors) if "trees.start" in tensors else None
        factors: Array = tensors["conformal.factors"]
        self._widths = widths
        basis.check()
        mixtures = [
            {name.split(".", 1)[1]: tensor for name, tensor in tensors.items() if name.startswith(f"mixture{i}.")}
            for i in range(int(n_mixtures[0]))
        ]
        rows = (
            *(len(kernel.level), len(kernel.weights), len(factors), len(self._scaling.figures)),
            *(len(mixture["embedding.weight"]) for mixture in mixtures),
        )
        if set(rows) != {len(header.models) + 1}:
            raise ValueError(f"{len(header.models)} served models, and rows for {rows}")
        self._mixtures = Mixtures(mixtures)
        self._factors = conformal.by_level(factors)
        self._basis = QuickBasis(basis, kernel, len(self._scaling.word_scale))
        self._trees: QuickTrees | None = None
        if trees is not None:
            trees.check(int(self._scaling.figures.shape[1]) + len(DENSE) + 2 + len(self._scaling.word_scale))
            self._trees = QuickTrees(trees)

    @classmethod
    def load(cls, data: bytes) -> Predictor:
        """A predictor from a file's bytes. Takes some 0.1 s: call it in a worker thread.

        Raises:
            ArtifactRefused: damaged, foreign, of another version, too large, with parts that do not fit together, or
                with other answers to questions than it gave when it was trained (``probes``).
        """
        header, tensors = model_file.unpack(data)
        try:
            blank = extract("", RequestFacts())
            with np.errstate(all="ignore"):
                predictor = cls(header, tensors)
                told = predictor.log_quantiles([blank, blank], [header.models[0], ""])
                probes.check(predictor.log_quantiles, header.models, header.settings[probes.SETTING])
        except (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ArtifactRefused(f"parts that do not fit together: {type(error).__name__}: {error}") from error
        if not all(np.isfinite(numbers).all() for numbers in told):
            raise ArtifactRefused("its weights are so large that what it says is no number")
        return predictor

    @property
    def models(self) -> Sequence[str]:
        """Served models that it was trained on."""
        return self.header.models

    def log_quantiles(self, features: Sequence[Features], models: Sequence[str]) -> tuple[Array, Array]:
        """Quantiles of ln(1 + tokens) [n, levels] without any correction, and probabilities of running away [n]."""
        places = np.array([self._place.get(model, -1) for model in models], np.int64)
        dense = np.array([one.dense for one in features])
        words, own, average = self._basis.predict(features, dense, places)
        inputs = self._scaling.mixture_inputs(dense, words, own, average)
        quantiles, runaway = self._mixtures.predict(inputs, places, own)
        if self._trees is not None:
            expected = self._trees.predict(self._scaling.tree_inputs(dense, words, places, own, average))
            quantiles = blend(quantiles, expected, self.header.settings["tree_share"][0])
        return conformal.widen_levels(quantiles, self._factors[places]), runaway

    def predict_batch(self, requests: Sequence[Request]) -> list[Prediction]:
        """Predictions of a batch, in its order."""
        if not requests:
            return []
        logs, runaway = self.log_quantiles([r.features for r in requests], [r.model for r in requests])
        return [
            Prediction(
                in_tokens(log, r.correction, self.width(r.n_answers), r.max_new_tokens or MAX_TOKENS),
                away,
                log[conformal.MIDDLE],
            )
            for r, log, away in zip(requests, logs.tolist(), runaway.tolist(), strict=True)
        ]

    def width(self, n_answers: int) -> float:
        """How much narrower the interval is about a prompt that was answered so often."""
        return self._widths[min(n_answers, len(self._widths) - 1)]


_HIGHEST = math.log1p(MAX_TOKENS)


def in_tokens(logs: Sequence[float], correction: float, width: float, limit: float) -> tuple[float, ...]:
    """Tokens at ``LEVELS`` from quantiles of logs: moved, narrowed about the median, finite, rising, within bounds."""
    median = logs[conformal.MIDDLE]
    moved = median + min(max(correction, -MAX_CORRECTION), MAX_CORRECTION)
    limit, last = max(limit, 1.0), 1.0
    tokens = []
    for log in logs:
        at = moved + (log - median) * width
        # What is no number is above every one.
        last = max(last, min(math.expm1(max(at, 0.0)) if at <= _HIGHEST else float(MAX_TOKENS), limit))
        tokens.append(last)
    return tuple(tokens)


def _part(kind: type[_Part], prefix: str, tensors: model_file.Tensors) -> _Part:
    found: dict[str, Any] = {field.name: tensors[f"{prefix}.{field.name}"] for field in fields(kind)}
    return kind(**found)
