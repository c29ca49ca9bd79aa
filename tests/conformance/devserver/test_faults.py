"""Injected failures look like those of a TGI whose shard errs, hangs or dies."""

from __future__ import annotations

import json
import time

import pytest
from support.exchange import Wire, call, events, gauges
from support.modelserver import model_server

BODY = {"inputs": "Hi", "parameters": {"max_new_tokens": 40, "details": True}}
QUICK = ("--sim-step-ms", "10", "--sim-mean-tokens", "0")


def test_a_failed_forward_fails_every_request_of_the_batch() -> None:
    with model_server(*QUICK, "--sim-fail-after-steps", "12", "--sim-fail-message", "out of memory") as server:
        with Wire(server.port) as first, Wire(server.port) as second, Wire(server.port) as third:
            first.send("POST", "/generate_stream", BODY)
            second.send("POST", "/v1/chat/completions", {"messages": [], "max_tokens": 40, "stream": True})
            third.send("POST", "/generate", BODY)
            streams = []
            for wire in (first, second):
                _, headers = wire.head()
                streams.append(events(wire.body(headers)))
            status, headers = third.head()
            answer = json.loads(third.body(headers))
        text = "Request failed during generation: Server error: out of memory"
        assert streams[0][-1] == {"error": text, "error_type": "generation"}
        assert 1 < len(streams[0]) < 14
        assert streams[1][-2:] == [{"error": {"message": text, "http_status_code": 422}}, "[DONE]"]
        assert (status, answer) == (424, {"error": text, "error_type": "generation"})
        found = gauges(server.port)
        assert found['tgi_request_failure{err="generation"}'] == 3
        assert found["tgi_batch_current_max_tokens"] == 0
        assert call(server.port, "GET", "/health")[0] == 200, "a probe forward works again"
        assert call(server.port, "POST", "/generate", BODY)[0] == 200


def test_a_dead_shard_fails_everything_but_the_pages() -> None:
    with model_server(*QUICK, "--sim-shard-dead-after-steps", "3") as server:
        last = events(call(server.port, "POST", "/generate_stream", BODY)[2])[-1]
        assert last["error"].endswith("Server error: transport error")
        last = events(call(server.port, "POST", "/generate_stream", BODY)[2])[-1]
        assert last["error"].endswith("Server error: error trying to connect: Connection refused (os error 111)")
        status, _, body = call(server.port, "GET", "/health")
        assert (status, json.loads(body)) == (503, {"error": "unhealthy", "error_type": "healthcheck"})
        assert call(server.port, "POST", "/generate", BODY)[0] == 424
        assert call(server.port, "GET", "/info")[0] == call(server.port, "GET", "/metrics")[0] == 200


def test_an_exit_cuts_streams_without_a_last_event() -> None:
    with model_server(*QUICK, "--sim-exit-after-steps", "5") as server, Wire(server.port) as wire:
        wire.send("POST", "/generate_stream", BODY)
        wire.head()
        rest = wire.rest()
        assert server.process.wait(10) == 1
        assert rest.count(b"data: ") == 4
        assert b'"generated_text":"' not in rest


def test_a_freeze_stops_tokens_and_health_and_ends() -> None:
    with model_server(*QUICK, "--sim-freeze-after-steps", "5", "--sim-freeze-s", "1.5") as server:
        with Wire(server.port) as wire, Wire(server.port, limit_s=0.5) as health:
            wire.send("POST", "/generate_stream", BODY)
            wire.head()
            chunks = wire.chunks()
            for _ in range(4):
                next(chunks)
            health.send("GET", "/health")
            with pytest.raises(TimeoutError):
                health.head()
            assert call(server.port, "GET", "/info")[0] == 200
            assert len(list(chunks)) == 36
        assert call(server.port, "GET", "/health")[0] == 200


def test_a_stalled_stream_holds_its_place_and_sends_nothing() -> None:
    flags = ("--sim-stall-after-tokens", "3", "--sim-stall-every", "1")
    with model_server(*QUICK, *flags) as server, Wire(server.port, limit_s=0.5) as wire:
        wire.send("POST", "/generate_stream", {**BODY, "parameters": {"max_new_tokens": 1000}})
        wire.head()
        chunks = wire.chunks()
        for _ in range(3):
            next(chunks)
        with pytest.raises(TimeoutError):
            next(chunks)
        assert gauges(server.port)["tgi_batch_current_size"] == 1


def test_health_may_be_slow() -> None:
    with model_server("--sim-health-delay-s", "0.4") as server:
        started = time.monotonic()
        assert call(server.port, "GET", "/health")[0] == 200
        assert time.monotonic() - started >= 0.4


def test_faults_can_be_changed_while_the_server_runs() -> None:
    with model_server(*QUICK, "--sim-control", "on") as server:
        assert call(server.port, "POST", "/sim/faults", {"fail_every_steps": 1})[0] == 200
        assert call(server.port, "POST", "/generate", BODY)[0] == 424
        assert call(server.port, "POST", "/sim/faults", {"fail_every_steps": 0})[0] == 200
        assert call(server.port, "POST", "/generate", BODY)[0] == 200
        assert call(server.port, "POST", "/sim/faults", {"nonsense": 1})[0] == 422
    with model_server() as server:
        assert call(server.port, "POST", "/sim/faults", {})[0] == 404
