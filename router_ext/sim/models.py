"""Step-time models of TGI servers.

An iteration takes ``decode_base + per_sequence * sequences + per_context_token * context`` if anything decodes, else
``prefill_base``, plus ``per_prefill_token`` for every prompt token computed in it.

Source: ``A10G`` is a least-squares fit over the profiles of the VTC paper's artifact (Llama-2-7B, A10G 24 GB).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerModel:
    """How fast a server is, how much it holds, and how it was started.

    Units: milliseconds; tokens.

    Attributes:
        is_chunked: prompts ride along with decodes, at most ``prefill_budget_tokens`` per iteration. Else a prefill
            has an iteration for itself, and newcomers wait for ``waiting_served_ratio`` of the running requests to
            queue up, or for ``max_waiting_tokens`` decodes.
    """

    name: str
    decode_base_ms: float
    per_sequence_ms: float
    per_context_token_ms: float
    prefill_base_ms: float
    per_prefill_token_ms: float
    kv_tokens: int
    prefill_budget_tokens: int = 4_096
    is_chunked: bool = True
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20

    @property
    def longest_input_tokens(self) -> int:
        """The longest prompt it takes: without chunking one that fits into a prefill."""
        return self.kv_tokens if self.is_chunked else self.prefill_budget_tokens


A10G = ServerModel(
    name="a10g",
    decode_base_ms=15.3,
    per_sequence_ms=0.253,
    per_context_token_ms=0.00216,
    prefill_base_ms=35.8,
    per_prefill_token_ms=0.2131,
    kv_tokens=10_000,
)

INCIDENT = ServerModel(
    name="incident",
    decode_base_ms=8.0,
    per_sequence_ms=0.05,
    per_context_token_ms=0.0004,
    prefill_base_ms=5.0,
    per_prefill_token_ms=0.06,
    kv_tokens=60_000,
)

MODELS: Mapping[str, ServerModel] = {model.name: model for model in (A10G, INCIDENT)}
