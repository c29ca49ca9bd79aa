"""The virtual server against the batcher of the model server, which moves every request separately.

Both get the same arrivals and the same clock. An iteration of the virtual server is one forward; the batcher owes a
decode after each prefill before it admits again, so with chunking that debt is taken from it before every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from router_ext.core.ids import RequestId
from router_ext.sim.jobs import Job
from router_ext.sim.models import ServerModel
from router_ext.sim.server import Server
from router_ext.sim.streams import Stream
from router_ext.tgi_model import Batcher, BatchRules, Entry

History = list[tuple[str, ...]]


@dataclass(frozen=True)
class Request:
    at_step: int
    name: str
    input_tokens: int
    length: int
    close_after: int | None


def case(seed: int, *, is_chunked: bool) -> tuple[ServerModel, list[Request]]:
    rng = random.Random(seed)
    kv = rng.randint(200, 900)
    budget = rng.choice([30, 64, 150]) if is_chunked else 300
    model = ServerModel(
        name="t",
        decode_base_ms=1.0,
        per_sequence_ms=1.0,
        per_context_token_ms=1.0,
        prefill_base_ms=1.0,
        per_prefill_token_ms=1.0,
        kv_tokens=kv,
        prefill_budget_tokens=budget,
        is_chunked=is_chunked,
        max_waiting_tokens=rng.choice([2, 5, 20]),
        waiting_served_ratio=rng.choice([0.0, 0.3, 1.2]),
    )
    requests = [
        Request(
            at_step=rng.randint(0, 60),
            name=f"r{number}",
            input_tokens=rng.randint(1, min(160, kv // 2)),
            length=rng.randint(1, 40),
            close_after=rng.randint(1, 30) if rng.random() < 0.2 else None,
        )
        for number in range(rng.randint(3, 25))
    ]
    return model, sorted(requests, key=lambda request: request.at_step)


def by_server(model: ServerModel, requests: list[Request]) -> History:
    server = Server(model)
    history: History = []
    waiting = list(requests)
    streams: dict[str, Stream] = {}
    closing: dict[str, int] = {}
    step = 0
    while step < 3_000:
        while waiting and waiting[0].at_step <= step:
            request = waiting.pop(0)
            job = Job(
                tenant=0,
                arrival_s=0.0,
                input_tokens=request.input_tokens,
                output_tokens=request.length,
                max_new_tokens=request.length,
            )
            job.request_id = RequestId(request.name)
            stream = Stream(job, input_tokens=request.input_tokens, length=request.length, new_tokens=request.length)
            streams[request.name] = stream
            server.open(stream)
            if request.close_after is not None:
                closing[request.name] = step + request.close_after
        end = server.begin(float(step))
        _close(step, closing, lambda name: server.close(streams[name]))
        step += 1
        if end is None:
            if not waiting and not closing and not server.queue:
                break
            continue
        outcome = server.finish(float(step))
        shown = [s.job.request_id for s in (*outcome.decoded.streams, *outcome.started)]
        ended = [f"end {s.job.request_id}" for s in outcome.ended]
        history.append((*sorted(shown), *sorted(ended), f"kv {server.reserved}", f"step {step}"))
    return history


def by_batcher(model: ServerModel, requests: list[Request]) -> History:
    batcher = Batcher(
        BatchRules(
            max_batch_prefill_tokens=model.prefill_budget_tokens,
            max_batch_total_tokens=model.kv_tokens,
            waiting_served_ratio=model.waiting_served_ratio,
            max_waiting_tokens=model.max_waiting_tokens,
            block_size=1,
            chunking=model.is_chunked,
        )
    )
    history: History = []
    waiting = list(requests)
    entries: dict[str, Entry] = {}
    closing: dict[str, int] = {}
    produced: dict[str, int] = {}
    lengths = {request.name: request.length for request in requests}
    step = 0
    while step < 3_000:
        while waiting and waiting[0].at_step <= step:
            request = waiting.pop(0)
            entry = Entry(input_length=request.input_tokens, max_new_tokens=request.length, owner=request.name)
            entries[request.name] = entry
            batcher.append(entry, float(step))
            if request.close_after is not None:
                closing[request.name] = step + request.close_after
        if model.is_chunked:
            batcher._owes_decode = False
        forward = batcher.next_step(float(step))
        _close(step, closing, lambda name: setattr(entries[name], "is_closed", True))
        step += 1
        if forward is None:
            if not waiting and not closing and not batcher.queue:
                break
            continue
        sampled = forward.sampled
        for entry in sampled:
            produced[entry.owner] = produced.get(entry.owner, 0) + 1
        over = [e for e in sampled if produced[e.owner] == lengths[e.owner]]
        # A closed stream is noticed with its next token.
        batcher.complete(forward, finished=[e for e in sampled if e.is_closed or e in over])
        history.append(
            (
                *sorted(e.owner for e in sampled),
                *sorted(f"end {e.owner}" for e in over),
                f"kv {batcher.batch_max_tokens}",
                f"step {step}",
            )
        )
    return history


def _close(step: int, closing: dict[str, int], close: Callable[[str], object]) -> None:
    for name in [name for name, at in closing.items() if at <= step]:
        close(name)
        del closing[name]


@pytest.mark.parametrize("is_chunked", [True, False], ids=["chunked", "whole"])
def test_same_tokens_same_reservations_at_every_step(is_chunked: bool) -> None:
    steps = 0
    for seed in range(150):
        model, requests = case(seed, is_chunked=is_chunked)
        mine, theirs = by_server(model, requests), by_batcher(model, requests)
        assert mine == theirs, seed
        steps += len(mine)
    assert steps > 5_000


def test_a_mutant_that_admits_past_the_head_is_seen() -> None:
    def reckless(self: Server, now: float) -> int:
        self.queue = type(self.queue)(sorted(self.queue, key=lambda stream: stream.reserved))
        return admit(self, now)

    admit = Server._admit_chunks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "_admit_chunks", reckless)
        cases = [case(seed, is_chunked=True) for seed in range(30)]
        assert any(by_server(*each) != by_batcher(*each) for each in cases)
