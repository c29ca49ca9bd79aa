"""Questions with known answers, by which a loaded model proves that it is the one that was trained.

A digest says that a file is as it was written, not that it was written right, nor that this program reads it as the
one did that wrote it. So a model's file holds what it said of ``PROMPTS`` when it was trained, and whoever loads it
asks again.

The prompts are made up, for a model's file must hold none of anybody's; their hashed words are spread over all there
are, so that most weights have a say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.features import ID_BITS, MAX_IDS, Features, RequestFacts, extract

Array = NDArray[np.float32]
Ask = Callable[[Sequence[Features], Sequence[str]], tuple[Array, Array]]

SETTING = "probes"
TOLERANCE = 0.01
"""Of a length, and of the probability of running away: far above what sums in another order change."""

PROMPTS = (
    "Yes or no: is the moon larger than Mars?",
    "Write a Python function that merges two sorted lists, and explain it step by step.",
    "Translate into French: the train leaves at nine.",
    "Write a long, detailed story about a lighthouse keeper in twelve chapters.",
    "Solve: 3x + 7 = 25. Answer with one JSON object that holds reasoning and answer.",
    "List ten rivers of Asia in a table with their lengths.",
    "Summarise the following text in two sentences.\n\n" + "The harbour was rebuilt after the flood. " * 60,
    "¿Por qué el cielo es azul? Explica en detalle.",
)
_FACTS = (RequestFacts(max_new_tokens=1_024, temperature=0.7, top_p=0.9), RequestFacts(is_greedy=True, is_chat=True))


def probes(models: Sequence[str]) -> tuple[list[Features], list[str]]:
    """Questions for a model of these served models, one of them unknown to it."""
    asked = [extract(prompt, _FACTS[i % 2]) for i, prompt in enumerate(PROMPTS)]
    step = (1 << ID_BITS) // MAX_IDS
    for i, one in enumerate(asked[: len(PROMPTS)]):
        ids = np.arange(i * step // len(PROMPTS), 1 << ID_BITS, step).astype(np.uint16)
        asked.append(Features(one.dense, ids, np.ones(len(ids), np.uint8)))
    stride = max(1, len(models) // len(asked))
    return asked, [*(models[i * stride % len(models)] for i in range(len(asked) - 1)), ""]


def told(ask: Ask, models: Sequence[str]) -> list[float]:
    """What a model says of the probes, for its file. ``ask``: ``Predictor.log_quantiles``."""
    logs, runaway = ask(*probes(models))
    return [round(number, 5) for number in np.concatenate((logs.ravel(), runaway)).tolist()]


def check(ask: Ask, models: Sequence[str], expected: Sequence[float]) -> None:
    """Raises:
    ValueError: the model says something else than it did.
    """
    found = np.array(told(ask, models))
    if len(found) != len(expected):
        raise ValueError(f"{len(expected)} answers to {len(found)} questions with known answers")
    far = np.abs(found - np.array(expected))
    if not (far <= TOLERANCE).all():
        raise ValueError(
            f"{int((~(far <= TOLERANCE)).sum())} of {len(far)} answers to questions with known answers are not those "
            "of its training"
        )
