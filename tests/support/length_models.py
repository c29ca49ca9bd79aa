"""A small trained length model: prompts that ask for so many words, and answers that have about as many tokens."""

from __future__ import annotations

import random
from functools import cache

from router_ext.predict.features import RequestFacts, extract
from router_ext.predict.training import Options, Sample, train

SUBJECTS = ("rivers", "trains", "bread", "the moon", "chess", "maps", "wool", "bees", "glass", "rain")
SIZES = {"one sentence": 30, "a paragraph": 120, "a short story": 500, "a long essay": 1_200}


def prompt(size: str, number: int) -> str:
    """Prompts of different numbers have little more in common than what they ask for."""
    rng = random.Random(f"{size} {number}")
    notes = " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 8))) for _ in range(30))
    return f"Please write {size} about {SUBJECTS[number % len(SUBJECTS)]}. My notes: {notes}"


@cache
def artifact(seed: int = 1) -> bytes:
    """Trained in about a second; the same bytes for the same seed."""
    rng = random.Random(seed)
    samples = [
        Sample(
            features=extract(prompt(size, number), RequestFacts()),
            model="main",
            output_tokens=max(1, round(tokens * rng.lognormvariate(0.0, 0.25))),
        )
        for number in range(40)
        for size, tokens in SIZES.items()
        for _ in range(2)
    ]
    return train(samples, seed=seed, built_at_us=1, options=Options(experts=(1,), with_trees=False)).artifact
