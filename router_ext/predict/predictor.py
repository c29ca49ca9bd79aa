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
from router_ext.predict import conformal, model_file
from router_ext.predict.baseline import LEVELS, MAX_TOKENS
from router_ext.predict.basis import Basis
from router_ext.predict.features import DENSE, Features, RequestFacts, extract
from router_ext.predict.forward import forward
from router_ext.predict.kernel import Kernel
from router_ext.predict.parts import Scaling, blend
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

    Cost: about 0.3 ms for one request, 0.05 ms each in a batch of 64.
    """

    def __init__(self, header: model_file.Header, tensors: model_file.Tensors) -> None:
        n_mixtures, widths = header.settings["mixtures"], header.settings["memory_widths"]
        if n_mixtures not in ([float(n)] for n in range(1, _MAX_MIXTURES + 1)):
            raise ValueError(f"{n_mixtures} mixtures")
        if not widths or not all(0.0 < width <= 1.0 for width in widths):
            raise ValueError(f"widths {widths[:20]}")
        self.header = header
        self._place = {model: i for i, model in enumerate(header.models)}
        self._basis = _part(Basis, "basis", tensors)
        self._kernel = _part(Kernel, "kernel", tensors)
        self._scaling = _part(Scaling, "scaling", tensors)
        trees = _part(Trees, "trees", tensors) if "trees.start" in tensors else None
        self._mixtures = [
            {name.split(".", 1)[1]: tensor for name, tensor in tensors.items() if name.startswith(f"mixture{i}.")}
            for i in range(int(n_mixtures[0]))
        ]
        self._factors: Array = tensors["conformal.factors"]
        self._widths = widths
        self._basis.check()
        rows = (
            *(len(self._kernel.level), len(self._kernel.weights), len(self._factors), len(self._scaling.figures)),
            *(len(mixture["embedding.weight"]) for mixture in self._mixtures),
        )
        if set(rows) != {len(header.models) + 1}:
            raise ValueError(f"{len(header.models)} served models, and rows for {rows}")
        self._trees: QuickTrees | None = None
        if trees is not None:
            trees.check(int(self._scaling.figures.shape[1]) + len(DENSE) + 2 + len(self._scaling.word_scale))
            self._trees = QuickTrees(trees)

    @classmethod
    def load(cls, data: bytes) -> Predictor:
        """A predictor from a file's bytes. Takes some 0.1 s: call it in a worker thread.

        Raises:
            ArtifactRefused: damaged, foreign, of another version, too large, or with parts that do not fit together.
        """
        header, tensors = model_file.unpack(data)
        try:
            predictor = cls(header, tensors)
            blank = extract("", RequestFacts())
            with np.errstate(all="ignore"):
                told = predictor.log_quantiles([blank, blank], [header.models[0], ""])
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
        dense = np.stack([one.dense for one in features])
        batch = self._basis.transform(features)
        own, average = self._kernel.predict(batch.prompt, places)
        inputs = self._scaling.mixture_inputs(dense, batch, own, average)
        quantiles = np.zeros((len(features), len(LEVELS)), np.float32)
        runaway = np.zeros(len(features), np.float32)
        for weights in self._mixtures:
            each, away = forward(weights, inputs, places, own)
            quantiles += each / np.float32(len(self._mixtures))
            runaway += away / np.float32(len(self._mixtures))
        if self._trees is not None:
            expected = self._trees.predict(self._scaling.tree_inputs(dense, batch, places, own, average))
            quantiles = blend(quantiles, expected, self.header.settings["tree_share"][0])
        return conformal.widen(quantiles, self._factors[places]), runaway

    def predict_batch(self, requests: Sequence[Request]) -> list[Prediction]:
        """Predictions of a batch, in its order."""
        if not requests:
            return []
        logs, runaway = self.log_quantiles([r.features for r in requests], [r.model for r in requests])
        corrections = np.array([r.correction for r in requests], np.float32)
        widths = np.array([self.width(r.n_answers) for r in requests], np.float32)
        limits = np.array([r.max_new_tokens or MAX_TOKENS for r in requests], np.float64)
        tokens = in_tokens(logs, corrections, widths, limits)
        medians = logs[:, conformal.MIDDLE]
        return [
            Prediction(tuple(tokens[i].tolist()), float(runaway[i]), float(medians[i])) for i in range(len(requests))
        ]

    def width(self, n_answers: int) -> float:
        """How much narrower the interval is about a prompt that was answered so often."""
        return self._widths[min(n_answers, len(self._widths) - 1)]


def in_tokens(logs: Array, corrections: Array, widths: Array, limits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens [n, levels] from quantiles of logs: moved, narrowed about the median, finite, rising, in their bounds."""
    median = logs[:, conformal.MIDDLE, None]
    moved = median + np.clip(corrections, -MAX_CORRECTION, MAX_CORRECTION)[:, None] + (logs - median) * widths[:, None]
    highest = math.log1p(MAX_TOKENS)
    tokens = np.expm1(np.clip(np.nan_to_num(moved.astype(np.float64), nan=highest), 0.0, highest))
    tokens = np.maximum.accumulate(np.clip(tokens, 1.0, np.maximum(limits, 1.0)[:, None]), axis=1)
    return tokens


def _part(kind: type[_Part], prefix: str, tensors: model_file.Tensors) -> _Part:
    found: dict[str, Any] = {field.name: tensors[f"{prefix}.{field.name}"] for field in fields(kind)}
    return kind(**found)
