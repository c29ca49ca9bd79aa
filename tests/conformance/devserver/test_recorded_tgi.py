"""The model server answers recorded requests as the recorded TGI did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.exchange import call, events
from support.modelserver import ModelServer, model_server
from support.recorded_tgi import NOT_SUPPORTED, REFUSED, differences, exchanges, replayed

WIDE = ("--max-input-tokens", "2048", "--max-total-tokens", "4096")
NARROW = ("--max-input-tokens", "200", "--max-total-tokens", "300")
MODEL = ("--sim-step-ms", "0.2", "--sim-mean-tokens", "0")
ORDINARY = list(exchanges("basics", "generate", "streams", "chat_and_completions"))
ERRORS = list(exchanges("errors"))
BOS = list(exchanges("bos"))


@pytest.fixture(scope="module")
def wide() -> Iterator[ModelServer]:
    with model_server(*WIDE, *MODEL) as server:
        warm_up(server)
        yield server


@pytest.fixture(scope="module")
def narrow() -> Iterator[ModelServer]:
    with model_server(*NARROW, *MODEL) as server:
        yield server


def warm_up(server: ModelServer) -> None:
    """One request, as the recorded server had had before its first metrics page was taken."""
    status, _, _ = call(server.port, "POST", "/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 5}})
    assert status == 200


def cases(found: list[tuple[str, dict[str, Any]]]) -> Any:
    return pytest.mark.parametrize("exchange", [e for _, e in found], ids=[name for name, _ in found])


def refusal_of(exchange: dict[str, Any], status: int, body: bytes) -> str:
    """The refusal of a grammar in the shape of the endpoint."""
    if exchange["request"]["body"].get("stream") or exchange["request"]["path"] == "/generate_stream":
        assert status == 200
        error = events(body)[0]["error"]
        return error["message"] if isinstance(error, dict) else error
    assert status == 422
    return json.loads(body)["error"]


@cases(ORDINARY)
def test_model_engine_answers_as_recorded(wide: ModelServer, exchange: dict[str, Any]) -> None:
    status, headers, body = replayed(wide.port, exchange)
    if exchange["name"] in REFUSED:
        assert refusal_of(exchange, status, body) == NOT_SUPPORTED
        return
    assert differences(exchange, status, headers, body, same_weights=False) == []


@cases(ERRORS)
def test_every_refusal_is_the_recorded_one(narrow: ModelServer, exchange: dict[str, Any]) -> None:
    status, headers, body = replayed(narrow.port, exchange)
    assert differences(exchange, status, headers, body, same_weights=False) == []


@pytest.mark.torch_engine
@pytest.mark.slow
class TestTorchEngine:
    """The same weights: ids, texts, counts and ends of greedy requests are the recorded ones too."""

    @pytest.fixture(scope="class")
    def wide(self) -> Iterator[ModelServer]:
        with model_server(*WIDE, engine="torch") as server:
            warm_up(server)
            yield server

    @pytest.fixture(scope="class")
    def narrow(self) -> Iterator[ModelServer]:
        with model_server(*NARROW, engine="torch") as server:
            yield server

    @pytest.fixture(scope="class")
    def with_bos(self) -> Iterator[ModelServer]:
        with model_server(*WIDE, "--sim-bos", "on", engine="torch") as server:
            yield server

    @cases(ORDINARY)
    def test_answers_as_recorded(self, wide: ModelServer, exchange: dict[str, Any]) -> None:
        status, headers, body = replayed(wide.port, exchange)
        if exchange["name"] in REFUSED:
            assert refusal_of(exchange, status, body) == NOT_SUPPORTED
            return
        assert differences(exchange, status, headers, body, same_weights=True) == []

    @cases(ERRORS)
    def test_refuses_as_recorded(self, narrow: ModelServer, exchange: dict[str, Any]) -> None:
        status, headers, body = replayed(narrow.port, exchange)
        assert differences(exchange, status, headers, body, same_weights=True) == []

    @cases(BOS)
    def test_answers_as_recorded_with_a_tokenizer_that_adds_bos(
        self, with_bos: ModelServer, exchange: dict[str, Any]
    ) -> None:
        status, headers, body = replayed(with_bos.port, exchange)
        assert differences(exchange, status, headers, body, same_weights=True) == []
