"""What a grammar would cost a backend, and whether that is allowed."""

from __future__ import annotations

import pytest

from router_ext.errors import GrammarRefused
from router_ext.guard.messages import Proof
from router_ext.guard.verdict import BASE_STALL_S, Backend, check, learned_entry_s, predicted_stall_s

VOCABULARY = 49_152


def test_the_stall_grows_with_states_and_vocabulary() -> None:
    proof = Proof(digest="d", states=2001, cpu_s=0.3)
    stall_s = predicted_stall_s(proof, Backend(VOCABULARY))
    # 14.2 s were seen on a TGI with a little slower index; 0.1 us per entry say 10.3.
    assert stall_s == pytest.approx(0.3 + BASE_STALL_S + 2001 * VOCABULARY * 1e-7)
    assert predicted_stall_s(proof, Backend(2 * VOCABULARY)) > 1.9 * stall_s


def test_a_backend_teaches_its_own_speed() -> None:
    proof = Proof(digest="d", states=2001, cpu_s=0.3)
    entry_s = learned_entry_s(proof, VOCABULARY, 14.2)
    assert entry_s is not None
    assert predicted_stall_s(proof, Backend(VOCABULARY, entry_s)) == pytest.approx(14.2)
    assert learned_entry_s(Proof(digest="d", states=5), VOCABULARY, 1.0) is None, "too small to tell"
    assert learned_entry_s(proof, VOCABULARY, 0.2) is None, "shorter than the automaton alone"


def test_a_refusal_names_the_figures() -> None:
    proof = Proof(digest="d", states=712, cpu_s=0.35)
    with pytest.raises(GrammarRefused) as refused:
        check(proof, Backend(VOCABULARY), 2.0, param="response_format")
    error = refused.value
    assert (error.code, error.param) == ("grammar_too_expensive", "response_format")
    for figure in ("712 states", "49152 tokens", "4.0 s", "2 s are allowed"):
        assert figure in error.message
    assert check(proof, Backend(VOCABULARY), 5.0, param="grammar") == pytest.approx(4.0, abs=0.01)


@pytest.mark.parametrize(("is_cost", "code"), [(False, "grammar_invalid"), (True, "grammar_too_expensive")])
def test_what_no_compiler_takes_is_refused_at_any_limit(is_cost: bool, code: str) -> None:
    proof = Proof(digest="d", problem="it is odd", is_cost=is_cost)
    with pytest.raises(GrammarRefused, match="it is odd") as refused:
        check(proof, Backend(VOCABULARY), 1e9, param="grammar")
    assert refused.value.code == code
