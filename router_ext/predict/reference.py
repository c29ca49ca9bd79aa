"""What length models are compared with, trained on the same rows.

``boosting`` is what a data scientist builds first: gradient boosting with an absolute loss of ln(1 + tokens) on the
served model, the sampling parameters, counts and cue words of the prompt, and 64 directions of its TF-IDF matrix.
The others know no prompt.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.answers import Answer
from router_ext.predict.baseline import Baseline, LengthSample, build_baseline

Floats = NDArray[np.float64]

_CUES = (
    "```", "json", "code", "function", "write", "list", "essay", "story", "explain", "summar", "translate", "step",
    "words", "paragraph", "short", "brief", "detail", "table", "example", "def ", "class ", "poem", "python", "how",
    "what", "why",
)  # fmt: skip
_DIRECTIONS = 64
_LAST = 5


def boosting(train: Sequence[Answer], test: Sequence[Answer], *, seed: int) -> Floats:
    """Medians [test] of boosting on simple features, TF-IDF and SVD. Cost: some ten seconds for 40,000 rows."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = sorted({answer.text for answer in train})
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=min(2, len(texts)), max_features=50_000)
    matrix = words.fit_transform(texts)
    svd = TruncatedSVD(min(_DIRECTIONS, matrix.shape[1] - 1), random_state=seed).fit(matrix)
    models = {name: i for i, name in enumerate(sorted({answer.model for answer in train}))}

    def inputs(answers: Sequence[Answer]) -> Floats:
        distinct = sorted({answer.text for answer in answers})
        place = {text: i for i, text in enumerate(distinct)}
        counts, directions = np.array([_counts(text) for text in distinct]), svd.transform(words.transform(distinct))
        of = [place[answer.text] for answer in answers]
        facts = [[models.get(answer.model, np.nan), *_facts(answer)] for answer in answers]
        return np.concatenate((np.array(facts, np.float64), counts[of], directions[of]), axis=1)

    regressor = HistGradientBoostingRegressor(
        loss="absolute_error",
        categorical_features=[0] if len(models) <= 255 else None,
        max_iter=400,
        learning_rate=0.06,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=seed,
    )
    known = inputs(train)
    # What no request of the training rows states says nothing, and the regressor takes no column without a number.
    stated = ~np.isnan(known).all(axis=0)
    regressor.fit(known[:, stated], np.log1p([answer.output_tokens for answer in train]))
    return np.expm1(np.asarray(regressor.predict(inputs(test)[:, stated]), np.float64))


def _facts(answer: Answer) -> list[float]:
    facts = answer.facts
    stated = (facts.max_new_tokens, facts.temperature, facts.top_p, facts.top_k, facts.typical_p)
    return [np.nan if value is None else float(value) for value in (*stated, facts.repetition_penalty)]


def _counts(text: str) -> list[float]:
    lower, n = text.lower(), max(1, len(text))
    shares = (str.isdigit, str.isupper, lambda c: ord(c) > 127, lambda c: not c.isalnum() and not c.isspace())
    return [
        len(re.findall(r"\w+|[^\w\s]", text)),
        len(text),
        len(text.split()),
        text.count("\n"),
        text.count("?"),
        *(sum(map(is_one, text)) / n for is_one in shares),
        *map(lower.count, _CUES),
    ]


def trivial(train: Sequence[Answer], test: Sequence[Answer], order: NDArray[np.int64]) -> dict[str, Floats]:
    """Medians [test] of those that know no prompt: everybody's median, the model's, the empirical quantiles of the
    tenant, else the model, and the mean of the tenant's last five answers, replayed in this order (VTC's predictor)."""
    lengths = defaultdict(list)
    for answer in train:
        lengths[answer.model].append(answer.output_tokens)
    everybody = float(np.median([answer.output_tokens for answer in train]))
    medians = {model: float(np.median(of)) for model, of in lengths.items()}
    rows = [LengthSample(a.tenant, a.tenant, a.model, a.output_tokens, a.is_complete) for a in train]
    empirical = Baseline.from_bytes(build_baseline(rows, built_at_us=0))
    last: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_LAST))
    means = np.zeros(len(test))
    for i in order.tolist():
        own = last[test[i].tenant]
        means[i] = sum(own) / len(own) if own else everybody
        own.append(test[i].output_tokens)
    return {
        "global_median": np.full(len(test), everybody),
        "model_median": np.array([medians.get(answer.model, everybody) for answer in test]),
        "empirical_quantiles": np.array(
            [empirical.predict(a.tenant, a.tenant, a.model).median for a in test], np.float64
        ),
        "tenant_last5_mean": means,
    }
