"""The torch engine under other limits, and with a tokenizer that adds BOS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.modelserver import ModelServer, model_server
from support.recorded_tgi import NARROW, WIDE, cases, differences, exchanges, replayed

pytestmark = [pytest.mark.torch_engine, pytest.mark.slow]
ERRORS = list(exchanges("errors"))
BOS = list(exchanges("bos"))


@pytest.fixture(scope="module")
def narrow() -> Iterator[ModelServer]:
    with model_server(*NARROW, engine="torch") as server:
        yield server


@pytest.fixture(scope="module")
def with_bos() -> Iterator[ModelServer]:
    with model_server(*WIDE, "--sim-bos", "on", engine="torch") as server:
        yield server


@cases(ERRORS)
def test_refuses_as_recorded(narrow: ModelServer, exchange: dict[str, Any]) -> None:
    status, headers, body = replayed(narrow.port, exchange)
    assert differences(exchange, status, headers, body, same_weights=True) == []


@cases(BOS)
def test_answers_as_recorded_with_a_tokenizer_that_adds_bos(with_bos: ModelServer, exchange: dict[str, Any]) -> None:
    status, headers, body = replayed(with_bos.port, exchange)
    assert differences(exchange, status, headers, body, same_weights=True) == []
