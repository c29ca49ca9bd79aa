"""The virtual server against steps worked out by hand."""

from __future__ import annotations

import pytest

from router_ext.core.ids import RequestId
from router_ext.sim.jobs import Job
from router_ext.sim.models import A10G, ServerModel
from router_ext.sim.server import Server, Stream


def stream(name: str, input_tokens: int, length: int, new_tokens: int | None = None, **fields: bool) -> Stream:
    job = Job(tenant=0, arrival_s=0.0, input_tokens=input_tokens, output_tokens=length, max_new_tokens=length)
    job.request_id = RequestId(name)
    return Stream(job, input_tokens=input_tokens, length=length, new_tokens=new_tokens or length, **fields)


def test_a_prefill_alone_takes_the_prefill_constant() -> None:
    server = Server(A10G)
    server.open(stream("a", 100, 2))
    end = server.begin(0.0)
    assert end == pytest.approx((35.8 + 100 * 0.2131) / 1_000)


def test_decoders_and_a_chunk_share_an_iteration() -> None:
    server = Server(A10G)
    server.open(stream("a", 100, 3))
    now = server.begin(0.0)
    assert now is not None
    outcome = server.finish(now)
    assert [s.job.request_id for s in outcome.started] == ["a"]
    server.open(stream("b", 50, 1))
    end = server.begin(now)
    assert end is not None
    # One decoder with 100 prompt tokens and one of its own, and 50 prompt tokens of the newcomer.
    assert end - now == pytest.approx((15.3 + 0.253 + 0.00216 * 101 + 50 * 0.2131) / 1_000)
    outcome = server.finish(end)
    assert [s.job.request_id for s in outcome.decoded.streams] == ["a"]
    assert [s.job.request_id for s in outcome.started] == ["b"]
    assert [s.job.request_id for s in outcome.ended] == ["b"]
    assert server.reserved == 100 + 3 - 1


def test_the_head_that_does_not_fit_stops_the_queue() -> None:
    server = Server(A10G)
    for name, size in (("a", 9_000), ("b", 2_000), ("c", 10)):
        server.open(stream(name, size, 100))
    server.begin(0.0)
    assert server.num_running == 1
    assert [s.job.request_id for s in server.queue] == ["b", "c"]


def test_a_long_prompt_takes_the_budget_until_it_is_done() -> None:
    model = ServerModel(
        name="t",
        decode_base_ms=1.0,
        per_sequence_ms=0.0,
        per_context_token_ms=0.0,
        prefill_base_ms=0.0,
        per_prefill_token_ms=1.0,
        kv_tokens=100_000,
        prefill_budget_tokens=100,
    )
    server = Server(model)
    server.open(stream("long", 250, 2))
    server.open(stream("short", 10, 2))
    ends = []
    now = 0.0
    while (end := server.begin(now)) is not None:
        outcome = server.finish(end)
        ends.append((round((end - now) * 1_000), [str(s.job.request_id) for s in outcome.started]))
        now = end
    # 100 + 100 + 50 of the long one, with which the short one rides; then both decode once.
    assert ends == [(100, []), (100, []), (60, ["long", "short"]), (1, [])]
