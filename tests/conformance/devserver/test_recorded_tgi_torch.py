"""The torch engine has the recorded weights: ids, texts, counts and ends of greedy requests are the recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.modelserver import ModelServer, model_server
from support.recorded_tgi import (
    NOT_SUPPORTED,
    REFUSED,
    WIDE,
    cases,
    differences,
    exchanges,
    refusal_of,
    replayed,
    warm_up,
)

pytestmark = [pytest.mark.torch_engine, pytest.mark.slow]
ORDINARY = list(exchanges("basics", "generate", "streams", "chat_and_completions"))


@pytest.fixture(scope="module")
def wide() -> Iterator[ModelServer]:
    with model_server(*WIDE, engine="torch") as server:
        warm_up(server)
        yield server


@cases(ORDINARY)
def test_answers_as_recorded(wide: ModelServer, exchange: dict[str, Any]) -> None:
    status, headers, body = replayed(wide.port, exchange)
    if exchange["name"] in REFUSED:
        assert refusal_of(exchange, status, body) == NOT_SUPPORTED
        return
    assert differences(exchange, status, headers, body, same_weights=True) == []
