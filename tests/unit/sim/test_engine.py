"""Whole runs: the wires between clients, scheduler and servers, and what a run keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router_ext.core.actions import Preempt
from router_ext.core.events import Preempted
from router_ext.core.lifecycle import Trigger, advance
from router_ext.sim.engine import LINK_S, Run
from router_ext.sim.models import A10G
from router_ext.sim.pools import pool_config
from router_ext.sim.raw import RAW
from router_ext.sim.recording import Recording
from router_ext.sim.runs import Task, Workers, perform
from router_ext.sim.suites import Suite, SuiteChoice
from router_ext.sim.workloads import Client, agents, at_once, between, fixed, poisson, requests


def suite(*clients: Client, **fields: object) -> Suite:
    values: dict[str, object] = {"duration_s": 60.0, **fields}
    return Suite(name="t", about="", clients=clients, **values)  # type: ignore[arg-type]


def client(name: str, source: object, **fields: object) -> Client:
    return Client(name=name, source=source, **fields)  # type: ignore[arg-type]


BUSY = suite(
    client("a", requests(poisson(3.0), between((16, 400), (16, 300))), ttft_target_s=1.0),
    client("b", requests(poisson(3.0), between((16, 400), (16, 300)), max_new_tokens=2_000), weight=2.0),
    model=replace(A10G, kv_tokens=3_000),
)


def test_one_request_alone_takes_what_its_steps_take() -> None:
    run = Run(suite(client("a", requests(at_once(1), fixed(100, 3)))), "fifo", 1).run()
    first, finish = run.requests.first_s[0], run.requests.finish_s[0]
    prefill = (35.8 + 100 * 0.2131) / 1_000
    decode = [(15.3 + 0.253 + 0.00216 * context) / 1_000 for context in (101, 102)]
    assert first == pytest.approx(prefill + 2 * LINK_S)
    assert finish == pytest.approx(prefill + sum(decode) + 2 * LINK_S)
    # Its 102 tokens of KV are reserved from the first iteration to the last.
    assert run.kv_seconds == pytest.approx(102 * (prefill + sum(decode)))
    assert run.running_seconds == pytest.approx(prefill + sum(decode))
    assert run.samples.output_tokens[0][-1] == 3
    assert run.samples.prompt_tokens[0][-1] == 100


@pytest.mark.parametrize("policy", ["fifo", "slo-fair", "vtc", RAW])
def test_everybody_is_served_in_full_and_counted_once(policy: str) -> None:
    run = Run(replace(BUSY, is_drained=True), policy, 3).run()
    requests_ = run.requests
    assert len(requests_) > 300
    assert all(finish is not None for finish in requests_.finish_s)
    assert requests_.output_tokens == requests_.wanted_tokens
    assert run.num_output == sum(requests_.wanted_tokens)
    for arrival, first, finish in zip(requests_.arrival_s, requests_.first_s, requests_.finish_s, strict=True):
        assert first is not None
        assert finish is not None
        assert arrival + 2 * LINK_S < first <= finish
    assert run.over_s > run.end_s == 60.0


def test_a_request_waits_in_the_router_or_in_a_servers_queue() -> None:
    held, raw = (Run(BUSY, policy, 1).run() for policy in ("fifo", RAW))
    assert max(held.samples.queued[0]) > 10
    assert max(raw.samples.queued[0]) > 10
    assert raw.samples.counters == [[], []]
    assert len(held.samples.counters[0]) == len(held.samples.at_s) == 61


def test_cut_streams_go_on_where_they_stopped_and_pay_for_it() -> None:
    """Whoever is cut, at whatever moment: nothing is lost, nothing counted twice, the second prefill is waste."""
    run = Run(replace(BUSY, is_drained=True), "slo-fair", 5)
    seen = 0
    handle = run._scheduler.handle
    cuts: list[str] = []

    def meddle(event, now):  # type: ignore[no-untyped-def]
        nonlocal seen
        actions = handle(event, now)
        seen += 1
        if seen % 40 == 0 and not isinstance(event, Preempted):
            for request in run._scheduler._requests.values():  # type: ignore[union-attr]
                if request.state.name == "DECODING" and request.request_id not in cuts:
                    request.state = advance(request.state, Trigger.PREEMPT)
                    cuts.append(request.request_id)
                    actions.append(Preempt(request_id=request.request_id, backend=request.backend.backend_id))
                    break
        return actions

    run._scheduler.handle = meddle  # type: ignore[method-assign]
    recording = run.run()
    assert len(cuts) > 50
    assert recording.num_preempted >= len(cuts) - 5
    assert recording.requests.output_tokens == recording.requests.wanted_tokens
    assert recording.num_output == sum(recording.requests.wanted_tokens)
    assert recording.num_recomputed > 0


def test_an_open_ended_tenant_stops_with_the_batch() -> None:
    run = Run(
        suite(
            client("chat", requests(poisson(2.0), fixed(50, 20)), is_open_ended=True, ttft_target_s=0.5),
            client("batch", requests(at_once(40), fixed(500, 100)), is_batch=True),
        ),
        "slo-fair",
        1,
    ).run()
    finishes = [f for owner, f in zip(run.requests.tenant, run.requests.finish_s, strict=True) if owner == 1]
    assert run.end_s == run.over_s == max(f for f in finishes if f is not None)
    assert run.samples.at_s[-1] == run.end_s
    assert max(run.requests.arrival_s) <= run.end_s


@pytest.mark.parametrize("policy", ["raw", "slo-fair"])
def test_a_server_without_chunking_takes_no_prompt_above_its_budget(policy: str) -> None:
    """With or without a router; and its queue goes on."""
    unchunked = replace(A10G, is_chunked=False)
    clients = client("a", requests(at_once(1), fixed(4_097, 10))), client("b", requests(at_once(3), fixed(4_096, 10)))
    run = Run(suite(*clients, model=unchunked), policy, 1).run()
    assert run.requests.is_refused == [owner == 0 for owner in run.requests.tenant]
    assert run.requests.output_tokens == [10 if owner else 0 for owner in run.requests.tenant]


def test_without_a_router_an_answer_ends_where_its_next_piece_would_be_too_long() -> None:
    unchunked = replace(A10G, is_chunked=False)
    source = requests(at_once(1), fixed(4_000, 1_500))
    run = Run(suite(client("a", source), model=unchunked, duration_s=600.0), "raw", 1).run()
    assert run.requests.output_tokens == [1_024]
    assert run.requests.finish_s[0] is not None


def test_a_batch_is_run_to_its_end_after_arrivals_are_over() -> None:
    run = Run(suite(client("batch", requests(at_once(300), fixed(500, 100)), is_batch=True)), "fifo", 1).run()
    assert run.end_s == 60.0
    assert run.over_s > 60.0
    assert all(finish is not None for finish in run.requests.finish_s)
    assert run.samples.at_s[-1] == 60.0


def test_an_agent_is_over_with_its_last_call_and_reduces_after_all_others() -> None:
    source = agents(poisson(0.2), has_reduce=True)
    run = Run(suite(client("a", source), is_drained=True), "justitia", 1).run()
    assert run.agents
    for number, (arrival, finish) in enumerate(run.agents):
        calls = [row for row, agent in enumerate(run.requests.agent) if agent == number]
        *parallel, reduce = calls
        assert {run.requests.arrival_s[row] for row in parallel} == {arrival}
        others = [run.requests.finish_s[row] for row in parallel]
        assert run.requests.arrival_s[reduce] == max(f for f in others if f is not None)
        assert finish == run.requests.finish_s[reduce]


def test_a_pool_is_what_an_operator_would_state() -> None:
    config = pool_config(SuiteChoice(name="tiers").build(), "slo-fair")
    assert (config.burst_ratio, config.headroom_ratio) == (1.0, 0.1)
    assert sorted(tier.ttft_target_s or 0.0 for tier in config.tiers.values()) == [0.0, 6.0]
    assert pool_config(BUSY, "lcf").policy == "lcf"
    unchunked = pool_config(SuiteChoice(name="flood", is_chunked=False).build(), "fifo")
    assert {backend.max_input_tokens for backend in unchunked.backends.values()} == {4_096}


def _numbers(recording: Recording) -> object:
    recording.cpu_s = 0.0
    return recording


def test_runs_are_the_same_in_one_process_or_in_two() -> None:
    tasks = [Task(choice=SuiteChoice(name="light"), policy=policy, seed=2) for policy in ("vtc", "slo-fair")]
    alone = [_numbers(perform(task)) for task in tasks]
    with Workers(2) as workers:
        assert [_numbers(recording) for recording in workers.perform(tasks)] == alone
