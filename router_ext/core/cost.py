"""What service costs, and the high-water marks that keep every token from being charged twice.

A resumed or retried request sends its prompt again and may generate tokens again. Each request therefore remembers
how many prompt and output tokens have been paid for; only tokens beyond the marks are charged. What is computed
again is the system's loss, never the tenant's.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), linear cost; high-water marks in place
of refunds keep counters monotone, which the bounds of ``core.bounds`` need.
"""

from __future__ import annotations

from router_ext.core.request import Request


class LinearCost:
    """``service = w_prompt * prompt tokens + w_output * output tokens``.

    Units: results in service (weighted tokens), not divided by the tenant's weight.
    """

    __slots__ = ("w_output", "w_prompt")

    def __init__(self, *, w_prompt: float, w_output: float) -> None:
        self.configure(w_prompt=w_prompt, w_output=w_output)

    def configure(self, *, w_prompt: float, w_output: float) -> None:
        """Charge what is delivered from now on at other prices."""
        self.w_prompt = w_prompt
        self.w_output = w_output

    def admit(self, request: Request) -> int:
        """Prompt tokens to charge at this dispatch: those beyond ``paid_in``. Moves the mark.

        ``best_of`` prompts are prefilled once per sequence, so each counts.
        """
        prompt = request.prompt_tokens * request.num_sequences
        unpaid = prompt - request.paid_in
        if unpaid <= 0:
            return 0
        request.paid_in = prompt
        return unpaid

    def correct_prompt(self, request: Request) -> int:
        """Prompt tokens to charge (or, negative, to give back) once the true length is known.

        The only settlement of this cost model: at most what was charged on the estimate is given back.
        """
        prompt = request.prompt_tokens * request.num_sequences
        difference = prompt - request.paid_in
        request.paid_in = prompt
        return difference

    def output(self, request: Request) -> int:
        """Output tokens to charge now: those beyond ``paid_out``. Moves the mark."""
        unpaid = request.output_tokens - request.paid_out
        if unpaid <= 0:
            return 0
        request.paid_out = request.output_tokens
        return unpaid
