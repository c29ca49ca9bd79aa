"""What routers would have sent of some days: usage events in the order of their arrival, the same for the same seed.

Busy tenants send far more than others, most of it with few of their keys; there is more traffic by day than by night.
One in twenty has an explanation: it failed, was cut, or waited for over a second.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from typing import TypeAlias

import msgspec

from controlplane.api.benchset.configuration import POOLS, Configured
from controlplane.common.clock import to_us
from router_ext.predict.baseline import LEVELS
from router_ext.wire.controlplane import MomentRecord, PredictionRecord, ReasonRecord, UsageBatch, UsageEvent

EXPLAINED = 0.05
"""Share of events with an explanation."""
TWICE = 0.025
"""Share of a batch's events that were sent before."""
Explained: TypeAlias = tuple[list[str], list[ReasonRecord], list[MomentRecord]]
_NOTHING: Explained = ([], [], [])
_DAY_US = 86_400_000_000
_DIALECTS = ("chat", "generate_stream", "completions")
_NOT_COMPLETED = (("cancelled", None), ("failed", "backend_lost"), ("expired", "queue_timeout"))


def arrivals(count: int, from_at: datetime, to_at: datetime, chance: random.Random) -> list[int]:
    """Instants in microseconds, in order; the density follows the hour of the day (UTC), 1 to 5."""
    first, span = to_us(from_at), to_us(to_at) - to_us(from_at)
    found: list[int] = []
    while len(found) < count:
        at = first + int(chance.random() * span)
        if chance.random() < 0.6 - 0.4 * math.cos(2 * math.pi * (at % _DAY_US) / _DAY_US):
            found.append(at)
    return sorted(found)


def make_events(configured: Configured, instants: list[int], chance: random.Random) -> Iterator[UsageEvent]:
    """One event for each instant; some 15 us each."""
    tenants, pools = configured.tenants, list(configured.pools.items())
    backends = {name: list(configured.backends[name]) for name in POOLS}
    for number, at in enumerate(instants):
        place = int(len(tenants) * chance.random() ** 3)
        keys = configured.keys[place]
        pool, pool_id = pools[(place + (chance.random() < 0.2)) % len(pools) if chance.random() < 0.7 else 0]
        is_explained = chance.random() < EXPLAINED
        outcome, error = ("completed", None)
        wait_us = int(chance.expovariate(1 / 40_000)) % 900_000
        if is_explained:
            wait_us += 1_000_001
            if chance.random() < 0.6:
                outcome, error = chance.choice(_NOT_COMPLETED)
        prompt = 1 + int(chance.lognormvariate(5.5, 1.1))
        output = 1 + int(chance.lognormvariate(4.8, 0.9))
        started = at + wait_us
        first_token = started + 30_000 + prompt * 60 + int(chance.expovariate(1 / 15_000))
        ended = first_token + output * 22_000
        lines, reasons, timeline = _explained(wait_us, outcome) if is_explained else _NOTHING
        yield UsageEvent(
            event=f"evt_{at:016x}{number & 0xFFFFFF:06x}",
            request=f"req_{at:016x}{number & 0xFFFFFF:06x}",
            router=f"router-{1 + number % 2}",
            tenant=tenants[place],
            key=keys[int(len(keys) * chance.random() ** 4)],
            pool=pool_id,
            model=pool,
            tier=chance.choice(configured.tiers[place]),
            dialect=_DIALECTS[number % 3],
            outcome=outcome,
            arrived_at_us=at,
            ended_at_us=ended,
            first_dispatch_us=started,
            first_token_us=first_token,
            prompt_tokens=prompt,
            output_tokens=output,
            token_source="backend",
            segments=1 + output // 256,
            preemptions=int(is_explained and number % 5 == 0),
            resumed_prefill_tokens=prompt * (output // 256),
            kv_token_seconds=(prompt + output / 2) * (ended - started) / 1e6,
            max_new_tokens=1_024,
            predicted_tokens=output // 2 + 64,
            predictor="pool",
            finish_reason="eos_token" if outcome == "completed" else None,
            resume_class="exact",
            backends=[chance.choice(backends[pool])],
            error_code=error,
            explanation=lines,
            reasons=reasons,
            timeline=timeline,
        )


def _explained(wait_us: int, outcome: str) -> Explained:
    wait_s = wait_us / 1e6
    lines = [
        f"It waited {wait_s:.2f} s in all.",
        f"{wait_s * 0.7:.2f} s: 12 requests of tenants with less service were ahead.",
        f"It ended as {outcome}.",
    ]
    reasons = [
        ReasonRecord(cause="turn", text="Others were ahead.", seconds=wait_s * 0.7, counts={"ahead": 12}),
        ReasonRecord(cause="memory", text="No backend had room.", seconds=wait_s * 0.3),
    ]
    timeline = [
        MomentRecord(at_s=0.0, step="arrived", text="Taken."),
        MomentRecord(at_s=wait_s, step="dispatched", text="Sent.", backend="gpu-1"),
        MomentRecord(at_s=wait_s + 0.05, step="first_token", text="First token.", backend="gpu-1", tokens=1),
        MomentRecord(at_s=wait_s + 2.0, step="ended", text=f"Ended as {outcome}.", tokens=80),
    ]
    return lines, reasons, timeline


def with_predictions(events: list[UsageEvent], chance: random.Random) -> list[UsageEvent]:
    """The same events with a prediction and features each, as routers with a prediction worker send them."""
    levels = len(LEVELS)

    def predicted(event: UsageEvent) -> PredictionRecord:
        centre = event.output_tokens * chance.lognormvariate(0.0, 0.5)
        return PredictionRecord(
            quantiles=[1 + int(centre * 0.4 * (1.3**n)) for n in range(levels)],
            fallback=[40 * (n + 1) for n in range(levels)],
            source=chance.choice(("key", "tenant", "pool")),
            features=chance.randbytes(400),
            feature_version=1,
        )

    return [msgspec.structs.replace(event, prediction=predicted(event)) for event in events]


def bodies(events: Iterator[UsageEvent], size: int, chance: random.Random, *, routers: int = 1) -> Iterator[bytes]:
    """JSON of batches of ``size`` events, sent by ``routers`` in turn; the last one may be shorter.

    ``TWICE`` of each are of the batch that the same router sent before, which was acknowledged by then.
    """
    n_twice = round(size * TWICE)
    sent: deque[list[UsageEvent]] = deque(maxlen=routers)
    for number in itertools.count():
        before = sent[0] if len(sent) == routers else []
        again = chance.sample(before, n_twice) if len(before) >= n_twice else []
        fresh = list(itertools.islice(events, size - len(again)))
        if not fresh:
            return
        yield msgspec.json.encode(UsageBatch(router=f"router-{1 + number % routers}", events=[*again, *fresh]))
        sent.append(fresh)
