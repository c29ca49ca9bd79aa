"""The router's length model in virtual time: the same service that answers in its worker process, asked directly.

    arrival --Ask--> LengthService --quantiles--> RequestSpec          end --Ended--> history and memory

So a prediction is what the router would have had at that instant: the model's, corrected by what the same prompt, the
same key and the same tenant have got by then. It takes no virtual time: a router waits for it while it counts tokens.
"""

from __future__ import annotations

import hashlib
import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

from router_ext.errors import ArtifactRefused, SimulationError
from router_ext.predict.messages import Ask, Ended, plausible
from router_ext.predict.prompts import bounded
from router_ext.sim.answers import NEEDED, Answer
from router_ext.sim.jobs import Job

_POOL = "pool"

_KEY = b"virtual time"
"""Of signatures, which nobody needs to hide here: the same run is to give the same numbers."""

_WORDS = (
    "the",
    "answer",
    "list",
    "of",
    "a",
    "value",
    "city",
    "count",
    "please",
    "write",
    "number",
    "name",
    "why",
    "to",
)
"""What a client says of whom only lengths are known."""


@cache
def read_model(path: Path) -> bytes:
    """The artifact in a file.

    Raises:
        SimulationError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise SimulationError(f"{path}: {error.strerror or error}") from error


class Foresight:
    """See the module. One per run: what it learns belongs to it.

    Raises:
        SimulationError: the artifact is refused.
    """

    def __init__(self, artifact: bytes) -> None:
        try:
            from router_ext.predict.service import LengthService
        except ModuleNotFoundError as error:
            raise SimulationError(f"a length model needs {NEEDED}: {error}") from error
        self._now_s = 0.0
        self._service = LengthService(key=_KEY, clock=lambda: self._now_s)
        try:
            model = self._service.load(artifact)
        except ArtifactRefused as error:
            raise SimulationError(f"the length model cannot be used: {error.message}") from error
        self._service.assign(_POOL, hashlib.sha256(artifact).hexdigest(), model)
        self._asked: dict[Job, tuple[int, tuple[int, ...] | None]] = {}
        self._count = 0

    def quantiles(self, job: Job, base: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """The distribution of a request that has just arrived; None: neither model nor memory says anything.

        Args:
            base: empirical quantiles of the same instant.
        """
        if job in self._asked:
            return self._asked[job][1]
        self._count += 1
        self._now_s = job.arrival_s
        answer = job.answer
        facts = facts_of(answer)
        question = Ask(
            id=self._count,
            pool=_POOL,
            model="" if answer is None else answer.model,
            tenant=str(job.tenant),
            key=str(job.key or job.tenant),
            prompt=bounded(_chatter(job) if answer is None else answer.prompt.text, ()),
            is_chat=facts.is_chat,
            max_new_tokens=job.max_new_tokens,
            temperature=facts.temperature,
            top_p=facts.top_p,
            is_greedy=facts.is_greedy,
            has_stop=False,
            base=base,
        )
        answers, _ = self._service.answer([question])
        stated = answers[0].quantiles if answers else None
        known = None if stated is None else plausible(stated)
        self._asked[job] = self._count, known
        return known

    def finished(self, job: Job) -> None:
        """The request came to its end: its length is learned."""
        asked = self._asked.pop(job, None)
        if asked is not None:
            self._now_s = self._now_s if job.finish_s is None else job.finish_s
            self._service.ended(Ended(asked[0], job.output_tokens, job.output_tokens < job.max_new_tokens))


class Facts(NamedTuple):
    """What a router would be told of sampling; what is not known is what a client gets who does not say."""

    temperature: float
    top_p: float
    is_greedy: bool
    is_chat: bool


def facts_of(answer: Answer | None) -> Facts:
    """How this answer was sampled."""
    temperature = 1.0 if answer is None or answer.temperature is None else answer.temperature
    top_p = 1.0 if answer is None or answer.top_p is None else answer.top_p
    return Facts(temperature, top_p, temperature == 0.0, is_chat=True)


def _chatter(job: Job) -> str:
    """A prompt of the right length that says nothing about the answer, another one for every request."""
    rng = random.Random(f"{job.tenant}:{job.arrival_s!r}:{job.input_tokens}")
    return " ".join(rng.choices(_WORDS, k=job.input_tokens))
