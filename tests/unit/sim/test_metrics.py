"""Every metric on recordings made by hand, with the answer worked out beside it."""

from __future__ import annotations

import pytest

from router_ext.sim import metrics
from router_ext.sim.gaps import Gaps
from router_ext.sim.recording import Recording, Requests, Samples, TenantInfo


def tenant(name: str, weight: float = 1.0, target: float | None = None, **fields: object) -> TenantInfo:
    values: dict[str, object] = {"completion_target_s": None, "is_batch": False, **fields}
    return TenantInfo(name=name, weight=weight, ttft_target_s=target, **values)  # type: ignore[arg-type]


def recording(
    tenants: list[TenantInfo],
    rows: list[tuple[int, float, float | None, float | None, int, int, int]],
    *,
    end_s: float = 120.0,
    over_s: float | None = None,
    outputs: list[list[int]] | None = None,
    **fields: object,
) -> Recording:
    """``rows``: (tenant, arrival, first, finish, input, delivered, wanted). ``outputs``: by tenant, at every second."""
    requests = Requests()
    for owner, arrival, first, finish, inputs, delivered, wanted in rows:
        requests.tenant.append(owner)
        requests.arrival_s.append(arrival)
        requests.first_s.append(first)
        requests.finish_s.append(finish)
        requests.input_tokens.append(inputs)
        requests.output_tokens.append(delivered)
        requests.wanted_tokens.append(wanted)
        requests.agent.append(-1)
        requests.is_refused.append(False)
        requests.num_preempted.append(0)
    seconds = [float(second) for second in range(int(end_s) + 1)]
    samples = Samples(
        at_s=seconds,
        prompt_tokens=[[0] * len(seconds) for _ in tenants],
        output_tokens=outputs or [[0] * len(seconds) for _ in tenants],
        counters=[],
        queued=[],
        kv_tokens=[],
        running=[],
    )
    values: dict[str, object] = {
        "suite": "hand",
        "policy": "p",
        "seed": 1,
        "w_prompt": 1.0,
        "w_output": 2.0,
        "usable_tokens": [1_000],
        "kv_seconds": 0.0,
        "kv_seconds_over": 0.0,
        "running_seconds": 0.0,
        "agents": [],
        "accumulated_difference": 0.0,
        "accumulated_while_waiting": None,
        "bound": None,
        "counter_bound": None,
        "largest_gap": None,
        "num_recomputed": 0,
        "num_continued": 0,
        "num_prefilled": 0,
        "num_output": 0,
        "num_dispatched": 0,
        "num_preempted": 0,
        "digest": "",
        "cpu_s": 1.0,
        **fields,
    }
    return Recording(
        tenants=tenants,
        requests=requests,
        samples=samples,
        end_s=end_s,
        over_s=end_s if over_s is None else over_s,
        **values,  # type: ignore[arg-type]
    )


def test_percentiles_interpolate_between_ranks() -> None:
    assert metrics.percentile([], 0.5) is None
    assert metrics.percentile([7.0], 0.99) == 7.0
    assert metrics.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert metrics.percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)


def test_ttft_counts_what_started_by_the_end_of_arrivals() -> None:
    rows = [
        (0, 10.0, 11.0, 20.0, 5, 5, 5),
        (0, 100.0, 125.0, None, 5, 2, 5),  # started after the end
        (0, 110.0, None, None, 5, 0, 5),
        (1, 1.0, 1.5, None, 5, 1, 5),
    ]
    run = recording([tenant("a"), tenant("b")], rows, end_s=120.0, over_s=130.0)
    assert metrics.ttfts(run, 0) == [1.0]
    assert metrics.ttfts(run, 1) == [0.5]
    assert metrics.num_unstarted(run) == 2
    assert metrics.completions(run) == [10.0]


def test_throughput_is_input_shown_plus_output_over_the_time_of_arrivals() -> None:
    run = recording([tenant("a"), tenant("b")], [], end_s=10.0)
    run.samples.prompt_tokens = [[0] * 10 + [300], [0] * 10 + [100]]
    run.samples.output_tokens = [[0] * 10 + [50], [0] * 10 + [150]]
    assert metrics.throughput(run) == 60.0
    assert metrics.services(run) == [400.0, 400.0]


def test_window_difference_spreads_an_answer_over_its_time() -> None:
    # 150 s: windows begin evenly from 30 s to 90 s. Tenant a delivers 6,000 units from 0 to 150 s, 40 per second, and
    # demands nothing in any window (it arrived at 0): its term is min(max - s, |0 - 40|) = 0, being the largest.
    # Tenant b of weight 2 gets 3,000 units over the same time: 20 per second, 10 per weight; its term is
    # min(40 - 10, |0 - 10|) = 10.
    rows = [(0, 0.0, 0.0, 150.0, 2_000, 2_000, 2_000), (1, 0.0, 0.0, 150.0, 1_000, 1_000, 1_000)]
    run = recording([tenant("a"), tenant("b", 2.0)], rows, end_s=150.0)
    differences = metrics.window_differences(run)
    assert len(differences) == 20
    assert differences == pytest.approx([10.0] * 20)


def test_window_difference_weighs_what_was_asked_for() -> None:
    # Tenant b asks for 600 x 2 in the only second that every window has (90 s), and gets nothing: min(40, 1,200 / 60).
    rows = [(0, 0.0, 0.0, 150.0, 2_000, 2_000, 2_000), (1, 90.0, None, None, 0, 0, 600)]
    run = recording([tenant("a"), tenant("b")], rows, end_s=150.0)
    assert metrics.window_differences(run) == pytest.approx([20.0] * 20)
    assert metrics.window_differences(recording([tenant("a")], rows[:1], end_s=60.0)) == []


def test_share_error_is_that_of_the_worst_of_consecutive_windows() -> None:
    # Weights 3:1. From 30 to 90 s a gets 3 of 4 tokens, from 90 to 150 s 2 of 4: 25 points off. The last window, from
    # 150 s, is not complete.
    a = [0] * 161
    b = [0] * 161
    for second in range(1, 161):
        fair = second <= 90
        a[second] = a[second - 1] + (3 if fair else 2)
        b[second] = b[second - 1] + (1 if fair else 2)
    run = recording([tenant("a", 3.0), tenant("b", 1.0)], [], end_s=160.0, outputs=[a, b])
    assert metrics.share_error(run) == pytest.approx(25.0)
    assert metrics.share_error(recording([tenant("a")], [], end_s=80.0)) is None


def test_jain_counts_demand_that_was_met_as_fair() -> None:
    # All in all 300 units: a asked for 100 and got it; b asked for a lot and got 200 of its fair 150: both at 1.
    rows = [(0, 0.0, None, None, 0, 50, 50), (1, 0.0, None, None, 0, 100, 900)]
    outputs = [[0] * 120 + [50], [0] * 120 + [100]]
    run = recording([tenant("a"), tenant("b")], rows, outputs=outputs)
    assert metrics.jain(run) == pytest.approx(1.0)
    # b asked for as much and got nothing: (1 + 0)^2 / (2 * 1).
    starved = recording([tenant("a"), tenant("b")], rows, outputs=[[0] * 120 + [50], [0] * 121])
    assert metrics.jain(starved) == pytest.approx(0.5)


def test_violations_are_late_or_never() -> None:
    rows = [
        (0, 0.0, 0.5, 1.0, 1, 1, 1),  # in time
        (0, 1.0, 2.5, 3.0, 1, 1, 1),  # late
        (0, 100.0, None, None, 1, 0, 1),  # never
        (0, 119.5, None, None, 1, 0, 1),  # its target has not passed yet
        (1, 0.0, 50.0, 90.0, 1, 1, 1),  # completion in time
        (1, 0.0, 0.5, 110.0, 1, 1, 1),  # too late
    ]
    run = recording([tenant("a", target=1.0), tenant("b", completion_target_s=100.0), tenant("c")], rows)
    assert metrics.violations(run) == {0: (2, 3), 1: (1, 2)}
    assert metrics.violations_ratio(run) == pytest.approx(2 / 3)


def test_makespan_needs_all_of_the_batch() -> None:
    rows = [(0, 0.0, 1.0, 500.0, 1, 1, 1), (1, 0.0, 1.0, 40.0, 1, 1, 1), (1, 0.0, 1.0, 90.0, 1, 1, 1)]
    tenants = [tenant("a"), tenant("b", is_batch=True)]
    assert metrics.makespan(recording(tenants, rows)) == 90.0
    assert metrics.makespan(recording(tenants, [*rows, (1, 0.0, None, None, 1, 0, 1)])) is None
    assert metrics.makespan(recording(tenants[:1], rows[:1])) is None


def test_waste_is_counted_against_output() -> None:
    run = recording([tenant("a")], [], num_recomputed=30, num_continued=50, num_output=1_000)
    assert metrics.recomputed_ratio(run) == 0.03
    assert metrics.resumed_prefill_ratio(run) == 0.05


def test_occupancy_is_a_mean_over_time() -> None:
    run = recording([tenant("a")], [], kv_seconds=60_000.0, kv_seconds_over=90_000.0, running_seconds=600.0)
    assert metrics.kv_occupancy(run) == 0.5
    assert metrics.mean_running(run) == 5.0
    # Agents are run to their end, and occupancy is taken over all of it.
    run = recording([tenant("a")], [], over_s=180.0, kv_seconds_over=90_000.0, agents=[(0.0, 10.0)])
    assert metrics.kv_occupancy(run) == 0.5


def test_accumulated_difference_counts_from_the_beginning() -> None:
    gaps = Gaps(3)
    gaps.service[0] += 10.0
    gaps.moment()
    gaps.service[2] += 4.0
    gaps.service[1] += 9.0
    gaps.moment()
    assert gaps.accumulated == 10.0
    assert gaps.while_waiting is None


def test_a_spell_measures_change_and_ends_at_any_empty_queue() -> None:
    gaps = Gaps(2)
    gaps.service[0] = 100.0
    gaps.queued(0)
    gaps.queued(1)
    gaps.service[0] += 5.0
    gaps.moment()
    gaps.service[1] += 12.0
    gaps.moment()
    # From +5 down to -7 against the beginning: 12 between two moments.
    assert gaps.while_waiting == 12.0
    # A queue that is empty for an instant ends the spell: what follows is measured anew.
    gaps.unqueued(1)
    gaps.queued(1)
    gaps.service[1] += 11.0
    gaps.moment()
    assert gaps.while_waiting == 12.0
    gaps.service[1] += 2.0
    gaps.moment()
    assert gaps.while_waiting == 13.0


def test_nothing_counts_as_waiting_while_one_does_not() -> None:
    gaps = Gaps(3)
    gaps.queued(0)
    gaps.queued(1)
    gaps.service[0] += 50.0
    gaps.moment()
    assert gaps.while_waiting is None
    gaps.queued(2)
    gaps.service[2] += 7.0
    gaps.moment()
    assert gaps.while_waiting == 7.0
