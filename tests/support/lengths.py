"""Answers whose lengths follow a rule that prompts show, for tests of what learns it."""

from __future__ import annotations

import math
import random
from functools import cache

from router_ext.predict.features import RequestFacts, extract
from router_ext.predict.training import Options, Sample, Trained, train

TOPICS = "rivers music bread engines stars chess gardens bridges poems insects trade maps".split()
ASKS = {"answer with one word about": 3.0, "explain briefly": 4.5, "write a long essay about": 6.5}
MODELS = {"terse": -0.5, "plain": 0.0, "wordy": 0.6}
QUICK = Options(experts=(1, 2), with_trees=False)


def prompt(rng: random.Random) -> tuple[str, float]:
    """A prompt, and the mean log length of its answers by an average model."""
    ask, level = rng.choice(list(ASKS.items()))
    words = " and ".join(rng.sample(TOPICS, 4))
    return f"{ask} {words}, number {rng.randrange(10_000)}", level


def samples(n_prompts: int, seed: int, noise: float = 0.2) -> list[Sample]:
    """Answers of every model to so many prompts."""
    rng = random.Random(seed)
    found = []
    for _ in range(n_prompts):
        text, level = prompt(rng)
        features = extract(text, RequestFacts(max_new_tokens=4_096, temperature=0.7))
        for model, more in MODELS.items():
            tokens = max(1, round(math.exp(level + more + rng.gauss(0.0, noise))))
            found.append(Sample(features=features, model=model, output_tokens=tokens))
    return found


@cache
def trained(seed: int = 1) -> Trained:
    """A model of 240 prompts, made once per test process."""
    return train(samples(240, seed=7), seed=seed, built_at_us=1, options=QUICK)
