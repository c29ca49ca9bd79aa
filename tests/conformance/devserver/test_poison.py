"""What one odd request does to the others, as recorded: to a stream that runs, to a newcomer, and to the server.

Time runs ten times faster than on the recorded server wherever nothing is compiled. A class is compared, not seconds:
the status, the words of an error, a connection that is cut, an answer that does not come, and whether an answer came
late.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.exchange import Wire, events
from support.modelserver import ModelServer, model_server
from support.recorded_tgi import FOLDER

RECORDED = {e["name"]: e for e in map(json.loads, (FOLDER / "poison.jsonl").read_text("utf-8").splitlines())}
LIMITS = ("--max-input-tokens", "1024", "--max-total-tokens", "2100", "--max-batch-prefill-tokens", "1024")
PADDED = ("--sim-block-size", "0", "--sim-chunking", "off", "--sim-mean-tokens", "0")
GRAMMARS = [name for name in RECORDED if name.startswith("grammar")]
HARMLESS = [name for name in RECORDED if name not in GRAMMARS]
FAILING = {name for name in GRAMMARS if RECORDED[name]["odd"][0] == 424}
LOSING = {name for name in GRAMMARS if RECORDED[name]["health"] != 200}
# Compiled in earnest these take many seconds.
LONG = {
    "grammar: bounded repeat 2,000",
    "grammar: nested repeats",
    "grammar: JSON, 40 string fields",
    "grammar: JSON with 12 optional fields",
}
LATE_S = 2.0
"""Where the recorded answers part: others waited at least 3.4 s, or less than a second."""

STEP = ("--sim-step-ms", "250")
"""Long enough for two requests to be sent within one step, so that they share a prefill."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of one request: a status and an error, or ``cut``, or ``silent``; and after how long."""

    outcome: Any
    error: str | None
    seconds: float


def recorded(value: list[Any]) -> tuple[Any, str | None, bool]:
    """(outcome, error, whether it came late) of a recorded request."""
    status, seconds, text = value
    outcome = {"TimeoutError": "silent", "RemoteDisconnected": "cut"}.get(status, status)
    error = json.loads(text)["error"] if outcome in (422, 424) else None
    return outcome, error, outcome == 200 and seconds > LATE_S


class _Asked(threading.Thread):
    """One request to ``/generate``, sent at once and read in a thread."""

    def __init__(self, port: int, body: dict[str, Any], limit_s: float) -> None:
        super().__init__()
        self._wire = Wire(port, limit_s=limit_s)
        self._sent_at = time.monotonic()
        self._wire.send("POST", "/generate", body)
        self.seen = Seen("silent", None, limit_s)
        self.start()

    def run(self) -> None:
        with self._wire as wire, contextlib.suppress(TimeoutError):
            try:
                status, headers = wire.head()
                answer = json.loads(wire.body(headers))
                self.seen = Seen(status, answer.get("error"), time.monotonic() - self._sent_at)
            except ConnectionError:
                self.seen = Seen("cut", None, time.monotonic() - self._sent_at)


def poisoned(server: ModelServer, odd: dict[str, Any], *, tokens: int, limit_s: float) -> dict[str, Any]:
    """Send the odd request and a newcomer right after an event of a stream of ``tokens``; what came of all three."""
    greedy = {"inputs": "1 2 3 4 5 6 7 8 9", "parameters": {"max_new_tokens": tokens}}
    newcomer = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 2}}
    with Wire(server.port, limit_s=limit_s) as running:
        running.send("POST", "/generate_stream", greedy)
        assert running.head()[0] == 200
        chunks = running.chunks()
        next(chunks)
        asked = [_Asked(server.port, body, limit_s) for body in (odd, newcomer)]
        try:
            rest = b"".join(chunks)
            stream = (200, events(rest)[-1].get("error"))
        except TimeoutError:
            stream = ("silent", None)
        except ConnectionError:
            stream = ("cut", None)
    for each in asked:
        each.join()
    return {"odd": asked[0].seen, "newcomer": asked[1].seen, "running": stream, "health": health(server)}


def health(server: ModelServer) -> Any:
    """Status of ``/health``, or how it does not answer."""
    try:
        with Wire(server.port, limit_s=1.0) as wire:
            wire.send("GET", "/health")
            return wire.head()[0]
    except TimeoutError:
        return "silent"
    except ConnectionError:
        return "cut"


def check(name: str, seen: dict[str, Any], *, late_s: float) -> None:
    """The classes of all three are the recorded ones."""
    exchange = RECORDED[name]
    for who in ("odd", "newcomer"):
        outcome, error, is_late = recorded(exchange[who])
        assert (seen[who].outcome, seen[who].error) == (outcome, error), who
        if outcome == 200:
            assert (seen[who].seconds > late_s) is is_late, (who, seen[who].seconds)
    assert seen["running"] == (recorded(exchange["running"])[0], None)
    expected = {"timed out": "silent", 200: 200}.get(exchange["health"], "cut")
    assert seen["health"] == expected


@pytest.fixture(scope="module")
def plain() -> Iterator[ModelServer]:
    with model_server(*LIMITS, *PADDED, "--sim-step-ms", "5") as server:
        yield server


@pytest.mark.parametrize("name", HARMLESS)
def test_an_odd_request_without_a_grammar_hurts_nobody(plain: ModelServer, name: str) -> None:
    seen = poisoned(plain, RECORDED[name]["request"], tokens=40, limit_s=60)
    check(name, seen, late_s=30)


@pytest.fixture(scope="module")
def from_table() -> Iterator[ModelServer]:
    with model_server(*LIMITS, *PADDED, *STEP, "--sim-hazards", "--sim-time-scale", "10") as server:
        yield server


@pytest.fixture(scope="module")
def from_table_slowly() -> Iterator[ModelServer]:
    with model_server(*LIMITS, *PADDED, *STEP, "--sim-hazards") as server:
        yield server


@pytest.fixture(scope="module")
def compiling() -> Iterator[ModelServer]:
    with model_server(*LIMITS, *PADDED, *STEP) as server:
        yield server


@pytest.mark.parametrize("name", [n for n in GRAMMARS if n not in FAILING | LOSING])
def test_a_grammar_has_its_effect_from_the_table(from_table: ModelServer, name: str) -> None:
    check(name, poisoned(from_table, RECORDED[name]["request"], tokens=6, limit_s=60), late_s=LATE_S / 10)


@pytest.mark.parametrize("name", sorted(FAILING))
def test_a_batch_fails_as_the_table_says(from_table_slowly: ModelServer, name: str) -> None:
    check(name, poisoned(from_table_slowly, RECORDED[name]["request"], tokens=6, limit_s=60), late_s=30)


@pytest.mark.parametrize("name", sorted(LOSING))
def test_a_backend_is_lost_as_the_table_says(name: str) -> None:
    with model_server(*LIMITS, *PADDED, *STEP, "--sim-hazards", "--sim-time-scale", "10") as server:
        check(name, poisoned(server, RECORDED[name]["request"], tokens=6, limit_s=2), late_s=LATE_S)


@pytest.mark.parametrize("name", [n for n in GRAMMARS if n not in LONG | LOSING])
def test_a_compiled_grammar_does_to_others_what_it_did(compiling: ModelServer, name: str) -> None:
    check(name, poisoned(compiling, RECORDED[name]["request"], tokens=6, limit_s=60), late_s=30)


def test_a_schema_that_refers_to_itself_ends_the_process() -> None:
    name = "grammar: recursive $ref"
    with model_server(*LIMITS, *PADDED, *STEP) as server:
        check(name, poisoned(server, RECORDED[name]["request"], tokens=6, limit_s=60), late_s=30)
        assert server.process.wait(10) == 134
        assert "refers to itself" in server.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LONG))
def test_a_compiled_grammar_stalls_others_as_it_did(name: str) -> None:
    limit_s = 10.0 if name in LOSING else 200.0  # a comment every 15 s keeps a silent stream alive
    with model_server(*LIMITS, *PADDED, "--sim-step-ms", "20") as server:
        seen = poisoned(server, RECORDED[name]["request"], tokens=40, limit_s=limit_s)
        check(name, seen, late_s=LATE_S)
