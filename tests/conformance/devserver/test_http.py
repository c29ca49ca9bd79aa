"""The transport: framing, keep-alive, limits, authorisation, start-up and shutdown."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.exchange import Wire, call, events, gauges
from support.modelserver import ModelServer, model_server

BODY = {"inputs": "Hi", "parameters": {"max_new_tokens": 3, "details": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with model_server("--sim-step-ms", "1", "--sim-mean-tokens", "0") as found:
        yield found


def test_http_1_0_gets_no_chunks_and_a_closed_connection(server: ModelServer) -> None:
    with Wire(server.port) as wire:
        body = b'{"inputs":"Hi","parameters":{"max_new_tokens":2}}'
        wire.socket.sendall(
            b"POST /generate_stream HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        status, headers = wire.head()
        rest = wire.rest()
    assert status == 200
    assert "transfer-encoding" not in headers
    assert rest.startswith(b"data: {")
    assert len(events(rest)) == 2


def test_a_request_may_wait_for_100_continue(server: ModelServer) -> None:
    with Wire(server.port) as wire:
        wire.socket.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 14\r\n\r\n"
        )
        assert wire.head()[0] == 100
        wire.socket.sendall(b'{"inputs":"a"}')
        assert wire.head()[0] == 200


def test_a_body_may_come_in_chunks(server: ModelServer) -> None:
    with Wire(server.port) as wire:
        wire.socket.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b'Transfer-Encoding: chunked\r\n\r\n7\r\n{"input\r\n7\r\ns":"a"}\r\n0\r\n\r\n'
        )
        assert wire.head()[0] == 200


def test_pipelined_requests_are_answered_in_order(server: ModelServer) -> None:
    with Wire(server.port) as wire:
        wire.send("POST", "/generate", BODY)
        wire.send("GET", "/nope")
        wire.send("GET", "/health")
        statuses = []
        for _ in range(3):
            status, headers = wire.head()
            wire.body(headers)
            statuses.append(status)
    assert statuses == [200, 404, 200]


def test_a_connection_serves_one_request_after_another(server: ModelServer) -> None:
    with Wire(server.port) as wire:
        for _ in range(3):
            wire.send("POST", "/generate_stream", BODY)
            _, headers = wire.head()
            assert len(events(wire.body(headers))) == 3


def test_headers_of_100_kB_pass_and_of_500_kB_do_not(server: ModelServer) -> None:
    assert call(server.port, "GET", "/health", headers={"x": "a" * 100_000})[0] == 200
    with Wire(server.port) as wire:
        try:
            wire.send("GET", "/health", headers={"x": "a" * 500_000})
        except ConnectionError:
            pass  # the server may close while the rest is still being sent
        else:
            assert wire.head()[0] == 431


def test_what_is_no_http_is_refused_and_closed(server: ModelServer) -> None:
    with Wire(server.port) as wire:
        wire.socket.sendall(b"hello\r\n\r\n")
        assert wire.head()[0] == 400
        wire.rest()


def test_a_body_over_the_limit_is_refused() -> None:
    with model_server("--payload-limit", "1000") as server:
        body = b'{"inputs":"' + b"a" * 2000 + b'"}'
        status, headers, text = call(server.port, "POST", "/generate", body)
        assert (status, text) == (413, b"Failed to buffer the request body: length limit exceeded")
        assert headers["content-type"] == "text/plain; charset=utf-8"


def test_the_key_is_compared_whole_and_without_case() -> None:
    with model_server("--api-key", "secret", "--sim-step-ms", "1") as server:
        for path in ("/", "/generate", "/generate_stream", "/tokenize", "/v1/completions", "/vertex", "/invocations"):
            assert call(server.port, "POST", path, BODY)[::2] == (401, b"")
        for wrong in ("Bearer wrong", "secret", "Basic secret"):
            assert call(server.port, "POST", "/generate", BODY, headers={"Authorization": wrong})[0] == 401
        assert call(server.port, "POST", "/generate", BODY, headers={"Authorization": "bearer SECRET"})[0] == 200
        chat = {"messages": [{"role": "user", "content": "a"}]}
        assert call(server.port, "POST", "/chat_tokenize", chat)[0] == 200
        for path in ("/", "/health", "/info", "/metrics", "/v1/models"):
            assert call(server.port, "GET", path)[0] == 200


def test_a_fresh_server_has_an_empty_metrics_page() -> None:
    with model_server() as server:
        assert call(server.port, "GET", "/metrics")[2] == b""


def test_requests_are_counted_as_tgi_counts_them() -> None:
    with model_server("--sim-step-ms", "1", "--sim-mean-tokens", "0") as server:
        message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        for path, body, expected in [
            ("/generate", BODY, 1),
            ("/v1/chat/completions", message, 3),
            ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, 6),
            ("/chat_tokenize", message, 7),
            ("/tokenize", BODY, 7),
        ]:
            assert call(server.port, "POST", path, body)[0] == 200
            assert gauges(server.port)["tgi_request_count"] == expected
        assert gauges(server.port)["tgi_request_success"] == 4


def test_a_busy_port_is_named_and_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "router_ext.devserver", "--engine", "model", "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--max-input-tokens", "300", "--max-total-tokens", "300"), "`max_input_tokens` must be < `max_total_tokens`"),
        (("--max-batch-total-tokens", "4000"), "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`"),
        (("--sim-chunking", "off", "--max-batch-prefill-tokens", "100"), "must be >= `max_input_tokens`"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(flags: tuple[str, ...], text: str) -> None:
    command = [sys.executable, "-m", "router_ext.devserver", "--engine", "model", "--port", "0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert text in ended.stderr


def test_sigterm_closes_the_port_at_once_and_lets_streams_finish() -> None:
    with model_server("--sim-step-ms", "20", "--sim-mean-tokens", "0") as server:
        body = {"inputs": "Hi", "parameters": {"max_new_tokens": 60}}
        with Wire(server.port) as stream, Wire(server.port) as plain, Wire(server.port) as idle:
            idle.send("GET", "/health")
            idle.head()
            stream.send("POST", "/generate_stream", body)
            plain.send("POST", "/generate", body)
            stream.head()
            chunks = stream.chunks()
            next(chunks)
            server.process.send_signal(signal.SIGTERM)
            assert idle.rest() == b""
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                try:
                    socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
                except ConnectionRefusedError:
                    break
            else:
                pytest.fail("the port still answers")
            assert len(list(chunks)) == 59
            assert plain.head()[0] == 200
        assert server.process.wait(10) == 0


def test_no_cut_stream_outlives_the_grace_period() -> None:
    flags = ("--graceful-termination-timeout", "0.2", "--sim-step-ms", "100", "--sim-mean-tokens", "0")
    with model_server(*flags) as server, Wire(server.port) as stream:
        stream.send("POST", "/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 1000}})
        stream.head()
        server.process.send_signal(signal.SIGTERM)
        assert not stream.rest().endswith(b"0\r\n\r\n")
        assert server.process.wait(10) == 0


@pytest.mark.slow
def test_a_comment_keeps_a_silent_stream_alive_every_15_s() -> None:
    with model_server("--sim-freeze-after-steps", "1") as server, Wire(server.port) as wire:
        wire.send("POST", "/generate_stream", BODY)
        wire.head()
        chunks = wire.chunks()
        started = time.monotonic()
        assert next(chunks) == b":\n\n"
        assert 14.9 < time.monotonic() - started < 16
        assert next(chunks) == b":\n\n"
        assert 29.9 < time.monotonic() - started < 31


def test_a_client_that_asks_for_it_gets_a_closed_connection(server: ModelServer) -> None:
    with Wire(server.port) as wire:
        wire.send("GET", "/health", headers={"Connection": "close"})
        assert wire.head()[1]["connection"] == "close"
        assert wire.rest() == b""


def test_a_request_above_1024_tokens_is_one_stream_of_whole_pieces(server: ModelServer) -> None:
    body = {"inputs": "1 2 3", "parameters": {"max_new_tokens": 1100, "details": True}}
    found = events(call(server.port, "POST", "/generate_stream", body)[2])
    assert [e["index"] for e in found] == list(range(1, 2049))
    assert found[-1]["details"]["generated_tokens"] == 2048
    assert found[-1]["details"]["input_length"] == 5
    assert found[-1]["generated_text"] == "".join(e["token"]["text"] for e in found)


def test_a_piece_that_does_not_fit_any_more_ends_the_stream(server: ModelServer) -> None:
    prompt = " word" * 2100
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 3000, "details": True}}
    found = events(call(server.port, "POST", "/generate_stream", body)[2])
    assert len(found) == 1024
    assert found[-1]["details"]["finish_reason"] == "length"


def test_without_a_limit_the_stream_ends_at_the_total() -> None:
    flags = ("--max-total-tokens", "1500", "--sim-step-ms", "0.2", "--sim-mean-tokens", "0")
    with model_server(*flags) as server:
        body = {"inputs": "1 2 3", "parameters": {"details": True}}
        found = events(call(server.port, "POST", "/generate_stream", body)[2])
        assert len(found) == 1500 - 5
