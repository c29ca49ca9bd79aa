"""The recorded timelines again: who sees what in which order, and what the gauges say meanwhile. No milliseconds."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.exchange import Wire, call, events, gauges
from support.modelserver import ModelServer, model_server
from support.recorded_tgi import FOLDER

RECORDED = {
    b["name"]: b["timeline"] for b in map(json.loads, (FOLDER / "behaviours.jsonl").read_text("utf-8").splitlines())
}
LIMITS = ("--max-input-tokens", "1024", "--max-total-tokens", "2100", "--max-batch-prefill-tokens", "1024")
PADDED = ("--sim-block-size", "0", "--sim-chunking", "off", "--sim-mean-tokens", "0")
STEP_S = 0.05
QUICK = (*LIMITS, *PADDED, "--sim-step-ms", str(1000 * STEP_S))
LEVELS = ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens")
DROPPED = 'tgi_request_failure{err="dropped"}'
FAILED = 'tgi_request_failure{err="generation"}'
DECODES = 'tgi_batch_inference_count{method="decode"}'
PROMPT = "1 2 3 4 5 6 7 8 9"
STORY = {"role": "user", "content": "Tell a story."}

State = tuple[float, ...]
"""Queue, batch, reserved tokens, and clients dropped since the first state of the timeline."""


def body(path: str, tokens: int) -> dict[str, Any]:
    """A greedy stream of so many tokens, in the dialect of the path."""
    if path == "/generate_stream" or path == "/generate":
        return {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, "details": True}}
    asked: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0, "stream": True}
    return asked | ({"prompt": PROMPT} if path == "/v1/completions" else {"messages": [STORY]})


def state(page: dict[str, Any], dropped: float = 0) -> State:
    return (*((page.get(name) or 0) for name in LEVELS), (page.get(DROPPED) or 0) - dropped)


def recorded_states(timeline: list[Any]) -> list[State]:
    pages = [value for _, what, value in timeline if what.startswith("metrics")]
    return [state(page, pages[0].get(DROPPED) or 0) for page in pages]


def distinct(states: list[State]) -> list[State]:
    return [each for n, each in enumerate(states) if n == 0 or each != states[n - 1]]


def is_within(some: list[State], all_of_them: list[State]) -> bool:
    left = iter(all_of_them)
    return all(each in left for each in some)


class Watch:
    """States of a server, sampled by whoever asks."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.states: list[State] = []
        self._dropped: float | None = None

    def look(self) -> State:
        page = gauges(self.port)
        if self._dropped is None:
            self._dropped = page.get(DROPPED, 0)
        self.states.append(state(page, self._dropped))
        return self.states[-1]

    def until(self, condition: Callable[[State], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition(self.look()):
            assert time.monotonic() < deadline, self.states[-1]
            time.sleep(0.005)


def idle(port: int) -> None:
    Watch(port).until(lambda found: found[:3] == (0, 0, 0))


def started(port: int, path: str, tokens: int, *, events_read: int) -> tuple[Wire, Iterator[bytes]]:
    wire = Wire(port)
    wire.send("POST", path, body(path, tokens))
    assert wire.head()[0] == 200
    chunks = wire.chunks()
    for _ in range(events_read):
        next(chunks)
    return wire, chunks


@pytest.fixture(scope="module")
def single() -> Iterator[ModelServer]:
    with model_server(*QUICK, "--max-batch-size", "1") as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with model_server(*QUICK) as found:
        yield found


@pytest.mark.parametrize("path", ["/generate_stream", "/v1/completions", "/v1/chat/completions"])
def test_a_queued_client_that_leaves(single: ModelServer, path: str) -> None:
    timeline = RECORDED[f"disconnect while queued, {path}"]
    idle(single.port)
    tokens = 20  # the running one reserves the recorded hundred, less eighty
    running, chunks = started(single.port, "/generate_stream", tokens, events_read=1)
    queued = Wire(single.port)
    with queued:
        queued.send("POST", path, body(path, 300))
        assert queued.head()[0] == 200
        watch = Watch(single.port)
        watch.until(lambda found: found[0] == 1)
    watch.states = watch.states[-1:]
    watch.look()
    assert len(list(chunks)) == tokens - 1
    running.close()
    watch.until(lambda found: found[:3] == (0, 0, 0))
    expected = [
        (q, n, held - 80 if held == 117 else held, dropped) for q, n, held, dropped in recorded_states(timeline)
    ]
    assert is_within(distinct(expected), distinct(watch.states)), watch.states
    assert watch.states[-1] == expected[-1]


@pytest.mark.parametrize(
    ("name", "path", "leave"),
    [
        ("disconnect while decoding", "/generate_stream", "close"),
        ("disconnect of a non-stream request while decoding", "/generate", "close"),
        ("half-close by the client while decoding", "/generate_stream", "half-close"),
        ("disconnect of streaming completions while decoding", "/v1/completions", "close"),
        ("disconnect of a chat stream while decoding", "/v1/chat/completions", "close"),
    ],
)
def test_a_decoding_client_that_leaves(server: ModelServer, name: str, path: str, leave: str) -> None:
    idle(server.port)
    decodes_before = [v[DECODES] for _, what, v in RECORDED[name] if what.startswith("metrics")]
    watch = Watch(server.port)
    if path == "/generate":
        wire = Wire(server.port)
        wire.send("POST", path, body(path, 400))
        watch.until(lambda found: found[1] == 1)
        watch.states = watch.states[-1:]
    else:
        wire, _ = started(server.port, path, 400, events_read=5)
        watch.look()
    with wire:
        decodes = gauges(server.port).get(DECODES, 0)  # absent before the first
        if leave == "half-close":
            wire.socket.shutdown(socket.SHUT_WR)
            assert not wire.rest().endswith(b"0\r\n\r\n"), "the server closes, and the body is not whole"
    watch.until(lambda found: found[:3] == (0, 0, 0))
    expected = recorded_states(RECORDED[name])
    if path == "/v1/chat/completions":  # the recorded chat is another one, of 38 tokens
        expected[0] = (*expected[0][:2], watch.states[0][2], *expected[0][3:])
        assert watch.states[0][2] > 400
    assert distinct(watch.states) == distinct(expected)
    assert gauges(server.port).get(DECODES, 0) - decodes <= decodes_before[-1] - decodes_before[0] + 1


def answers(timeline: list[Any], who: str) -> dict[str, Any]:
    """What one asked heard: status, and the body or the events."""
    found: dict[str, Any] = {"events": []}
    for _, what, value in timeline:
        if what == f"{who}: head":
            found["status"] = int(value.split(" ")[1])
        elif what == f"{who}: body":
            found["body"] = value
        elif what.startswith(f"{who}: event "):
            found["events"].append(value.removeprefix("data: "))
    return found


ASKED = {
    "/generate": body("/generate", 1),
    "/generate_stream": body("/generate", 1),
    "/": body("/generate", 1),
    "/ stream": {**body("/generate", 1), "stream": True},
    "/v1/chat/completions": {"messages": [STORY], "max_tokens": 1},
    "/v1/chat/completions stream": {"messages": [STORY], "max_tokens": 1, "stream": True},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/completions stream": {"prompt": "Hi", "max_tokens": 1, "stream": True},
    "/tokenize": {"inputs": "Hi"},
    "/chat_tokenize": {"messages": [STORY]},
    "/invocations": body("/generate", 1),
    "/vertex": {"instances": [{"inputs": "Hi"}]},
}


def test_overload_in_every_dialect() -> None:
    timeline = RECORDED["overload"]
    with model_server(*QUICK, "--max-concurrent-requests", "2") as server:
        streams = [started(server.port, "/generate_stream", 400, events_read=1)[0] for _ in range(2)]
        for who, asked in ASKED.items():
            expected = answers(timeline, who)
            status, _, data = call(server.port, "POST", who.removesuffix(" stream"), asked)
            assert status == expected["status"], who
            if who == "/chat_tokenize":
                assert json.loads(data).keys() == {"tokenize_response", "templated_text"}
            elif "body" in expected:
                assert data.decode() == expected["body"], who
            else:
                assert [part.removeprefix("data: ") for part in data.decode().split("\n\n") if part] == expected[
                    "events"
                ]
        found = gauges(server.port)
        (page,) = (value for _, what, value in timeline if what == "metrics")
        for name in (*LEVELS, 'tgi_request_failure{err="overloaded"}', "tgi_request_success", "tgi_request_count"):
            assert found.get(name) == page[name], name
        assert call(server.port, "GET", "/health")[::2] == (200, b"")
        for stream in streams:
            stream.close()


def test_best_of_takes_a_permit_per_sequence() -> None:
    expected = answers(RECORDED["best_of takes a permit per sequence"], "best_of")
    with model_server(*QUICK, "--max-concurrent-requests", "2") as server:
        running, _ = started(server.port, "/generate_stream", 400, events_read=1)
        asked = {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True, "max_new_tokens": 2}}
        with running:
            status, _, data = call(server.port, "POST", "/generate", asked)
        assert (status, data.decode()) == (expected["status"], expected["body"])


def test_authorisation() -> None:
    keys = {
        "none": {},
        "wrong": {"Authorization": "Bearer wrong"},
        "right": {"Authorization": "Bearer secret"},
        "other case": {"Authorization": "bearer SECRET"},
        "no scheme": {"Authorization": "secret"},
    }
    with model_server(*QUICK, "--api-key", "secret") as server:
        for _, what, (status_line, text) in RECORDED["authorisation"]:
            who, _, rest = what.partition(": ")
            method, path = rest.split(" ")
            asked = ASKED[path] if method == "POST" else None
            status, _, data = call(server.port, method, path, asked, headers=keys[who])
            assert status == int(status_line.split(" ")[1]), what
            assert bool(data) == bool(text) or path == "/metrics", what


def test_a_grammar_that_does_not_compile_fails_its_prefill_batch_alone() -> None:
    name = "a request whose grammar does not compile, beside others"
    timeline = RECORDED[name]
    with model_server(*LIMITS, *PADDED, "--sim-step-ms", "250") as server:
        running = [started(server.port, "/generate_stream", 8, events_read=1) for _ in range(2)]
        next(running[1][1])
        wires = {who: Wire(server.port) for who in ("mate1", "mate2", "bad")}
        for who, wire in wires.items():
            asked = body("/generate", 4)
            if who == "bad":
                asked["parameters"]["grammar"] = {"type": "regex", "value": "("}
            wire.send("POST", "/generate_stream", asked)
        for who, wire in wires.items():
            expected = answers(timeline, who)
            status, headers = wire.head()
            assert status == expected["status"]
            assert events(wire.body(headers)) == [json.loads(event) for event in expected["events"]], who
            wire.close()
        assert sum(len(list(chunks)) for _, chunks in running) == 2 * 8 - 3, "those that run do not notice"
        for wire, _ in running:
            wire.close()
        (page,) = (value for _, what, value in timeline if what == "metrics")
        idle(server.port)
        found = gauges(server.port)
        assert found[FAILED] == page[FAILED]
        assert found["tgi_request_success"] == page["tgi_request_success"]
        assert call(server.port, "GET", "/health")[::2] == (200, b"")


class _Reader(threading.Thread):
    """Reads one answer to its end; ``events``: how many there were."""

    def __init__(self, port: int, path: str, tokens: int) -> None:
        super().__init__()
        self.wire = Wire(port)
        self.wire.send("POST", path, body(path, tokens))
        self.first = threading.Event()
        self.status = 0
        self.events: list[Any] = []
        self.data = b""
        self.start()

    def run(self) -> None:
        with self.wire as wire:
            self.status, headers = wire.head()
            if "transfer-encoding" not in headers:
                self.data = wire.body(headers)
                return
            for chunk in wire.chunks():
                self.events += events(chunk)
                self.first.set()


def test_sigterm_while_streams_run() -> None:
    timeline = RECORDED["the router gets SIGTERM while streams run"]
    ends = {what.split(":")[0]: value for _, what, value in timeline if what.endswith("end of body, events")}
    # Slower: the signal must come, and the port close, before the first of the streams ends.
    with model_server(*QUICK, "--sim-step-ms", "80") as server:
        paths = {"stream": "/generate_stream", "chat": "/v1/chat/completions", "plain": "/generate"}
        readers = {who: _Reader(server.port, path, 60) for who, path in paths.items()}
        assert all(readers[who].first.wait(30) for who in ("stream", "chat"))
        Watch(server.port).until(lambda found: found[1] == 3)  # the plain one is under way as well
        server.process.send_signal(signal.SIGTERM)
        refused = [what for _, what, value in timeline if value == "[Errno 111] Connection refused"]
        assert refused == ["GET /health", "GET /info", "GET /metrics", "newcomer"]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
            except ConnectionRefusedError:
                break
            except ConnectionResetError:  # it was in the queue of the socket that closed
                continue
        else:
            pytest.fail("the port still answers")
        assert all(reader.is_alive() for reader in readers.values())
        for reader in readers.values():
            reader.join()
        assert {who: len(readers[who].events) for who in ends} == ends
        assert readers["plain"].status == answers(timeline, "plain")["status"]
        assert json.loads(readers["plain"].data)["details"]["generated_tokens"] == 60
        assert server.process.wait(30) == 0


def test_the_shard_dies_while_streams_run() -> None:
    timeline = RECORDED["the shard process is killed while streams run"]
    with model_server(*QUICK, "--sim-control", "on") as server:
        paths = {"chat": "/v1/chat/completions", "plain": "/generate"}
        readers = {who: _Reader(server.port, path, 200) for who, path in paths.items()}
        assert readers["chat"].first.wait(30)
        assert call(server.port, "POST", "/sim/faults", {"shard_dead_after_steps": 1})[0] == 200
        for reader in readers.values():
            reader.join()
        expected = answers(timeline, "chat")["events"]
        assert readers["chat"].events[-2:] == [json.loads(expected[1]), "[DONE]"]
        plain = answers(timeline, "plain")
        assert (readers["plain"].status, readers["plain"].data.decode()) == (plain["status"], plain["body"])
        pages = {what.removeprefix("GET "): value for _, what, value in timeline if what.startswith("GET ")}
        assert call(server.port, "GET", "/health")[::2] == (503, pages["/health"].encode())
        assert call(server.port, "GET", "/info")[0] == call(server.port, "GET", "/metrics")[0] == 200
        newcomer = answers(timeline, "newcomer")
        status, _, data = call(server.port, "POST", "/generate_stream", body("/generate_stream", 4))
        assert (status, events(data)) == (newcomer["status"], [json.loads(event) for event in newcomer["events"]])


def status_lines(port: int, sent: bytes, *, answers: int = 1) -> list[str]:
    """The first lines of the answers to bytes on a bare socket."""
    with Wire(port) as wire:
        with contextlib.suppress(ConnectionError):  # the server may close while much is still being sent
            wire.socket.sendall(sent)
        lines = []
        for _ in range(answers):
            head = wire._until(b"\r\n\r\n").decode().lower()
            lines.append(head.split("\r\n")[0].upper())
            if "content-length: " in head:
                wire._exactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        return lines


def test_http_details(server: ModelServer) -> None:
    asked = b'{"inputs":"Hi","parameters":{"max_new_tokens":1}}'
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    get = b"GET /health HTTP/1.1\r\nHost: a\r\n"
    sent = {
        "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
        "Expect: 100-continue": head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(asked),
        "chunked request body": head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(asked), asked),
        "two pipelined requests": 2 * (get + b"\r\n"),
        "header of 100,000 bytes": get + b"X: %b\r\n\r\n" % (b"a" * 100_000),
        "header of 500,000 bytes": get + b"X: %b\r\n\r\n" % (b"a" * 500_000),
    }
    recorded = {what: value for _, what, value in RECORDED["HTTP details"]}
    elsewhere = {"HTTP/2 with prior knowledge", "keep-alive reuse"}  # not imitated; the Wire of other tests
    assert sent.keys() | elsewhere == recorded.keys()
    for what, data in sent.items():
        expected = [line.upper() for line in recorded[what].split("\r\n") if line.startswith("HTTP/1.")]
        if what == "HTTP/1.0":
            assert status_lines(server.port, data) == expected
            continue
        assert status_lines(server.port, data, answers=len(expected)) == expected, what


@pytest.mark.slow
def test_comments_keep_a_queued_stream_alive() -> None:
    timeline = RECORDED["keep-alive comments while queued"]
    expected = answers(timeline, "waiting")["events"]
    first = next(n for n, event in enumerate(expected) if event != ":")
    assert expected[:first] == [":"] * 8, "one for every 15 of the 134 s that it waited"
    with model_server(*LIMITS, *PADDED, "--sim-step-ms", "100", "--max-batch-size", "1") as server:
        ahead, _ = started(server.port, "/generate_stream", 330, events_read=1)
        with ahead, Wire(server.port) as waiting:
            waiting.send("POST", "/generate_stream", body("/generate_stream", 3))
            waiting.head()
            found = [chunk.decode().removeprefix("data: ").strip() for chunk in waiting.chunks()]
    assert found[:2] == [":"] * 2, "it waited 33 s"
    assert [json.loads(each)["index"] for each in found[2:]] == [json.loads(e)["index"] for e in expected[first:]]


@pytest.mark.slow
@pytest.mark.torch_engine
def test_a_seed_on_a_padded_server_does_not_depend_on_its_mates() -> None:
    texts = [value for _, _, value in RECORDED["a seed under load"]]
    assert len(set(texts)) == 1
    asked = {"inputs": "Hi", "parameters": {"do_sample": True, "seed": 7, "max_new_tokens": 24}}
    found = []
    with model_server(*LIMITS, *PADDED, engine="torch") as server:
        for is_loaded in (False, False, True, True):
            mates = [_Reader(server.port, "/generate_stream", 6 * n) for n in (1, 2, 3)] if is_loaded else []
            found.append(json.loads(call(server.port, "POST", "/generate", asked)[2])["generated_text"])
            for mate in mates:
                mate.join()
    assert len(set(found)) == 1
