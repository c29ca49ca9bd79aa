"""What the model server asks of an engine: token by token, one step at a time, no queue and no KV accounting.

The batcher (TGI's queue and reservation rules) owns admission; an engine only turns ids into the next ids.
Both engines are driven by the same batcher:

    batcher.step:  prefill chunks + decoding sequences --> engine.step(...) --> one Sampled per sequence that
                                                                             has its whole prompt processed
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Protocol

from router_ext.devserver.constraint import Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """TGI's token chooser parameters, after validation; neutral values mean "off"."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    watermark: bool = False
    seed: int = 0
    top_n_tokens: int = 0
    wants_prefill: bool = False
    constraint: Constraint | None = None


class Guide(Protocol):
    """Which tokens a grammar allows, state by state; -1 is the state in which it prescribes nothing any more."""

    @property
    def initial(self) -> int:
        """State before the first token."""
        ...

    def allowed(self, state: int) -> Ids[int]:
        """Ids that may follow in ``state``; EOS where the grammar may end."""
        ...

    def options(self, state: int) -> tuple[Ids[int], int]:
        """(a token for each first character, the token that leaves least to come): to choose without weights."""
        ...

    def next(self, state: int, token: int) -> int:
        """The state after a token."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation inside the engine. ``prompt_ids`` and ``output_ids`` are token ids; the engine appends nothing.

    ``guide`` binds the output; the engine moves ``guide_state`` on with each token.
    """

    sequence_id: int
    prompt_ids: list[int]
    sampling: Sampling
    output_ids: list[int] = field(default_factory=list)
    prefilled: int = 0
    guide: Guide | None = None
    guide_state: int = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one sequence. ``top`` holds (id, logprob) pairs, best first, for ``top_n_tokens``.

    ``prefill_logprobs``, for ``Sampling.wants_prefill`` and only with a sequence's first token: the logprobs of
    ``prompt_ids[1:]`` given what stands before each.
    """

    sequence: Sequence
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    prefill_logprobs: tuple[float, ...] = ()


class Engine(Protocol):
    """Implemented by ``torch_engine`` and ``model_engine``."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a generation."""
        ...

    def step(self, *, prefill: list[tuple[Sequence, int]], decode: list[Sequence]) -> list[Sampled]:
        """One forward pass.

        Args:
            prefill: (sequence, chunk length): process ``prompt_ids[prefilled : prefilled + chunk]``. A sequence
                whose prompt is complete after its chunk is sampled in the same step. The caller advances
                ``prefilled`` afterwards.
            decode: sequences whose last entry of ``output_ids`` has not been processed yet.

        Returns:
            one ``Sampled`` per decoding sequence and per sequence whose prompt is complete.
        """
        ...

    def remove(self, sequence: Sequence) -> None:
        """Forget the sequence's keys and values (finished, or its client has gone)."""
        ...
