"""Backends that die, err or are missing; a router that drains, restarts, or is given a bad configuration."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from support.exchange import Wire, call, events, gauges
from support.modelserver import ModelServer, model_server
from support.resumed import Question, ask, comparable, questions
from support.routers import RouterProcess, Setup, backend, router, write_snapshot
from support.tenants import new_tenant

from router_ext.ops.embedded import free_port
from router_ext.wire.controlplane import snapshot_digest

FLAGS = ("--sim-step-ms", "10", "--sim-mean-tokens", "0", "--max-total-tokens", "2048", "--sim-control", "on")
BODY = {"inputs": "Tell me a story", "parameters": {"max_new_tokens": 60, "details": True}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "temperature": 0, "stream": True}


def whole(port: int, path: str, body: Any, headers: dict[str, str] | None = None) -> list[Any]:
    status, _, answer = call(port, "POST", path, body, headers=headers)
    assert status == 200, answer
    return events(answer)


def stall(server: ModelServer, tokens: int) -> None:
    """Let no stream of this server get beyond so many tokens, so that none ends before the test kills it; 0: go on."""
    assert call(server.port, "POST", "/sim/faults", {"stall_after_tokens": tokens})[0] == 200


def test_a_stream_goes_on_elsewhere_when_its_backend_is_killed() -> None:
    """The client's stream is, token by token, what one backend would have sent."""
    with model_server(*FLAGS) as one, model_server(*FLAGS) as two:
        setup = Setup(backends=[backend(one.port, "one"), backend(two.port, "two")])
        with router(setup) as running:
            running.wait(lambda: running.metric("fairlane_backend_up") == 2)
            tenant = new_tenant(running)
            wanted = whole(two.port, "/generate_stream", BODY)
            stall(one, 5)
            stall(two, 5)
            with Wire(running.port) as wire:
                wire.send("POST", "/generate_stream", BODY, headers=tenant.headers)
                wire.head()
                pieces = wire.chunks()
                data = b""
                while data.count(b"data: ") < 5:
                    data += next(pieces)
                is_one = running.metric("fairlane_backend_running_requests", backend="bke_one")
                busy, other = (one, two) if is_one else (two, one)
                stall(other, 0)
                busy.process.kill()
                data += b"".join(pieces)
            assert events(data) == wanted
            (event,) = tenant.usage(1)
            assert (event.outcome, event.output_tokens, event.segments) == ("completed", 60, 2)
            assert len(event.backends) == 2
            assert event.resume_class == "exact"
            running.wait(running.is_idle)


def test_answers_of_every_dialect_go_on_elsewhere() -> None:
    """Those of a dozen whose backend is killed are resumed: byte for byte what one backend would have sent."""
    flags = (*FLAGS, "--sim-step-ms", "20", "--sim-special", "20")
    with model_server(*flags) as one, model_server(*flags) as two:
        asked = questions("Tell me a story", 60)
        setup = Setup(backends=[backend(one.port, "one"), backend(two.port, "two")])
        with router(setup) as running, ThreadPoolExecutor(2 * len(asked)) as threads:
            stopped = threads.map(Question.stopped, [asked[place] for place in (0, 3, 6)], [two.port] * 3)
            asked += itertools.chain.from_iterable(stopped)
            running.wait(lambda: running.metric("fairlane_backend_up") == 2)
            tenant = new_tenant(running)
            wanted = list(threads.map(lambda each: comparable(ask(two.port, each), each), asked))
            stall(one, 10)
            answers = [threads.submit(ask, running.port, each, tenant.headers) for each in asked]
            running.wait(lambda: gauges(one.port).get("tgi_batch_current_size", 0) > 3)
            one.process.kill()
            found = [comparable(answer.result(60), each) for answer, each in zip(answers, asked, strict=True)]
            assert found == wanted
            books = tenant.usage(len(asked))
            assert {event.resume_class for event in books} == {"exact"}
            assert max(len(event.backends) for event in books) == 2
            assert running.metric("fairlane_resumes_total", **{"class": "exact"}) > 0
            running.wait(running.is_idle)


def test_a_grammars_answer_is_not_resumed_and_says_so() -> None:
    """The rest of it cannot be had from its text: the client gets an error, though another backend is up."""
    grammar = {"type": "regex", "value": "[a-z]{50,60}"}
    asked = {"inputs": "Hi", "parameters": {"max_new_tokens": 60, "grammar": grammar}}
    with model_server(*FLAGS) as one, model_server(*FLAGS) as two:
        setup = Setup(backends=[backend(one.port, "one"), backend(two.port, "two")])
        with router(setup) as running:
            running.wait(lambda: running.metric("fairlane_backend_up") == 2)
            tenant = new_tenant(running)
            stall(one, 3)
            stall(two, 3)
            with Wire(running.port) as wire:
                wire.send("POST", "/generate_stream", asked, headers=tenant.headers)
                wire.head()
                pieces = wire.chunks()
                data = b""
                while data.count(b"data: ") < 3:
                    data += next(pieces)
                busy = running.metric("fairlane_backend_running_requests", backend="bke_one")
                (one if busy else two).process.kill()
                data += b"".join(pieces)
            found = events(data)
            assert found[-1]["error_type"] == "generation"
            (event,) = tenant.usage(1)
            assert (event.outcome, event.resume_class) == ("failed", "never")
            assert event.output_tokens == len(found) - 1
            assert running.metric("fairlane_unresumable_requests_total", reason="grammar") == 1
            assert running.metric("fairlane_resumes_total") == 0
            running.wait(running.is_idle)


def test_requests_that_showed_nothing_are_run_again() -> None:
    """A failed forward is a 424 for its whole batch; clients of it never learn."""
    with model_server(*FLAGS, "--sim-fail-after-steps", "3") as one, model_server(*FLAGS) as two:
        setup = Setup(backends=[backend(one.port, "one"), backend(two.port, "two")])
        with router(setup) as running:
            tenant = new_tenant(running)
            wanted = whole(two.port, "/generate_stream", BODY)
            answers: list[Any] = []
            threads = [
                threading.Thread(
                    target=lambda: answers.append(whole(running.port, "/generate_stream", BODY, tenant.headers))
                )
                for _ in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert answers == [wanted] * 6
            assert running.metric("fairlane_upstream_failures_total", backend="bke_one") > 0
            assert sum(e.output_tokens for e in tenant.usage(6)) == 360


def test_the_only_backend_lost_in_mid_stream_is_an_error_in_dialect() -> None:
    environment = {"FAIRLANE_ROUTER_RETRY_LIMIT": "0"}
    for path, body in (("/generate_stream", BODY), ("/v1/chat/completions", CHAT)):
        with (
            model_server(*FLAGS) as server,
            router(Setup(backends=[backend(server.port)]), environment=environment) as running,
        ):
            tenant = new_tenant(running)
            stall(server, 5)
            with Wire(running.port) as wire:
                wire.send("POST", path, body, headers=tenant.headers)
                wire.head()
                pieces = wire.chunks()
                data = b""
                while data.count(b"data: ") < 5:
                    data += next(pieces)
                server.process.kill()
                data += b"".join(pieces)
            found = events(data)
            assert "[DONE]" not in found
            error = found[-1]
            if path == "/generate_stream":
                assert error["error_type"] == "generation"
            else:
                assert error["error"]["code"] == "upstream_error"
            (event,) = tenant.usage(1)
            assert (event.outcome, event.error_code) == ("failed", "upstream_error")
            assert event.output_tokens == len(found) - 1


def test_a_stream_outlives_the_return_of_its_only_backend() -> None:
    port = free_port()
    with router(Setup(backends=[backend(port)]), is_awaited=False) as running:
        with model_server(*FLAGS, port=port) as server:
            running.wait(lambda: running.metric("fairlane_backend_up") == 1)
            tenant = new_tenant(running)
            wanted = whole(port, "/generate_stream", BODY)
            stall(server, 5)
            wire = Wire(running.port)
            wire.send("POST", "/generate_stream", BODY, headers=tenant.headers)
            wire.head()
            pieces = wire.chunks()
            data = next(pieces)
            server.process.kill()
            server.process.wait()
            running.wait(lambda: running.metric("fairlane_backend_up") == 0)
        with model_server(*FLAGS, port=port):
            data += b"".join(pieces)
            wire.close()
        assert events(data) == wanted
        assert tenant.usage(1)[0].outcome == "completed"


def test_no_backend_is_503_with_a_hint() -> None:
    port = free_port()
    with router(Setup(backends=[backend(port)], scheduling={"backend_wait_s": 2.0}), is_awaited=False) as running:
        assert call(running.port, "GET", "/readyz")[0] == 503
        assert call(running.port, "GET", "/health")[0] == 503
        assert call(running.port, "GET", "/livez")[0] == 200
        tenant = new_tenant(running)
        for path, body in (("/generate", BODY), ("/generate_stream", BODY), ("/v1/chat/completions", CHAT)):
            status, headers, answer = call(running.port, "POST", path, body, headers=tenant.headers)
            assert status == 503
            assert 1 <= int(headers["retry-after"]) <= 120
            data = json.loads(answer)
            if path.startswith("/v1"):
                assert data["error"]["code"] == "no_backend_available"
            else:
                assert data["error_type"] == "overloaded"
        assert tenant.events() == []
        with model_server(*FLAGS, port=port):
            running.wait(lambda: call(running.port, "GET", "/readyz")[0] == 200)
            assert len(whole(running.port, "/generate_stream", BODY, tenant.headers)) == 60
        running.wait(lambda: running.metric("fairlane_backend_up") == 0)
        # Its limits are known by now: the request waits its time, then is refused.
        began = time.monotonic()
        status, headers, _ = call(running.port, "POST", "/generate", BODY, headers=tenant.headers)
        assert status == 503
        assert headers["retry-after"]
        assert time.monotonic() - began > 0.4


def test_queued_requests_wait_for_the_return_of_the_only_backend() -> None:
    port = free_port()
    with router(Setup(backends=[backend(port)]), is_awaited=False) as running:
        with model_server(*FLAGS, port=port):
            running.wait(lambda: running.metric("fairlane_backend_up") == 1)
            tenant = new_tenant(running)
        running.wait(lambda: running.metric("fairlane_backend_up") == 0)
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(whole(running.port, "/generate_stream", BODY, tenant.headers))
        )
        thread.start()
        with model_server(*FLAGS, port=port):
            thread.join(30)
        assert len(answers[0]) == 60


def test_a_queue_that_is_full_is_429_with_a_hint() -> None:
    with model_server(*FLAGS) as server, router(Setup(backends=[backend(server.port, kv_tokens=1_040)])) as running:
        tenant = new_tenant(running, max_queued=1)
        long = {"inputs": "Tell me a story", "parameters": {"max_new_tokens": 1_000}}
        wires = [Wire(running.port) for _ in range(2)]
        for wire in wires:
            wire.send("POST", "/generate_stream", long, headers=tenant.headers)
        running.wait(lambda: running.metric("fairlane_queue_length") == 1)
        status, headers, answer = call(running.port, "POST", "/v1/chat/completions", CHAT, headers=tenant.headers)
        assert status == 429
        assert 1 <= int(headers["retry-after"]) <= 120
        error = json.loads(answer)["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        for wire in wires:
            wire.close()
        running.wait(running.is_idle)
        assert [e.outcome for e in tenant.usage(2)] == ["cancelled", "cancelled"]


def test_waiting_too_long_is_429() -> None:
    with model_server(*FLAGS) as server:
        setup = Setup(backends=[backend(server.port, kv_tokens=1_040)])
        setup.tiers[0] = msgspec.structs.replace(setup.tiers[0], max_queue_wait_s=0.3)
        with router(setup) as running:
            tenant = new_tenant(running)
            long = {"inputs": "Tell me a story", "parameters": {"max_new_tokens": 1_000}}
            with Wire(running.port) as first:
                first.send("POST", "/generate_stream", long, headers=tenant.headers)
                first.head()
                status, headers, answer = call(running.port, "POST", "/generate_stream", long, headers=tenant.headers)
                assert (status, json.loads(answer)["error_type"]) == (429, "overloaded")
                assert headers["retry-after"]
            assert sorted(e.outcome for e in tenant.usage(2)) == ["cancelled", "expired"]


def stream_in_thread(running: RouterProcess, body: Any, headers: dict[str, str]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def read() -> None:
        with Wire(running.port) as wire:
            wire.send("POST", "/generate_stream", body, headers=headers)
            found.append(wire.head()[0])
            found.append(events(b"".join(wire.chunks())))

    thread = threading.Thread(target=read)
    thread.start()
    return thread, found


def test_sigterm_lets_streams_finish_and_refuses_new_requests() -> None:
    flags = (*FLAGS, "--sim-step-ms", "40")  # none of the twenty may have ended when the last begins
    with model_server(*flags) as server, router(Setup(backends=[backend(server.port)])) as running:
        tenant = new_tenant(running)
        streams = [stream_in_thread(running, BODY, tenant.headers) for _ in range(20)]
        running.wait(lambda: running.metric("fairlane_inflight_requests") == 20)
        running.process.send_signal(signal.SIGTERM)
        running.wait(lambda: call(running.port, "GET", "/readyz")[0] == 503)
        status, headers, answer = call(running.port, "POST", "/generate", BODY, headers=tenant.headers)
        assert status == 503
        assert headers["retry-after"]
        assert json.loads(answer)["error_type"] == "overloaded"
        for thread, found in streams:
            thread.join(30)
            assert found[0] == 200
            assert len(found[1]) == 60
        assert running.process.wait(20) == 0
        assert [e.output_tokens for e in tenant.events()] == [60] * 20


def test_a_restart_behind_one_socket_loses_no_connection(tmp_path: Path) -> None:
    """A supervisor owns the socket: while the old process drains, new connections are the next one's."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    os.set_inheritable(listener.fileno(), True)
    handed = {"FAIRLANE_ROUTER_LISTEN_FD": str(listener.fileno()), "FAIRLANE_ROUTER_PORT": str(port)}
    with listener, model_server(*FLAGS) as server:
        setup = Setup(backends=[backend(server.port)])
        with router(setup, environment=handed, descriptors=(listener.fileno(),)) as old:
            tenant = new_tenant(old)
            stream = Wire(port)
            stream.send("POST", "/generate_stream", BODY, headers=tenant.headers)
            stream.head()
            old.process.send_signal(signal.SIGTERM)
            answers: list[Any] = []

            def ask() -> None:
                answers.append(whole(port, "/generate_stream", BODY, tenant.headers))

            threads = [threading.Thread(target=ask) for _ in range(8)]
            old.wait(lambda: "router.draining" in old.log.read_text())
            for thread in threads:
                thread.start()
            with router(setup, environment=handed, descriptors=(listener.fileno(),)):
                assert len(events(b"".join(stream.chunks()))) == 60
                stream.close()
                for thread in threads:
                    thread.join(30)
            assert [len(answer) for answer in answers] == [60] * 8
            assert old.process.wait(20) == 0


def test_the_drain_limit_ends_the_rest_with_an_error() -> None:
    environment = {"FAIRLANE_ROUTER_DRAIN_LIMIT_S": "0.3"}
    with (
        model_server(*FLAGS) as server,
        router(Setup(backends=[backend(server.port)]), environment=environment) as running,
    ):
        tenant = new_tenant(running)
        long = {"inputs": "Tell me a story", "parameters": {"max_new_tokens": 1_000}}
        thread, found = stream_in_thread(running, long, tenant.headers)
        running.wait(lambda: running.metric("fairlane_inflight_requests") == 1)
        running.process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert found[1][-1] == {"error": "The router is shutting down.", "error_type": "overloaded"}
        assert running.process.wait(20) == 0
        (event,) = tenant.events()
        assert (event.outcome, event.error_code, event.output_tokens) == ("failed", "draining", len(found[1]) - 1)


def test_killed_and_restarted_the_books_hold_what_was_received(tmp_path: Path) -> None:
    with model_server(*FLAGS) as server:
        setup = Setup(backends=[backend(server.port)])
        state = tmp_path / "state"
        with router(setup, directory=state) as running:
            tenant = new_tenant(running)
            whole(running.port, "/generate_stream", BODY, tenant.headers)
            wire = Wire(running.port)
            wire.send("POST", "/generate_stream", BODY, headers=tenant.headers)
            wire.head()
            pieces = wire.chunks()
            received = 0
            while received < 7:
                received += next(pieces).count(b"data: ")
            running.process.kill()
            running.process.wait()
            received += wire.rest().count(b"data: ")
            wire.close()
        with router(setup, directory=state) as running:
            found = {e.outcome: e for e in running.usage()}
            assert found["completed"].output_tokens == 60
            # At most one write above; on a busy machine one write holds several tokens.
            assert received <= found["aborted"].output_tokens <= received + 5
            running.wait(running.is_idle)


def test_a_bad_snapshot_is_refused_and_the_last_good_one_serves() -> None:
    with model_server(*FLAGS) as server, router(Setup(backends=[backend(server.port)])) as running:
        tenant = new_tenant(running)
        good = running.setup.snapshot()
        pool = msgspec.structs.replace(good.pools[0], scheduling={"policy": "lottery"})
        bad = msgspec.structs.replace(good, pools=[pool], digest="")
        write_snapshot(running.snapshot_file, msgspec.structs.replace(bad, digest=snapshot_digest(bad)))
        running.wait(lambda: "lottery" in running.log.read_text())
        assert len(whole(running.port, "/generate_stream", BODY, tenant.headers)) == 60
        running.publish()
        assert len(whole(running.port, "/generate_stream", BODY, tenant.headers)) == 60
        # Policies change under running requests; nothing is lost.
        threads = [stream_in_thread(running, BODY, tenant.headers) for _ in range(5)]
        for policy in ("fifo", "slo-fair", "fifo"):
            running.setup.scheduling["policy"] = policy
            running.publish()
        for thread, found in threads:
            thread.join(20)
            assert len(found[1]) == 60


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with model_server(*FLAGS) as server, router(Setup(backends=[backend(server.port)])) as running:
        environment = {
            "FAIRLANE_ROUTER_PORT": str(running.port),
            "FAIRLANE_ROUTER_DIR": str(tmp_path),
            "FAIRLANE_ROUTER_SNAPSHOT_FILE": str(running.snapshot_file),
            "FAIRLANE_KEY_PEPPER": "ab" * 32,
        }
        second = subprocess.run(
            [sys.executable, "-m", "router_ext.cli", "router"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert second.returncode == 1
    assert f"port {running.port} on 127.0.0.1 is busy" in second.stderr
