"""The model server answers recorded requests as the recorded TGI did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.modelserver import ModelServer, model_server
from support.recorded_tgi import (
    NARROW,
    WIDE,
    cases,
    differences,
    exchanges,
    replayed,
    warm_up,
)

MODEL = ("--sim-step-ms", "0.2", "--sim-mean-tokens", "0")
ORDINARY = list(exchanges("basics", "generate", "streams", "chat_and_completions"))
ERRORS = list(exchanges("errors"))


@pytest.fixture(scope="module")
def wide() -> Iterator[ModelServer]:
    with model_server(*WIDE, *MODEL) as server:
        warm_up(server)
        yield server


@pytest.fixture(scope="module")
def narrow() -> Iterator[ModelServer]:
    with model_server(*NARROW, *MODEL) as server:
        yield server


@cases(ORDINARY)
def test_model_engine_answers_as_recorded(wide: ModelServer, exchange: dict[str, Any]) -> None:
    status, headers, body = replayed(wide.port, exchange)
    assert differences(exchange, status, headers, body, same_weights=False) == []


@cases(ERRORS)
def test_every_refusal_is_the_recorded_one(narrow: ModelServer, exchange: dict[str, Any]) -> None:
    status, headers, body = replayed(narrow.port, exchange)
    assert differences(exchange, status, headers, body, same_weights=False) == []
