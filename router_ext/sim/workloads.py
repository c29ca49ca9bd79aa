"""Arrivals: when a client sends, and how large its requests are.

    pattern (instants) + sizes (lengths) --> source (jobs)

Every client draws from random streams of its own, named by suite, seed, client and purpose, so that its arrivals
depend neither on another client's nor on the policy.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from router_ext.core.ids import KeyId
from router_ext.sim.answers import Answer, Kind
from router_ext.sim.jobs import Agent, Job
from router_ext.sim.traces import Row

Pattern: TypeAlias = Callable[[random.Random], Iterator[float]]
"""Instants of arrival, ascending, in seconds; may be endless."""

Sizes: TypeAlias = Callable[[random.Random], tuple[int, int]]
"""Input and output tokens of the next request."""

_GUESS = (0.5, 1.5)
"""The default predictor is off by a factor drawn evenly from here."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The random streams of one client in one run; ``end_s``: when it stops sending."""

    name: str
    tenant: int
    end_s: float

    def rng(self, purpose: str) -> random.Random:
        """The stream for one purpose, from its beginning."""
        return random.Random(f"{self.name}:{purpose}")


Source: TypeAlias = Callable[[Streams], Iterator[Job]]
"""A client's jobs in order of arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One tenant and its traffic.

    Attributes:
        ttft_target_s: of its tier, None for a tier without a target.
        completion_target_s: judged in the result, unknown to the scheduler.
        is_batch: its last completion is the makespan, and open-ended clients stop with it.
        is_open_ended: sends until the batch is over instead of until the suite's end.
    """

    name: str
    source: Source
    weight: float = 1.0
    ttft_target_s: float | None = None
    completion_target_s: float | None = None
    is_batch: bool = False
    is_open_ended: bool = False


# --- when ----------------------------------------------------------------------------------------------------------


def evenly(rate: float) -> Pattern:
    """One every ``1 / rate`` seconds, with a random phase."""

    def instants(rng: random.Random) -> Iterator[float]:
        phase = rng.random()
        return ((count + phase) / rate for count in itertools.count())

    return instants


def poisson(rate: float) -> Pattern:
    """Independent exponential gaps."""

    def instants(rng: random.Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += rng.expovariate(rate)
            yield now

    return instants


def ramp(first_rate: float, last_rate: float, *, over_s: float) -> Pattern:
    """Evenly spaced at a rate that changes linearly: one whenever the integral of the rate passes a whole number."""

    def instants(rng: random.Random) -> Iterator[float]:
        phase = rng.random()
        slope = (last_rate - first_rate) / over_s
        for count in itertools.count():
            root = first_rate * first_rate + 2.0 * slope * (count + phase)
            yield (root**0.5 - first_rate) / slope

    return instants


def on_off(pattern: Pattern, *, period_s: float = 60.0) -> Pattern:
    """The pattern while on, nothing while off; begins with on."""

    def instants(rng: random.Random) -> Iterator[float]:
        return (now for now in pattern(rng) if int(now // period_s) % 2 == 0)

    return instants


def phases(*patterns: Pattern, each_s: float) -> Pattern:
    """One pattern after another, each for so long, each counting time from its own start."""

    def instants(rng: random.Random) -> Iterator[float]:
        for index, pattern in enumerate(patterns):
            for now in pattern(rng):
                if now >= each_s:
                    break
                yield index * each_s + now

    return instants


def at_once(count: int, *, at_s: float = 0.0) -> Pattern:
    """So many at one instant."""

    def instants(rng: random.Random) -> Iterator[float]:
        return itertools.repeat(at_s, count)

    return instants


# --- how large -----------------------------------------------------------------------------------------------------


def fixed(input_tokens: int, output_tokens: int) -> Sizes:
    """Always the same."""
    return lambda _: (input_tokens, output_tokens)


def between(inputs: tuple[int, int], outputs: tuple[int, int]) -> Sizes:
    """Both drawn evenly, ends included."""
    return lambda rng: (rng.randint(*inputs), rng.randint(*outputs))


def drawn_from(pairs: Sequence[tuple[int, int]]) -> Sizes:
    """Lengths of real requests, drawn with replacement."""
    return lambda rng: pairs[rng.randrange(len(pairs))]


# --- both ----------------------------------------------------------------------------------------------------------


def requests(pattern: Pattern, sizes: Sizes, *, max_new_tokens: int | None = None) -> Source:
    """Independent requests. ``max_new_tokens`` None: each gives as its limit exactly what it will get."""

    def jobs(streams: Streams) -> Iterator[Job]:
        lengths, guesses = streams.rng("lengths"), streams.rng("guesses")
        for now in pattern(streams.rng("arrivals")):
            if now >= streams.end_s:
                return
            input_tokens, output_tokens = sizes(lengths)
            yield Job(
                tenant=streams.tenant,
                arrival_s=now,
                input_tokens=input_tokens,
                output_tokens=output_tokens if max_new_tokens is None else min(output_tokens, max_new_tokens),
                max_new_tokens=output_tokens if max_new_tokens is None else max_new_tokens,
                guess=guesses.uniform(*_GUESS),
            )

    return jobs


def recorded(rows: Sequence[Row], *, max_new_tokens: int) -> Source:
    """The requests of one client of a trace; outputs are cut at the limit it gives."""

    def jobs(streams: Streams) -> Iterator[Job]:
        guesses = streams.rng("guesses")
        for row in rows:
            yield Job(
                tenant=streams.tenant,
                arrival_s=row.at_s,
                input_tokens=row.input_tokens,
                output_tokens=min(row.output_tokens, max_new_tokens),
                max_new_tokens=max_new_tokens,
                guess=guesses.uniform(*_GUESS),
            )

    return jobs


def answered(rows: Sequence[Row], kinds: Sequence[Kind], *, max_new_tokens: int) -> Source:
    """The instants of one client of a trace; what it sends is one of the kinds, drawn by the run's seed.

    Every prompt is sent once before one is sent again, each time with one of that model's answers to it.
    """

    def jobs(streams: Streams) -> Iterator[Job]:
        guesses, answers = streams.rng("guesses"), streams.rng("answers")
        kind = kinds[answers.randrange(len(kinds))]
        order: list[tuple[Answer, ...]] = []
        for row in rows:
            if not order:
                order = list(kind)
                answers.shuffle(order)
            answer = answers.choice(order.pop())
            yield Job(
                tenant=streams.tenant,
                arrival_s=row.at_s,
                input_tokens=answer.prompt.input_tokens,
                output_tokens=min(answer.output_tokens, max_new_tokens),
                max_new_tokens=max_new_tokens,
                guess=guesses.uniform(*_GUESS),
                answer=answer,
            )

    return jobs


def agents(
    pattern: Pattern,
    *,
    fan_out: tuple[int, int] = (2, 16),
    inputs: tuple[int, int] = (64, 512),
    short: tuple[int, int] = (32, 128),
    long: tuple[int, int] = (200, 500),
    long_ratio: float = 0.3,
    has_reduce: bool = False,
) -> Source:
    """Tasks of several calls at once, each task with a key of its own.

    Args:
        fan_out: parallel calls of one agent. long_ratio: share of agents whose calls write ``long`` outputs.
        has_reduce: one more call of the same kind follows when all others are back.
    """

    def jobs(streams: Streams) -> Iterator[Job]:
        lengths, guesses = streams.rng("lengths"), streams.rng("guesses")
        for number, now in enumerate(pattern(streams.rng("arrivals")), 1):
            if now >= streams.end_s:
                return
            agent = Agent(f"agent_{number:05d}", arrival_s=now)
            num_calls = lengths.randint(*fan_out)
            outputs = long if lengths.random() < long_ratio else short
            for _ in range(num_calls + has_reduce):
                output_tokens = lengths.randint(*outputs)
                agent.calls.append(
                    Job(
                        tenant=streams.tenant,
                        arrival_s=now,
                        input_tokens=lengths.randint(*inputs),
                        output_tokens=output_tokens,
                        max_new_tokens=output_tokens,
                        guess=guesses.uniform(*_GUESS),
                        key=KeyId(f"key_{number:05d}"),
                        agent=agent,
                    )
                )
            if has_reduce:
                agent.reduce = agent.calls.pop()
            agent.num_open = num_calls
            yield from agent.calls

    return jobs
