"""What clients want: one request, as its client knows it, and tasks of several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router_ext.core.ids import KeyId, RequestId

if TYPE_CHECKING:
    from router_ext.sim.answers import Answer
    from router_ext.sim.streams import Stream


class Job:
    """One request from its client's sending to its last token. Plain attributes: read in the innermost loop.

    Attributes:
        tenant: index of the client in its suite.
        output_tokens: tokens it will get in the end. max_new_tokens: the limit its client gives.
        answer: the real answer whose length it gets, with the prompt it sends; None: only lengths are known.
        guess: factor by which the default predictor errs on it, the same under every policy.
        kept: output tokens of slices that are over. stream: the one that is open.
        backend: index of the server it was sent to last.
        first_s, finish_s: when its client saw the first and the last token.
    """

    __slots__ = (
        "agent",
        "answer",
        "arrival_s",
        "backend",
        "finish_s",
        "first_s",
        "guess",
        "input_tokens",
        "is_refused",
        "kept",
        "key",
        "max_new_tokens",
        "num_preempted",
        "output_tokens",
        "request_id",
        "stream",
        "tenant",
        "was_preempted",
    )

    def __init__(
        self,
        *,
        tenant: int,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        max_new_tokens: int,
        guess: float = 1.0,
        key: KeyId | None = None,
        agent: Agent | None = None,
        answer: Answer | None = None,
    ) -> None:
        self.request_id = RequestId("")
        self.tenant = tenant
        self.key = key
        self.agent = agent
        self.answer = answer
        self.arrival_s = arrival_s
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        self.max_new_tokens = max_new_tokens
        self.guess = guess
        self.kept = 0
        self.stream: Stream | None = None
        self.backend = 0
        self.num_preempted = 0
        self.was_preempted = False
        self.is_refused = False
        self.first_s: float | None = None
        self.finish_s: float | None = None


class Agent:
    """A task of several calls, over when the last one is back; never, if one of them was refused.

    Attributes:
        calls: those made at once. reduce: one that is made when all of these are back, or None.
        cost: KV token-time it declares on arrival, None before. num_open: calls that are not back.
        is_broken: one of them was refused.
    """

    __slots__ = ("arrival_s", "calls", "cost", "finish_s", "is_broken", "name", "num_open", "reduce")

    def __init__(self, name: str, *, arrival_s: float) -> None:
        self.name = name
        self.arrival_s = arrival_s
        self.calls: list[Job] = []
        self.reduce: Job | None = None
        self.cost: float | None = None
        self.num_open = 0
        self.is_broken = False
        self.finish_s: float | None = None
