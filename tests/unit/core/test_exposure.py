"""New grammars and suspects start alone; what is known to be harmless does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router_ext.core.actions import Action, Dispatch
from router_ext.core.events import Arrived, BackendChanged, Cancelled, Failed, Finished, Reconfigured, TimerFired
from router_ext.core.exposure import MAX_COMPILED
from router_ext.core.ids import BackendId, RequestId
from router_ext.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, dispatched, down, pool, said, started, tokens, up


def grammar(name: str, tenant: str = "a", digest: str = "g", stall_s: float = 1.0, **fields: Any) -> Arrived:
    return arrival(name, tenant, grammar=digest, stall_s=stall_s, is_sliceable=False, **fields)


def on(actions: list[Action]) -> dict[str, str]:
    return {str(a.request_id): str(a.backend) for a in actions if isinstance(a, Dispatch)}


def failed(name: str, *, is_suspect: bool = True) -> Failed:
    return Failed(
        request_id=RequestId(name), is_retryable=True, dropped_tokens=0, next_prompt_tokens=100, is_suspect=is_suspect
    )


def audited(scheduler: Scheduler) -> None:
    assert scheduler.audit() == []


# --- grammars --------------------------------------------------------------------------------------------------------


def test_a_new_grammar_waits_until_nobody_waits_for_a_first_token_beside_it() -> None:
    scheduler = started(pool())
    assert dispatched(scheduler.handle(arrival("plain"), 0.0)) == ["plain"]
    assert dispatched(scheduler.handle(grammar("g1"), 0.1)) == []
    assert dispatched(scheduler.handle(tokens("plain"), 0.2)) == ["g1"]
    audited(scheduler)
    assert any("starts alone" in sentence for sentence in said(scheduler, "g1"))


def test_nobody_joins_a_new_grammar_before_its_first_token() -> None:
    scheduler = started(pool())
    assert dispatched(scheduler.handle(grammar("g1"), 0.0)) == ["g1"]
    assert dispatched(scheduler.handle(arrival("plain", "b"), 0.1)) == []
    assert dispatched(scheduler.handle(arrival("urgent", "b", "chat"), 0.1)) == []
    assert sorted(dispatched(scheduler.handle(tokens("g1"), 1.2))) == ["plain", "urgent"]
    audited(scheduler)


def test_others_go_to_other_backends_meanwhile() -> None:
    scheduler = started(pool(kv=[1_001, 1_001]))
    first = on(scheduler.handle(grammar("g1"), 0.0))
    second = on(scheduler.handle(arrival("plain", "b"), 0.1))
    assert {*first.values(), *second.values()} == {"bke_0", "bke_1"}


def test_a_known_grammar_is_like_any_request_and_preferred_where_it_is_known() -> None:
    scheduler = started(pool(kv=[1_001, 1_001]))
    home = on(scheduler.handle(grammar("g1"), 0.0))["g1"]
    scheduler.handle(tokens("g1"), 1.2)
    assert on(scheduler.handle(arrival("plain", "b", prompt=5, cap=5), 1.3))["plain"]
    assert on(scheduler.handle(grammar("g2"), 1.4)) == {"g2": home}
    assert on(scheduler.handle(grammar("other", digest="h"), 1.45)) == {}, "somebody waits on either backend"
    audited(scheduler)


def test_a_backend_that_comes_back_has_compiled_nothing() -> None:
    scheduler = started(pool())
    scheduler.handle(grammar("g1"), 0.0)
    scheduler.handle(tokens("g1"), 1.0)
    scheduler.handle(Finished(request_id=RequestId("g1")), 1.1)
    assert scheduler.stats().backends[0].compiled_grammars == 1
    scheduler.handle(down(), 2.0)
    scheduler.handle(up(), 3.0)
    assert scheduler.stats().backends[0].compiled_grammars == 0
    scheduler.handle(arrival("plain"), 3.1)
    assert dispatched(scheduler.handle(grammar("g2"), 3.2)) == []


def test_a_backend_keeps_as_many_grammars_as_tgi() -> None:
    scheduler = started(pool())
    for number in [*range(MAX_COMPILED + 1), 1]:
        name = f"r{number}.{scheduler.stats().backends[0].compiled_grammars}"
        scheduler.handle(grammar(name, digest=f"g{number}"), float(number))
        scheduler.handle(tokens(name), number + 0.5)
        scheduler.handle(Finished(request_id=RequestId(name)), number + 0.6)
    assert scheduler.stats().backends[0].compiled_grammars == MAX_COMPILED
    scheduler.handle(arrival("plain"), 100.0)
    assert dispatched(scheduler.handle(grammar("kept", digest="g1"), 100.1)) == ["kept"]
    assert dispatched(scheduler.handle(grammar("gone", digest="g0"), 100.2)) == []


def test_work_that_shows_no_first_token_is_alone_for_twice_its_stall() -> None:
    scheduler = started(pool())
    scheduler.handle(grammar("whole", stall_s=3.0), 0.0)
    assert dispatched(scheduler.handle(arrival("plain", "b"), 0.1)) == []
    assert dispatched(scheduler.handle(TimerFired(), 5.9)) == []
    assert dispatched(scheduler.handle(TimerFired(), 6.2)) == ["plain"]
    scheduler.handle(tokens("whole", 40), 7.0)
    assert scheduler.stats().backends[0].compiled_grammars == 1, "its answer came, so it was compiled"
    assert scheduler.stats().backends[0].stall_ratio == 1.0, "and nobody saw how long that took"


def test_a_client_that_leaves_leaves_its_stall_behind() -> None:
    scheduler = started(pool())
    scheduler.handle(grammar("g1", stall_s=4.0), 0.0)
    scheduler.handle(Cancelled(request_id=RequestId("g1")), 0.1)
    assert dispatched(scheduler.handle(arrival("plain", "b"), 0.2)) == [], "TGI is still compiling"
    audited(scheduler)
    assert dispatched(scheduler.handle(TimerFired(), 7.0)) == ["plain"]


def test_a_backend_teaches_how_long_its_stalls_are() -> None:
    scheduler = started(pool())
    for number in range(3):
        name = f"g{number}"
        scheduler.handle(grammar(name, digest=name, stall_s=1.0), 10.0 * number)
        scheduler.handle(tokens(name), 10.0 * number + 2.05)
        scheduler.handle(Finished(request_id=RequestId(name)), 10.0 * number + 2.1)
    assert scheduler.stats().backends[0].stall_ratio == pytest.approx(2.0, rel=0.1)
    assert scheduler.stats().backends[0].prefill_tokens_per_s is None, "a stall says nothing of prompts"


def test_only_backends_that_take_grammars_get_them() -> None:
    config = pool(kv=[1_001, 1_001])
    backends = {**config.backends}
    plain = BackendId("bke_0")
    backends[plain] = replace(backends[plain], takes_grammars=False)
    scheduler = started(replace(config, backends=backends))
    assert on(scheduler.handle(grammar("g1"), 0.0)) == {"g1": "bke_1"}
    assert on(scheduler.handle(grammar("g2", digest="h"), 0.1)) == {}
    scheduler.handle(BackendChanged(backend=BackendId("bke_1"), is_up=False), 0.2)
    scheduler.handle(failed("g1", is_suspect=False), 0.2)
    assert scheduler.stats().parked == 2, "nobody could hold them, so they are in nobody's way"
    assert on(scheduler.handle(arrival("plain"), 0.3)) == {"plain": "bke_0"}
    assert on(scheduler.handle(up("bke_1"), 0.4)) == {"g1": "bke_1"}
    scheduler.handle(Reconfigured(config=config), 0.5)
    scheduler.handle(tokens("plain"), 0.6)
    assert scheduler.stats().parked == 0
    audited(scheduler)


# --- what a stall costs ----------------------------------------------------------------------------------------------


def test_the_tokens_that_others_miss_are_charged_once() -> None:
    scheduler = started(pool(stall_ratio=1.0, policy="vtc"))
    scheduler.handle(arrival("victim", "b", prompt=10, cap=100), 0.0)
    scheduler.handle(tokens("victim"), 0.1)
    floor = 10 + 2.0
    scheduler.handle(grammar("g1", prompt=10, cap=10, stall_s=1.0), 0.2)
    stats = {str(t.tenant): t for t in scheduler.stats().tenants}
    # 20 steps of 50 ms at 2 a token; the prompt is charged beside them, and the books of tokens know nothing of it.
    assert stats["a"].stall_service_total == pytest.approx(40.0)
    assert stats["a"].raw_counter == pytest.approx(floor + 40.0 + 10.0)
    assert (stats["a"].prompt_tokens_total, stats["a"].output_tokens_total) == (10, 0)
    scheduler.handle(down(), 0.3)
    scheduler.handle(failed("g1"), 0.3)
    scheduler.handle(failed("victim", is_suspect=False), 0.3)
    scheduler.handle(up(), 0.4)
    assert scheduler.stats().tenants[0].stall_service_total == pytest.approx(40.0), "what is tried again is paid for"


def test_a_stall_that_nobody_feels_costs_nothing_and_a_huge_one_no_more_than_stated() -> None:
    scheduler = started(pool(stall_ratio=0.01, policy="vtc"))
    scheduler.handle(grammar("g1", digest="g"), 0.0)
    assert scheduler.stats().tenants[0].stall_service_total == 0.0
    scheduler.handle(tokens("g1"), 1.0)
    scheduler.handle(grammar("g2", digest="h", stall_s=100.0), 1.1)
    terms = scheduler.stats().bound_terms
    assert terms is not None
    assert 0.0 < scheduler.stats().tenants[0].stall_service_total == pytest.approx(terms.stall_service)


# --- suspects --------------------------------------------------------------------------------------------------------


def test_suspects_are_tried_one_at_a_time_in_the_whole_pool() -> None:
    scheduler = started(pool(kv=[1_001, 1_001, 1_001]))
    scheduler.handle(down("bke_1"), 0.0)
    scheduler.handle(down("bke_2"), 0.0)
    for name in ("s1", "s2", "s3"):
        scheduler.handle(arrival(name, name), 0.0)
    scheduler.handle(down("bke_0"), 1.0)
    for name in ("s1", "s2", "s3"):
        scheduler.handle(failed(name), 1.0)
    assert len(on(scheduler.handle(up("bke_1"), 2.0))) == 1
    assert on(scheduler.handle(up("bke_2"), 2.1)) == {}, "one at a time, whatever is free"
    audited(scheduler)
    plain = on(scheduler.handle(arrival("plain", "b", "chat"), 2.2))
    assert plain == {"plain": "bke_2"}, "and never beside somebody else"
    second = on(scheduler.handle(tokens("s1"), 2.3))
    assert second == {"s2": "bke_1"}
    audited(scheduler)
    third = on(scheduler.handle(failed("s2", is_suspect=True), 2.4))
    assert third == {}, "its backend may still be busy with it"


def test_who_shows_a_token_is_a_suspect_no_more() -> None:
    scheduler = started(pool(kv=[1_001, 1_001]))
    scheduler.handle(arrival("s1"), 0.0)
    scheduler.handle(failed("s1"), 0.1)
    scheduler.handle(TimerFired(), 1.0)
    scheduler.handle(tokens("s1"), 1.1)
    scheduler.handle(failed("s1", is_suspect=False), 1.2)
    assert dispatched(scheduler.handle(arrival("plain"), 1.3)) == ["plain"]
    audited(scheduler)


def test_a_suspect_that_shows_nothing_stays_alone() -> None:
    scheduler = started(pool())
    scheduler.handle(arrival("s1", is_sliceable=False), 0.0)
    scheduler.handle(failed("s1"), 0.1)
    scheduler.handle(TimerFired(), 5.0)
    assert scheduler.stats().backends[0].is_exposed
    scheduler.handle(arrival("plain", "b"), 5.1)
    assert dispatched(scheduler.handle(TimerFired(), 500.0)) == []
    assert dispatched(scheduler.handle(Finished(request_id=RequestId("s1")), 501.0)) == ["plain"]
    audited(scheduler)
