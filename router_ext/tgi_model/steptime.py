"""How long one forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Linear cost of a forward: a base, and a share per decoding request, prompt token and token of context.

    Units: seconds, and seconds per sequence, prompt token computed in this step, token of KV read in this step.
    """

    base_s: float = 0.02
    per_sequence_s: float = 0.0
    per_prefill_token_s: float = 0.0
    per_context_token_s: float = 0.0

    def duration_s(self, *, sequences: int, prefill_tokens: int, context_tokens: int = 0) -> float:
        """Seconds of one forward over ``sequences`` decoding requests and ``prefill_tokens`` prompt tokens."""
        return (
            self.base_s
            + self.per_sequence_s * sequences
            + self.per_prefill_token_s * prefill_tokens
            + self.per_context_token_s * context_tokens
        )
