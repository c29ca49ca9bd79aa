"""What the suites send: rates, lengths, and that nobody's arrivals depend on anybody else."""

from __future__ import annotations

import itertools

import pytest

from router_ext.errors import SimulationError
from router_ext.sim.jobs import Job
from router_ext.sim.models import A10G, INCIDENT
from router_ext.sim.suites import Suite, SuiteChoice, suite_names
from router_ext.sim.workloads import Streams, ramp

# Requests per second while on, (input, output) or their ranges, by client; duration.
TABLE: dict[str, tuple[list[tuple[float, object, object]], float]] = {
    "overload": ([(1.5, 256, 256), (3.0, 256, 256)], 360),
    "overload-multi": ([(rate, 256, 256) for rate in (0.4, 0.4, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6)], 360),
    "overload-weighted": ([(rate, 256, 256) for rate in (0.8, 0.8, 1.2, 1.6)], 360),
    "proportional": ([(rate, 256, 256) for rate in (0.25, 0.5, 1.5)], 600),
    "on_off_less": ([(0.25, 256, 256), (2.0, 256, 256)], 600),
    "on_off_overload": ([(1.0, 256, 256), (3.0, 256, 256)], 600),
    "poisson_on_off_overload": ([(0.25, (16, 512), (16, 512)), (2.0, (16, 512), (16, 512))], 600),
    "poisson_short_long": ([(8.0, 64, 64), (1.5, 256, 256)], 600),
    "poisson_short_long_2": ([(8.0, 512, 32), (1.5, 32, 512)], 600),
    "increase": ([(0.5, 256, 256), (1.1, 256, 256)], 600),
    "dist_shift": ([((0.5 * 180 + 300 + 150) / 900, 256, 256), (1.5, 256, 256)], 900),
    "light": ([(0.2, 256, 256), (0.8, 256, 256)], 300),
    "flood": ([(1.0, 64, 64), (32.0, 64, 64)], 300),
    "mixed": ([(0.5, (32, 128), (32, 128)), (2.0, (64, 1_024), (64, 768))], 600),
    "burst": ([(200 / 600, 256, 256), (0.5, 256, 256)], 600),
    "weights": ([(3.0, (32, 1_024), (32, 512))] * 3, 600),
    "adversary-flood": (
        [(4.0, (32, 128), (32, 128)), (0.3, (32, 128), (32, 128)), (2.0, (64, 1_024), (64, 768))],
        600,
    ),
    "adversary-max": ([(4.0, 128, 32), (1.5, 256, 256)], 600),
    "adversary-max-honest": ([(4.0, 128, 32), (1.5, 256, 256)], 600),
    "kv-overreserve": ([(8.0, (32, 128), (100, 300))], 300),
}


def jobs(suite: Suite, index: int, seed: int = 1, end_s: float | None = None) -> list[Job]:
    client = suite.clients[index]
    streams = Streams(
        f"{suite.same_as or suite.name}:{seed}:{client.name}", index, suite.duration_s if end_s is None else end_s
    )
    return list(client.source(streams))


def is_within(value: int, wanted: object) -> bool:
    if isinstance(wanted, tuple):
        return bool(wanted[0] <= value <= wanted[1])
    return value == wanted


@pytest.mark.parametrize("name", TABLE)
def test_rates_and_lengths_are_the_stated_ones(name: str) -> None:
    suite = SuiteChoice(name=name).build()
    clients, duration_s = TABLE[name]
    assert suite.duration_s == duration_s
    assert suite.model is A10G
    assert len(suite.clients) == len(clients)
    for index, (rate, inputs, outputs) in enumerate(clients):
        seeds = [jobs(suite, index, seed) for seed in (1, 2, 3)]
        for sent in seeds:
            assert all(earlier.arrival_s <= later.arrival_s for earlier, later in itertools.pairwise(sent))
            assert all(0.0 <= job.arrival_s < duration_s for job in sent)
            assert all(is_within(job.input_tokens, inputs) and is_within(job.output_tokens, outputs) for job in sent)
        mean_rate = sum(map(len, seeds)) / (3 * duration_s)
        expected = 3 * duration_s * rate
        # Four standard deviations of a Poisson count; evenly spaced arrivals are off by a request or two.
        assert abs(mean_rate * 3 * duration_s - expected) <= max(6.0, 4.0 * expected**0.5)


def test_every_suite_is_in_the_table_or_tested_below() -> None:
    others = {"incident", "tiers", "agents", "agents-reduce", "trace"}
    assert set(suite_names()) == set(TABLE) | others


def test_on_off_is_a_minute_each_and_begins_with_on() -> None:
    sent = jobs(SuiteChoice(name="on_off_less").build(), 0)
    assert {int(job.arrival_s // 60) % 2 for job in sent} == {0}
    assert {int(job.arrival_s // 60) for job in sent} == {0, 2, 4, 6, 8}


def test_a_ramp_has_the_rate_it_should_have_at_every_minute() -> None:
    import random

    instants = list(itertools.takewhile(lambda at: at < 600, ramp(0.2, 2.0, over_s=600.0)(random.Random(1))))
    for minute in range(10):
        count = sum(minute * 60 <= at < minute * 60 + 60 for at in instants)
        middle = 0.2 + 1.8 * (minute + 0.5) / 10
        assert abs(count - 60 * middle) <= 1


def test_limits_are_the_outputs_unless_a_suite_says_otherwise() -> None:
    for name, limit in (("kv-overreserve", 4_096), ("adversary-max", 4_096), ("adversary-max-honest", 32)):
        assert {job.max_new_tokens for job in jobs(SuiteChoice(name=name).build(), 0)} == {limit}
    assert all(job.max_new_tokens == job.output_tokens for job in jobs(SuiteChoice(name="mixed").build(), 1))


def test_the_burst_comes_at_once() -> None:
    assert [job.arrival_s for job in jobs(SuiteChoice(name="burst").build(), 0)] == [60.0] * 200


def test_the_incident_has_3000_long_prompts_and_an_endless_chatbot() -> None:
    suite = SuiteChoice(name="incident").build()
    assert (suite.model, suite.num_backends) == (INCIDENT, 2)
    batch = jobs(suite, 1)
    assert {(job.arrival_s, job.input_tokens, job.output_tokens) for job in batch} == {(0.0, 8_000, 200)}
    assert len(batch) == 3_000
    chatbot = suite.clients[0]
    assert chatbot.is_open_ended
    sent = list(itertools.islice(chatbot.source(Streams("x", 0, float("inf"))), 10_000))
    assert sent[-1].arrival_s == pytest.approx(2_500, rel=0.05)


def test_tiers_share_real_lengths_equally() -> None:
    suite = SuiteChoice(name="tiers", rate=0.6).build()
    sent = [jobs(suite, index, end_s=200_000.0) for index in range(3)]
    for third in sent:
        assert len(third) / 200_000 == pytest.approx(0.2, rel=0.05)
        assert max(job.input_tokens + job.output_tokens for job in third) < 9_000
        # The trace's means: 1,154 in, 211 out.
        assert sum(job.input_tokens for job in third) / len(third) == pytest.approx(1_154, rel=0.05)
        assert sum(job.output_tokens for job in third) / len(third) == pytest.approx(211, rel=0.05)
    assert [client.ttft_target_s for client in suite.clients] == [6.0, None, None]
    assert [client.completion_target_s for client in suite.clients] == [None, 600.0, 1_800.0]


@pytest.mark.parametrize("name", ["agents", "agents-reduce"])
def test_agents_call_in_parallel_with_a_key_of_their_own(name: str) -> None:
    sent = jobs(SuiteChoice(name=name).build(), 0, end_s=20_000.0)
    by_agent = [list(group) for _, group in itertools.groupby(sent, key=lambda job: id(job.agent))]
    assert len(by_agent) / 20_000 == pytest.approx(0.5, rel=0.05)
    sizes = [len(calls) for calls in by_agent]
    assert (min(sizes), max(sizes)) == (2, 16)
    assert sum(sizes) / len(sizes) == pytest.approx(9, rel=0.05)
    num_long = 0
    for calls in by_agent:
        assert len({job.arrival_s for job in calls}) == 1
        assert len({job.key for job in calls}) == 1
        agent = calls[0].agent
        assert agent is not None
        assert (agent.reduce is not None) is (name == "agents-reduce")
        is_long = calls[0].output_tokens >= 200
        num_long += is_long
        low, high = (200, 500) if is_long else (32, 128)
        assert all(low <= job.output_tokens <= high and 64 <= job.input_tokens <= 512 for job in calls)
    assert len({calls[0].key for calls in by_agent}) == len(by_agent)
    assert num_long / len(by_agent) == pytest.approx(0.3, abs=0.03)


def test_one_clients_arrivals_do_not_depend_on_the_others() -> None:
    suite = SuiteChoice(name="mixed").build()
    alone = suite.alone("batch")
    together = [(job.arrival_s, job.input_tokens, job.output_tokens, job.guess) for job in jobs(suite, 1)]
    assert together == [(job.arrival_s, job.input_tokens, job.output_tokens, job.guess) for job in jobs(alone, 0)]
    assert together != [(job.arrival_s, job.input_tokens, job.output_tokens, job.guess) for job in jobs(suite, 1, 2)]


def test_a_batch_alone_is_run_to_its_end_and_a_chatbot_for_a_while() -> None:
    suite = SuiteChoice(name="incident").build()
    assert suite.alone("batch").is_until_batch_ends
    assert not suite.alone("chatbot").is_until_batch_ends
    assert not SuiteChoice(name="mixed").build().alone("batch").is_until_batch_ends


def test_what_a_tenant_declares_changes_nothing_else() -> None:
    boasting, honest = (SuiteChoice(name=name).build() for name in ("adversary-max", "adversary-max-honest"))
    for index in (0, 1):
        assert [job.arrival_s for job in jobs(boasting, index)] == [job.arrival_s for job in jobs(honest, index)]


def test_options_a_suite_does_not_have_are_refused() -> None:
    with pytest.raises(SimulationError, match="suite overload has no rate"):
        SuiteChoice(name="overload", rate=1.0).build()
    with pytest.raises(SimulationError, match="suite trace needs a file"):
        SuiteChoice(name="trace").build()
