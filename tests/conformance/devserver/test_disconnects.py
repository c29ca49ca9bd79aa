"""When clients leave: who notices, when memory comes back, and what the gauges say, as the recorded TGI had it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.exchange import Wire, call, events, gauges
from support.modelserver import ModelServer, model_server

STEP_S = 0.05
DROPPED = 'tgi_request_failure{err="dropped"}'
DECODES = 'tgi_batch_inference_count{method="decode"}'


LEVELS = ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens")


class Observed:
    """A server and what its counters have grown by since this test began."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._before: dict[str, float] = {}
        self._before = wait_for(self, lambda g: not any(g.get(name) for name in LEVELS))

    def gauges(self) -> dict[str, float]:
        found = gauges(self.port)
        return {n: v if n in LEVELS else v - self._before.get(n, 0) for n, v in found.items()}


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[ModelServer]:
    """One request at a time, no chunking, as the recorded server was started for these."""
    flags = ("--sim-chunking", "off", "--max-batch-size", "1", "--sim-mean-tokens", "0", "--sim-block-size", "1")
    with model_server(*flags, "--sim-step-ms", str(STEP_S * 1000), "--max-concurrent-requests", "3") as found:
        yield found


@pytest.fixture
def server(one_at_a_time: ModelServer) -> Observed:
    return Observed(one_at_a_time.port)


def generate(tokens: int) -> dict[str, Any]:
    return {"inputs": "1 2 3 4 5 6 7 8 9", "parameters": {"max_new_tokens": tokens, "details": True}}


def completion(tokens: int) -> dict[str, Any]:
    return {"prompt": "1 2 3 4 5 6 7 8 9", "max_tokens": tokens, "temperature": 0.0, "stream": True}


def chat(tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": "1 2 3"}
    return {"messages": [message], "max_tokens": tokens, "temperature": 0.0, "stream": True}


def wait_for(server: Observed, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Gauges once they satisfy the condition; fails after 20 s."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = server.gauges()
        if condition(found):
            return found
    raise AssertionError(f"still {found}")


def started(
    server: Observed | ModelServer, path: str, body: dict[str, Any], *, tokens: int
) -> tuple[Wire, Iterator[bytes]]:
    """A stream that has delivered ``tokens`` events."""
    wire = Wire(server.port)
    wire.send("POST", path, body)
    assert wire.head()[0] == 200
    chunks = wire.chunks()
    for _ in range(tokens):
        next(chunks)
    return wire, chunks


@pytest.mark.parametrize(("path", "body"), [("/generate_stream", generate(100)), ("/v1/chat/completions", chat(100))])
def test_a_queued_client_that_leaves_keeps_its_place_until_the_head(
    server: Observed, path: str, body: dict[str, Any]
) -> None:
    running, chunks = started(server, "/generate_stream", generate(20), tokens=1)
    with Wire(server.port) as queued:
        queued.send("POST", path, body)
        assert queued.head()[0] == 200
        wait_for(server, lambda g: g["tgi_queue_size"] == 1)
    time.sleep(2 * STEP_S)  # the server has had time to notice, and must not show it
    assert server.gauges()["tgi_queue_size"] == 1
    assert len(list(chunks)) == 19
    found = wait_for(server, lambda g: g["tgi_queue_size"] == 0 and g["tgi_batch_current_size"] == 0)
    running.close()
    assert found[DROPPED] == 1
    assert found["tgi_batch_current_max_tokens"] == 0
    assert found[DECODES] == 19, "the dead entry cost no forward"


def test_a_permit_is_free_at_once_when_a_queued_client_leaves(server: Observed) -> None:
    running, _ = started(server, "/generate_stream", generate(400), tokens=1)
    with running, Wire(server.port) as first, Wire(server.port) as second:
        for wire in (first, second):
            wire.send("POST", "/generate_stream", generate(1))
            wire.head()
        wait_for(server, lambda g: g["tgi_queue_size"] == 2)
        assert call(server.port, "POST", "/generate", generate(1))[0] == 429
        second.close()
        third, _ = started(server, "/generate_stream", generate(1), tokens=0)
        with third:
            wait_for(server, lambda g: g["tgi_queue_size"] == 3)


def test_a_queued_streaming_completion_is_prefilled_although_its_client_left(server: Observed) -> None:
    running, chunks = started(server, "/generate_stream", generate(20), tokens=1)
    with Wire(server.port) as queued:
        queued.send("POST", "/v1/completions", completion(300))
        queued.head()
        wait_for(server, lambda g: g["tgi_queue_size"] == 1)
    assert len(list(chunks)) == 19
    running.close()
    held = wait_for(server, lambda g: g["tgi_queue_size"] == 0 and g["tgi_batch_current_size"] == 1)
    assert held["tgi_batch_current_max_tokens"] == 17 + 300 - 1
    found = wait_for(server, lambda g: g["tgi_batch_current_size"] == 0)
    assert found[DROPPED] == 1
    assert found[DECODES] == 20, "its first token found nobody, its second ended it"


@pytest.mark.parametrize(
    ("path", "body", "extra"),
    [
        ("/generate_stream", generate(400), 1),
        ("/v1/chat/completions", chat(400), 1),
        ("/v1/completions", completion(400), 2),
    ],
)
def test_a_decoding_client_that_leaves_costs_the_running_step(
    server: Observed, path: str, body: dict[str, Any], extra: int
) -> None:
    wire, _ = started(server, path, body, tokens=5)
    wire.close()
    closed_after = server.gauges()[DECODES]
    found = wait_for(server, lambda g: g["tgi_batch_current_size"] == 0)
    assert found[DROPPED] == 1
    assert found[DECODES] - closed_after <= extra
    assert found["tgi_batch_current_max_tokens"] == 0


def test_a_client_that_only_stops_sending_is_gone(server: Observed) -> None:
    wire, _ = started(server, "/generate_stream", generate(400), tokens=2)
    with wire:
        wire.socket.shutdown(socket.SHUT_WR)
        assert not wire.rest().endswith(b"0\r\n\r\n")
    wait_for(server, lambda g: g.get(DROPPED) == 1 and g["tgi_batch_current_size"] == 0)


def test_a_non_streaming_client_that_leaves_is_dropped(server: Observed) -> None:
    with Wire(server.port) as wire:
        wire.send("POST", "/generate", generate(400))
        wait_for(server, lambda g: g.get("tgi_batch_current_size") == 1)
    wait_for(server, lambda g: g.get(DROPPED) == 1 and g["tgi_batch_current_size"] == 0)


def test_a_client_that_has_pipelined_further_bytes_is_not_missed(server: Observed) -> None:
    wire, chunks = started(server, "/generate_stream", generate(10), tokens=1)
    with wire:
        wire.send("GET", "/nope")
        wire.socket.shutdown(socket.SHUT_WR)
        assert len(list(chunks)) == 9
        assert wire.head()[0] == 404
    assert server.gauges().get(DROPPED, 0) == 0


def test_overload_has_each_dialects_face() -> None:
    with model_server("--max-concurrent-requests", "1", "--sim-mean-tokens", "0") as server:
        running, _ = started(server, "/generate_stream", generate(900), tokens=1)
        plain = {"error": "Model is overloaded", "error_type": "overloaded"}
        with running:
            for path, body in [("/generate", generate(1)), ("/", generate(1)), ("/invocations", generate(1))]:
                status, _, answer = call(server.port, "POST", path, body)
                assert (status, events(b"data: " + answer)) == (429, [plain])
            assert events(call(server.port, "POST", "/generate_stream", generate(1))[2]) == [plain]
            openai = [{"error": {"message": "Model is overloaded", "http_status_code": 422}}, "[DONE]"]
            assert events(call(server.port, "POST", "/v1/completions", completion(1))[2]) == openai
            assert events(call(server.port, "POST", "/v1/chat/completions", chat(1))[2]) == openai
            body = {"instances": [{"inputs": "a"}]}
            assert call(server.port, "POST", "/vertex", body)[0] == 500
            assert call(server.port, "POST", "/tokenize", generate(1))[0] == 200


def test_best_of_takes_a_permit_per_sequence() -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 2, "best_of": 2, "do_sample": True}}
    with model_server("--max-concurrent-requests", "2", "--sim-mean-tokens", "0") as server:
        assert call(server.port, "POST", "/generate", body)[0] == 200
        running, _ = started(server, "/generate_stream", generate(900), tokens=1)
        with running:
            assert call(server.port, "POST", "/generate", body)[0] == 429
        Observed(server.port)
        assert call(server.port, "POST", "/generate", body)[0] == 200, "all permits have come back"
