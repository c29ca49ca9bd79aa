"""Training of a length model from samples that hold hashed features only.

    distinct prompts --> basis
    5 folds by group of near-duplicates: kernel, then trees and mixtures, each predicting the fold it did not see
        K experts by pinball on a fold; the trees' share, conformal factors, widths of known prompts, figures on all
    all rows --> kernel, trees, mixtures: what is served

A later part is trained on what the earlier ones say of prompts that are new to them, as it will meet them when served.
Answers that were cut teach (``censoring``; the mixture has a loss for them), and judge where there are too few others.

Cost: 50,000 rows in some minutes on two cores; most of it trees. Deterministic by seed on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from router_ext.errors import TrainingFailed
from router_ext.predict import conformal, grouping, model_file, probes, trees
from router_ext.predict.baseline import LEVELS
from router_ext.predict.basis import Batch, fit_basis
from router_ext.predict.censoring import MIN_WHOLE, lengthened
from router_ext.predict.features import Features
from router_ext.predict.forward import forward
from router_ext.predict.kernel import fit_kernel
from router_ext.predict.memory import SHRINK_EXACT, SIZE
from router_ext.predict.mixture import Cancelled, Rows, fit_mixture, tensors
from router_ext.predict.parts import RUNAWAY_TOKENS, blend, fit_scaling
from router_ext.predict.predictor import Predictor
from router_ext.predict.residuals import REACH, is_news
from router_ext.predict.seen import TENSOR, prompt_key, sketch

__all__ = ("Cancelled", "Options", "Sample", "Trained", "train")

Array = NDArray[np.float32]
Ints = NDArray[np.int64]

FOLDS = 5
MIN_SAMPLES, MIN_PROMPTS = 100, 30
_EXPERTS = (1, 4, 8)
_MIXTURES = 4
_FEW_BOOSTERS = 1
_SHARES = (0.0, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
"""Candidates for the weight of the trees in the median."""
_KNOWN = 8
"""Answers to one prompt from which its interval does not get narrower."""


_PROVED, _FAR = 500, 1.5
"""Rows by which the file is proved before anybody has it, and how much worse than new prompts they may be: chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer. ``is_complete``: it came to its natural end, else it is longer than ``output_tokens``."""

    features: Features
    model: str
    output_tokens: int
    is_complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``experts``: candidates for K, of which validation takes one. ``with_trees``: False leaves them out, as does an
    environment without scikit-learn. ``with_kernel``: False gives trees and mixture a model's level instead, to show
    what the kernel is worth."""

    experts: Sequence[int] = _EXPERTS
    with_trees: bool = True
    with_kernel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """``artifact``: bytes of the model's file. ``metrics``: JSON-safe figures on prompts not seen by what judges."""

    artifact: bytes
    metrics: dict[str, Any]


OnProgress = Callable[[float, str], None]


def train(
    samples: Sequence[Sample],
    *,
    seed: int,
    built_at_us: int,
    on_progress: OnProgress = lambda share, line: None,
    should_stop: Callable[[], bool] = lambda: False,
    options: Options | None = None,
) -> Trained:
    """Train a model.

    Args:
        on_progress: called with the share that is done (0 to 1) and a line about it.
        should_stop: asked between and within the steps.

    Raises:
        TrainingFailed: too few samples or prompts.
        Cancelled: ``should_stop`` said so.
    """
    options = options or Options()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batches are small: more threads are slower, and sums would depend on their number
    try:
        return _Training(samples, seed, built_at_us, on_progress, should_stop, options).run()
    finally:
        torch.set_num_threads(threads)


class _Training:
    def __init__(
        self,
        samples: Sequence[Sample],
        seed: int,
        built_at_us: int,
        on_progress: OnProgress,
        should_stop: Callable[[], bool],
        options: Options,
    ) -> None:
        self.samples = samples
        self.seed = seed
        self.built_at_us = built_at_us
        self._tell = on_progress
        self._should_stop = should_stop
        self.options = options
        self.with_trees = options.with_trees and trees.is_available()
        self.names = sorted({sample.model for sample in samples})
        place = {name: i for i, name in enumerate(self.names)}
        self.models: Ints = np.array([place[sample.model] for sample in samples], np.int64)
        self.y: Array = np.log1p([sample.output_tokens for sample in samples]).astype(np.float32)
        self.is_cut = np.array([not sample.is_complete for sample in samples], np.bool_)
        self._judged = ~self.is_cut if (~self.is_cut).sum() >= MIN_WHOLE else np.ones(len(samples), np.bool_)
        self.prompts, self.prompt_of = _distinct([sample.features for sample in samples])
        if len(samples) < MIN_SAMPLES or len(self.prompts) < MIN_PROMPTS:
            raise TrainingFailed(
                f"{len(samples)} answers to {len(self.prompts)} prompts; needed are {MIN_SAMPLES} to {MIN_PROMPTS}"
            )

    def tell(self, share: float, line: str) -> None:
        if self._should_stop():
            raise Cancelled
        self._tell(share, line)

    def run(self) -> Trained:
        started = time.perf_counter()
        n, n_models, seed = len(self.y), len(self.names), self.seed
        self.tell(0.0, f"{n:,} answers of {n_models} models to {len(self.prompts):,} prompts")
        folds = _folds(grouping.groups(self.prompts), seed)[self.prompt_of]
        self.tell(0.02, "directions of the words")
        basis = fit_basis(self.prompts, seed=seed, on_progress=lambda s: self.tell(0.02 + 0.08 * s, ""))
        each = basis.transform(self.prompts)
        batch = Batch(words=each.words[self.prompt_of], marks=each.marks[self.prompt_of])
        vectors = each.prompt if self.options.with_kernel else np.zeros((len(self.prompts), 1), np.float32)
        dense = np.stack([sample.features.dense for sample in self.samples])

        self.tell(0.1, "kernel part, by fold")
        own, average = np.zeros(n, np.float32), np.zeros(n, np.float32)
        for fold in range(FOLDS):
            rows, held = folds != fold, folds == fold
            part = self._kernel(vectors, rows)
            own[held], average[held] = part.predict(vectors[self.prompt_of[held]], self.models[held])
            self.tell(0.1 + 0.1 * (fold + 1) / (FOLDS + 1), "")
        kernel = self._kernel(vectors, np.ones(n, np.bool_))
        chance = np.random.default_rng(seed).random(n, np.float32)
        lengths = lengthened(self.y, self.is_cut, own, self.models, chance)
        scaling = fit_scaling(dense, batch.words, lengths, self.models, n_models, kernel.level, own)

        expected, forest, share = own, None, 0.0
        if self.with_trees:
            inputs = scaling.tree_inputs(dense, batch.words, self.models, own, average)
            expected, forest = self._trees(inputs, lengths, folds)
        inputs = scaling.mixture_inputs(dense, batch.words, own, average)
        rows_all = Rows(
            inputs=inputs,
            base=own,
            models=self.models,
            y=self.y,
            is_cut=self.is_cut,
            is_runaway=lengths > np.log1p(RUNAWAY_TOKENS),
            weight=np.ones(n, np.float32),
        )
        n_experts, choice = self._experts(rows_all, folds)
        logs, away = self._mixtures_by_fold(rows_all, folds, n_experts)
        finals = []
        for i in range(_MIXTURES):
            self.tell(0.88 + 0.1 * i / _MIXTURES, f"mixture {i + 1} of {_MIXTURES} on all rows")
            finals.append(self._mixture(rows_all, n_experts, seed + 100 + i))

        judged = self._judged
        if forest is not None:
            losses = {share: pinball(blend(logs, expected, share)[judged], self.y[judged]) for share in _SHARES}
            share = min(losses, key=lambda share: losses[share])
        without = _figures(logs[judged], self.y[judged], away[judged])
        logs = blend(logs, expected, share)
        factors = conformal.factors(logs[judged], self.y[judged], self.models[judged], n_models)
        widened = conformal.widen(logs, factors[self.models])
        metrics: dict[str, Any] = {
            "seed": seed,
            "rows": n,
            "cut_rows": int(self.is_cut.sum()),
            "prompts": len(self.prompts),
            "models": n_models,
            "experts": n_experts,
            "experts_pinball": choice,
            "has_trees": self.with_trees,
            "has_kernel": self.options.with_kernel,
            "tree_share": share,
            "new_prompts": _figures(widened[judged], self.y[judged], away[judged]),
            "new_prompts_mixture_alone": without,
        }
        blob: model_file.Tensors = {"conformal.factors": factors}
        parts: dict[str, dict[str, NDArray[Any]]] = {
            "basis": basis.tensors(),
            "kernel": {"level": kernel.level, "weights": self._served(kernel.weights, each)},
            "scaling": scaling.tensors(),
            **{f"mixture{i}": dict(tensors(one)) for i, one in enumerate(finals)},
        }
        if forest is not None:
            parts["trees"] = forest.tensors()
        for prefix, of in parts.items():
            blob.update({f"{prefix}.{name}": tensor for name, tensor in of.items()})
        blob[TENSOR] = sketch(self.prompts)
        settings = {
            "mixtures": [float(_MIXTURES)],
            "tree_share": [share],
            "memory_widths": _known_widths(widened, self.y, self.is_cut, self.prompt_of, seed),
        }

        def pack() -> bytes:
            return model_file.pack(
                blob, models=self.names, settings=settings, metrics=metrics, built_at_us=self.built_at_us
            )

        served = Predictor(*model_file.unpack(pack()))
        self._prove(served, metrics["new_prompts"]["pinball"])
        settings[probes.SETTING] = probes.told(served.log_quantiles, self.names)
        artifact = pack()
        seconds = round(time.perf_counter() - started, 1)
        self.tell(1.0, f"done in {seconds:g} s")
        return Trained(artifact=artifact, metrics={**metrics, "seconds": seconds})

    def _prove(self, served: Predictor, pinball_of_new: float) -> None:
        """That what a router will load knows its own training rows at least as well as new prompts were known.

        Raises:
            TrainingFailed: it does not.
        """
        rows = np.flatnonzero(self._judged)
        rows = rows[:: max(1, len(rows) // _PROVED)]
        told = [self.samples[i] for i in rows.tolist()]
        logs, _ = served.log_quantiles([one.features for one in told], [one.model for one in told])
        found = pinball(logs, self.y[rows])
        if not found <= _FAR * pinball_of_new:
            raise TrainingFailed(
                f"the file's own pinball loss is {found:.3f}, that of the parts on new prompts {pinball_of_new:.3f}"
            )

    def _served(self, weights: Array, batch: Batch) -> Array:
        """Weights of the whole vector; zeros where the kernel was left out."""
        if self.options.with_kernel:
            return weights
        return np.zeros((len(weights), batch.prompt.shape[1]), np.float32)

    def _kernel(self, vectors: Array, rows: NDArray[np.bool_]) -> Any:
        return fit_kernel(
            vectors,
            self.prompt_of[rows],
            self.models[rows],
            len(self.names),
            self.y[rows],
            self.is_cut[rows],
            seed=self.seed,
        )

    def _trees(self, inputs: Array, y: Array, folds: Ints) -> tuple[Array, trees.Trees]:
        expected = np.zeros(len(self.y), np.float32)
        whole = FOLDS * _FEW_BOOSTERS + trees.BOOSTERS
        done = 0
        for fold in range(FOLDS):
            self.tell(0.2 + 0.5 * done / whole, f"trees, fold {fold + 1} of {FOLDS}")
            rows, held = folds != fold, folds == fold
            forest = self._forest(inputs, y, rows, _FEW_BOOSTERS, lambda share: None)
            expected[held] = forest.predict(inputs[held])
            done += _FEW_BOOSTERS
        self.tell(0.2 + 0.5 * done / whole, "trees on all rows")
        forest = self._forest(
            inputs,
            y,
            np.ones(len(self.y), np.bool_),
            trees.BOOSTERS,
            lambda share: self.tell(0.2 + 0.5 * (done + share * trees.BOOSTERS) / whole, ""),
        )
        return expected, forest

    def _forest(
        self, inputs: Array, y: Array, rows: NDArray[np.bool_], boosters: int, on_progress: Callable[[float], None]
    ) -> trees.Trees:
        return trees.fit_trees(
            inputs[rows],
            y[rows],
            seed=self.seed,
            boosters=boosters,
            on_progress=on_progress,
        )

    def _mixture(self, rows: Rows, n_experts: int, seed: int) -> Any:
        return fit_mixture(
            rows,
            n_models=len(self.names),
            n_experts=n_experts,
            seed=seed,
            on_progress=lambda share: None,
            should_stop=self._should_stop,
        )

    def _experts(self, rows: Rows, folds: Ints) -> tuple[int, dict[str, float]]:
        """K by the pinball loss on the first fold; the figures of all candidates."""
        if len(self.options.experts) == 1:
            return self.options.experts[0], {}
        rest, held = np.flatnonzero(folds != 0), np.flatnonzero(folds == 0)
        held = judged if len(judged := held[self._judged[held]]) else held
        losses: dict[int, float] = {}
        for i, k in enumerate(self.options.experts):
            self.tell(0.7 + 0.06 * i / len(self.options.experts), f"mixture of {k}, judged on a fold")
            logs, _ = _predict(self._mixture(rows.take(rest), k, self.seed), rows.take(held))
            losses[k] = pinball(logs, self.y[held])
        best = min(losses, key=lambda k: (losses[k], k))
        return best, {str(k): round(loss, 5) for k, loss in losses.items()}

    def _mixtures_by_fold(self, rows: Rows, folds: Ints, n_experts: int) -> tuple[Array, Array]:
        logs = np.zeros((len(self.y), len(LEVELS)), np.float32)
        away = np.zeros(len(self.y), np.float32)
        for fold in range(FOLDS):
            self.tell(0.76 + 0.12 * fold / FOLDS, f"mixture of {n_experts}, fold {fold + 1} of {FOLDS}")
            rest, held = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
            logs[held], away[held] = _predict(self._mixture(rows.take(rest), n_experts, self.seed), rows.take(held))
        return logs, away


def _predict(mixture: Any, rows: Rows) -> tuple[Array, Array]:
    return forward(tensors(mixture), rows.inputs, rows.models, rows.base)


def _distinct(features: Sequence[Features]) -> tuple[list[Features], Ints]:
    """Distinct prompts, and which of them each sample is of."""
    place: dict[bytes, int] = {}
    prompts: list[Features] = []
    of = []
    for one in features:
        key = prompt_key(one)
        if key not in place:
            place[key] = len(prompts)
            prompts.append(one)
        of.append(place[key])
    return prompts, np.array(of, np.int64)


def _folds(groups: Ints, seed: int) -> Ints:
    """Fold of each prompt; a group is in one, unless it has more prompts than a fold should.

    Traffic of one template is one group: kept together it would leave the other folds with nothing.
    """
    sizes = np.bincount(groups)
    alone = groups.max() + 1 + np.arange(len(groups))
    names, of = np.unique(np.where(sizes[groups] > len(groups) / FOLDS, alone, groups), return_inverse=True)
    fold = np.arange(len(names)) % FOLDS
    np.random.default_rng(seed).shuffle(fold)
    return fold[of]


def pinball(logs: Array, y: Array) -> float:
    """Mean pinball loss over rows and levels, of logs."""
    rest = y[:, None] - logs
    levels = np.array(LEVELS, np.float32)
    return float(np.maximum(levels * rest, (levels - 1.0) * rest).mean())


def _figures(logs: Array, y: Array, away: Array) -> dict[str, float]:
    median, tokens = np.expm1(logs[:, conformal.MIDDLE]), np.expm1(y)
    total = float(((y - y.mean()) ** 2).sum())
    is_away = y > np.log1p(RUNAWAY_TOKENS)
    return {
        "mae": round(float(np.abs(median - tokens).mean()), 3),
        "median_relative_error": round(float(np.median(np.abs(median - tokens) / tokens)), 4),
        "r2_log": round(1.0 - float(((y - logs[:, conformal.MIDDLE]) ** 2).sum()) / total, 4) if total else 0.0,
        "pinball": round(pinball(logs, y), 5),
        "coverage_80": round(float(((logs[:, 1] <= y) & (y <= logs[:, -2])).mean()), 4),
        "coverage_90": round(float(((logs[:, 0] <= y) & (y <= logs[:, -1])).mean()), 4),
        "runaway_share": round(float(is_away.mean()), 5),
        "runaway_predicted": round(float(away.mean()), 5),
    }


def _known_widths(logs: Array, y: Array, is_cut: NDArray[np.bool_], prompt_of: Ints, seed: int) -> list[float]:
    """Width of the 90% interval about a corrected median, by number of answers known, over the width without.

    Replays the rows in random order with the rule of ``memory``; cut ones teach as there and are not judged. Never
    wider than without a memory.
    """
    known: dict[int, list[float]] = {}
    scores: list[list[float]] = [[] for _ in range(_KNOWN + 1)]
    median = logs[:, conformal.MIDDLE]
    for i in np.random.default_rng(seed).permutation(len(y)).tolist():
        before = known.setdefault(int(prompt_of[i]), [])
        n = len(before)
        residual = float(y[i] - median[i])
        believed = float(np.median(before)) * n / (n + SHRINK_EXACT) if n else 0.0
        rest = residual - believed
        if not is_news(residual, believed, is_complete=not is_cut[i]):
            continue
        if not is_cut[i]:
            half = float(logs[i, -1] - median[i]) if rest > 0 else float(median[i] - logs[i, 0])
            scores[min(n, _KNOWN)].append(abs(rest) / max(half, 1e-3))
        before.append(min(max(residual, -REACH), REACH))
        del before[:-SIZE]
    covered = LEVELS[-1] - LEVELS[0]
    widths = [1.0]
    for own in scores[1:]:
        wide = float(np.quantile(own, covered)) if len(own) >= 50 else widths[-1]
        widths.append(round(min(max(wide, 0.4), widths[-1]), 4))
    return widths
