"""Requests whose answers follow from their prompts, as booked events with features: something that can be learnt."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

from controlplane.common.clock import to_us
from router_ext.predict.features import FEATURE_VERSION, RequestFacts, extract
from router_ext.wire.controlplane import UsageEvent
from tests.support.control_plane import predicted_event

_LETTERS = "bdfgklmnprstv"
TASKS = ("Write {n} words about {topic}.", "Explain {topic} in {n} words.", "I need a text of {n} words on {topic}.")
FALLBACK = [20, 30, 80, 200, 450, 700, 900]


def _topic(draw: random.Random) -> str:
    """Four words that hardly any other prompt has, so that prompts are not near-duplicates of each other."""
    return " ".join("".join(draw.choice(_LETTERS) + draw.choice("aeiou") for _ in range(3)) for _ in range(4))


def answered(
    n: int, *, pool: str, until: datetime, seed: int = 1, noise: float = 0.1, **fields: Any
) -> list[UsageEvent]:
    """Events of the two days before ``until``: the longer the text that was asked for, the longer the answer.

    Args:
        noise: standard deviation of the log length around what the prompt says.
    """
    draw = random.Random(seed)
    events = []
    for i in range(n):
        words = draw.choice((20, 40, 80, 150, 300, 600))
        prompt = draw.choice(TASKS).format(n=words, topic=_topic(draw))
        length = max(1, round(1.4 * words * draw.lognormvariate(0.0, noise)))
        arrived = to_us(until - timedelta(days=2) * (1 - i / n))
        events.append(
            predicted_event(
                **{
                    "event": f"evt_{seed}_{i:06d}",
                    "pool": pool,
                    "tenant": f"ten_{i % 3}",
                    "key": f"key_{i % 3}",
                    "model": "org/model",
                    "arrived_at_us": arrived,
                    "ended_at_us": arrived + 1_000_000,
                    "output_tokens": length,
                    "quantiles": FALLBACK,
                    "fallback": FALLBACK,
                    "source": "pool",
                    "length_model": None,
                    "features": extract(prompt, RequestFacts(max_new_tokens=1_024, temperature=0.7)).pack(),
                    "feature_version": FEATURE_VERSION,
                    **fields,
                }
            )
        )
    return events
