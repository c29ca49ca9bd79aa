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

from router_ext.errors import ArtifactRefused, SimulationError
from router_ext.predict.messages import Ask, Ended, plausible
from router_ext.predict.prompts import bounded
from router_ext.predict.service import LengthService
from router_ext.sim.jobs import Job

_POOL = "pool"

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
        self._service = LengthService()
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
        answer = job.answer
        temperature = 1.0 if answer is None or answer.temperature is None else answer.temperature
        question = Ask(
            id=self._count,
            pool=_POOL,
            model="" if answer is None else answer.model,
            tenant=str(job.tenant),
            key=str(job.key or job.tenant),
            prompt=bounded(_chatter(job) if answer is None else answer.prompt.text, ()),
            is_chat=True,
            max_new_tokens=job.max_new_tokens,
            temperature=temperature,
            top_p=1.0 if answer is None or answer.top_p is None else answer.top_p,
            is_greedy=temperature == 0.0,
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
            self._service.ended(Ended(asked[0], job.output_tokens, job.output_tokens < job.max_new_tokens))


def _chatter(job: Job) -> str:
    """A prompt of the right length that says nothing about the answer, another one for every request."""
    rng = random.Random(f"{job.tenant}:{job.arrival_s!r}:{job.input_tokens}")
    return " ".join(rng.choices(_WORDS, k=job.input_tokens))
