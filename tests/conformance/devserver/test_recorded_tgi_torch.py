"""The torch engine has the recorded weights: ids, texts, counts and ends of greedy requests are the recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.modelserver import ModelServer, model_server
from support.recorded_tgi import (
    WIDE,
    cases,
    differences,
    exchanges,
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
    assert differences(exchange, status, headers, body, same_weights=True) == []
