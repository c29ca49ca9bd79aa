"""What is remembered of prompts and of who sends them, and for how long."""

from __future__ import annotations

import array
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.predict import history as history_module
from router_ext.predict.features import Signatures
from router_ext.predict.history import BOUND, History
from router_ext.predict.history import EXPIRY_S as HISTORY_EXPIRY_S
from router_ext.predict.memory import EXPIRY_S, NOTHING, Memory
from router_ext.predict.residuals import REACH

residuals = st.lists(st.tuples(st.floats(-50, 50), st.booleans()), max_size=60)


def sign(number: int, near: tuple[int, ...] = ()) -> Signatures:
    return Signatures(number, near or tuple(number * 10 + band for band in range(4)))


def test_a_prompt_seen_first_is_predicted_as_without_a_memory() -> None:
    memory = Memory()
    memory.add(sign(1), 0.7, 0.0)
    assert memory.recall(sign(2), 0.0) == NOTHING


def test_a_known_prompt_is_corrected_the_more_the_more_often_it_was_answered() -> None:
    memory = Memory()
    seen = [0.0]
    for _ in range(8):
        memory.add(sign(1), 0.6, 0.0)
        seen.append(memory.recall(sign(1), 0.0).correction)
    assert seen == sorted(seen)
    assert 0.2 < seen[1] < 0.6
    assert seen[-1] == pytest.approx(0.6, abs=0.1)


def test_a_near_duplicate_profits_less_than_the_prompt_itself() -> None:
    memory = Memory()
    for _ in range(6):
        memory.add(sign(1, (1, 2, 3, 4)), 0.6, 0.0)
    near = memory.recall(sign(2, (1, 2, 30, 40)), 0.0)
    assert (near.n_exact, near.n_near) == (0, 6)
    assert 0.1 < near.correction < memory.recall(sign(1, (1, 2, 3, 4)), 0.0).correction
    assert memory.recall(sign(3, (1, 20, 30, 40)), 0.0) == NOTHING


def test_a_template_with_different_fillings_is_believed_less() -> None:
    alike, mixed = Memory(), Memory()
    for i in range(9):
        alike.add(sign(i, (1, 2, 3, 4)), 0.5, 0.0)
        mixed.add(sign(i, (1, 2, 3, 4)), 0.5 + (i - 4) * 0.25, 0.0)
    stranger = sign(99, (1, 2, 3, 4))
    assert mixed.recall(stranger, 0.0).correction < 0.6 * alike.recall(stranger, 0.0).correction


@given(residuals)
def test_no_answer_moves_a_prediction_further_than_the_reach(seen: list[tuple[float, bool]]) -> None:
    memory, history = Memory(), History()
    for residual, is_complete in seen:
        memory.add(sign(1), residual, 0.0, is_complete=is_complete)
        history.add("pool", "tenant", "key", residual, 0.0, is_complete=is_complete)
    assert abs(memory.recall(sign(1), 0.0).correction) <= REACH
    assert abs(history.correction("pool", "tenant", "key", 0.0)) <= 3 * BOUND


def test_a_cut_answer_counts_only_where_it_is_longer_than_believed() -> None:
    memory, history = Memory(), History()
    memory.add(sign(1), -0.9, 0.0, is_complete=False)
    history.add("pool", "tenant", "key", -0.9, 0.0, is_complete=False)
    assert memory.recall(sign(1), 0.0) == NOTHING
    assert history.correction("pool", "tenant", "key", 0.0) == 0.0
    memory.add(sign(1), 0.9, 0.0, is_complete=False)
    history.add("pool", "tenant", "key", 0.9, 0.0, is_complete=False)
    assert memory.recall(sign(1), 0.0).correction > 0.0
    assert history.correction("pool", "tenant", "key", 0.0) > 0.0


def test_both_are_bounded_and_forget_what_was_not_used_for_longest() -> None:
    memory, history = Memory(capacity=20), History(capacity=20)
    for i in range(500):
        memory.add(sign(i), 0.5, float(i))
        history.add("pool", f"tenant{i}", "key", 0.5, float(i))
    assert len(memory) == len(history) == 20
    assert memory.recall(sign(499), 500.0).n_exact == 1
    assert memory.recall(sign(0), 500.0) == NOTHING
    assert len(b"".join(memory.dump())) < 10_000


def test_what_is_too_old_is_forgotten() -> None:
    memory, history = Memory(), History()
    memory.add(sign(1), 0.5, 0.0)
    history.add("pool", "tenant", "key", 0.5, 0.0)
    assert memory.recall(sign(1), EXPIRY_S).correction > 0.0
    assert memory.recall(sign(1), EXPIRY_S + 1.0) == NOTHING
    assert history.correction("pool", "tenant", "key", HISTORY_EXPIRY_S + 1.0) == 0.0


def test_a_tenant_that_differs_from_its_pool_is_put_right_within_dozens_of_answers() -> None:
    history, rng = History(), random.Random(3)
    for _ in range(60):
        history.add("pool", "others", "key", rng.gauss(0.0, 0.3), 0.0)
        history.add("pool", "longer", "key", rng.gauss(0.6, 0.3), 0.0)
    assert history.correction("pool", "longer", "key", 0.0) == pytest.approx(0.6, abs=0.2)
    assert history.correction("pool", "others", "key", 0.0) == pytest.approx(0.0, abs=0.2)
    assert history.correction("other pool", "longer", "key", 0.0) == 0.0


def test_levels_do_not_count_the_same_wrong_twice() -> None:
    history = History()
    for _ in range(200):
        history.add("pool", "tenant", "key", 0.4, 0.0)
    assert 0.36 < history.correction("pool", "tenant", "key", 0.0) <= 0.4


def test_after_restoring_both_say_the_same_and_go_on() -> None:
    rng = random.Random(5)
    memory, history = Memory(capacity=50), History(capacity=50)
    for _ in range(400):
        number = rng.randrange(80)
        memory.add(sign(number, tuple(number // 4 * 10 + band for band in range(4))), rng.gauss(0, 0.5), 1.0)
        history.add("pool", f"tenant{number}", "key", rng.gauss(0, 0.5), 1.0)
    other, past = Memory(capacity=50), History(capacity=50)
    other.restore(memory.dump())
    past.restore(history.dump())
    for step in range(2):
        for number in range(90):
            of = sign(number, tuple(number // 4 * 10 + band for band in range(4)))
            assert other.recall(of, 2.0) == memory.recall(of, 2.0), (step, number)
            assert past.correction("pool", f"tenant{number}", "key", 2.0) == history.correction(
                "pool", f"tenant{number}", "key", 2.0
            )
            for one in (memory, other):
                one.add(of, 0.1, 2.0)
            for each in (history, past):
                each.add("pool", f"tenant{number}", "key", 0.1, 2.0)


@pytest.mark.parametrize("state", [b"", b"\xc1", b"\x94\x02\x90\x90\x90", b"\x92\x02\x90"])
def test_a_foreign_state_is_refused(state: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Memory().restore([state])
    with pytest.raises(ValueError, match=r"."):
        History().restore([state])


def test_residuals_that_no_memory_writes_are_refused() -> None:
    memory = Memory()
    memory.add(sign(1), 0.5, 0.0)
    data, near = memory.dump()

    bad = data.replace(array.array("f", [0.5]).tobytes(), array.array("f", [math.nan]).tobytes())
    assert bad != data
    with pytest.raises(ValueError, match="residuals"):
        Memory().restore([bad, near])


@pytest.mark.parametrize("is_mutant", [False, True])
def test_chance_is_hardly_believed(is_mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants without a habit; the mutant believes a median whatever its spread."""
    if is_mutant:
        monkeypatch.setattr(history_module, "DOUBT", 0.0)
    history, rng, moved = History(), random.Random(3), []
    for _ in range(60):
        for tenant in range(40):
            moved.append(abs(history.correction("pool", f"{tenant}", "key", 0.0)))
            history.add("pool", f"{tenant}", "key", rng.gauss(0.0, 0.5), 0.0)
    assert (math.fsum(moved) / len(moved) < 0.04) is not is_mutant
