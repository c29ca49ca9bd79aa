"""From a proof to a decision: how long would this grammar stall a backend, and is that allowed?

    stall = CPU time of the automaton + BASE_STALL_S + states x vocabulary x seconds per entry of the index

Proofs depend on the grammar alone and are kept; the vocabulary, the backend's speed and the tier's limit are put in
here, so that one proof serves every pool and tier. Source: measured on a running TGI, ``docs/guard.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from router_ext.errors import GrammarRefused
from router_ext.guard.messages import Proof

BASE_STALL_S = 0.15
"""What a grammar costs a backend beside its automaton and index."""

ENTRY_S = 1e-7
"""Seconds per state and token of the vocabulary until a backend has shown its own."""

DEFAULT_LIMIT_S = 2.0
"""Of the stall, where a tier names none."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What decides of a grammar's stall beside the grammar: tokens in the vocabulary, seconds per entry."""

    vocabulary: int
    entry_s: float = ENTRY_S


def predicted_stall_s(proof: Proof, backend: Backend) -> float:
    """Seconds in which the backend makes no token for anybody."""
    return proof.cpu_s + BASE_STALL_S + proof.states * backend.vocabulary * backend.entry_s


def learned_entry_s(proof: Proof, vocabulary: int, stalled_s: float) -> float | None:
    """Seconds per entry that a stall tells of, None if the grammar was too small to tell."""
    index_s = stalled_s - proof.cpu_s - BASE_STALL_S
    entries = proof.states * vocabulary
    return index_s / entries if index_s > 0 and entries >= 1_000_000 else None


def check(proof: Proof, backend: Backend, limit_s: float, *, param: str) -> float:
    """The predicted stall of an allowed grammar.

    Raises:
        GrammarRefused: naming what the grammar would cost and what is allowed.
    """
    if proof.problem is not None and not proof.is_cost:
        raise GrammarRefused(f"Input validation error: {proof.problem}", param=param)
    if proof.problem is not None:
        raise _too_expensive(f"{proof.problem} (limit {limit_s:g} s of stall)", param)
    stall_s = predicted_stall_s(proof, backend)
    if stall_s > limit_s:
        raise _too_expensive(
            f"the grammar has {proof.states} states; with a vocabulary of {backend.vocabulary} tokens a backend would "
            f"stall {stall_s:.1f} s for it, and {limit_s:g} s are allowed",
            param,
        )
    return stall_s


def _too_expensive(problem: str, param: str) -> GrammarRefused:
    return GrammarRefused(f"Input validation error: {problem}", code="grammar_too_expensive", param=param)
