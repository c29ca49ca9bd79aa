"""When a refused client is told to come back: the table of estimates, and no refusal of its kind without a hint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripted import running

from router_ext import errors
from router_ext.errors import FairlaneError, QueueRefused
from router_ext.gateway.generation import Dialect
from router_ext.gateway.refusals import error_response


@pytest.mark.parametrize(
    ("estimate_s", "low", "high"), [(0.0, 1, 1), (0.2, 1, 1), (7.0, 7, 9), (600.0, 120, 120), (1e12, 120, 120)]
)
async def test_an_estimate_becomes_whole_seconds_within_bounds(
    tmp_path: Path, estimate_s: float, low: int, high: int
) -> None:
    async with running(tmp_path) as world:
        model = world.router.engines["pol_main"].model
        hints = [model.retry_after(estimate_s) for _ in range(200)]
    said = set()
    for hint in hints:
        _, headers, _ = error_response(QueueRefused("full", retry_after_s=hint), Dialect.CHAT)
        found = dict(headers)
        said.add(int(found[b"retry-after"]))
        assert 0 < int(found[b"retry-after-ms"]) <= 1_000 * int(found[b"retry-after"])
    assert said <= set(range(low, high + 1))
    if high < 120:
        assert len({round(hint, 6) for hint in hints}) > 100, "spread"


def kinds(base: type[FairlaneError] = FairlaneError) -> Iterator[type[FairlaneError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_every_429_and_503_has_a_hint(dialect: Dialect) -> None:
    assert errors.LimitExceeded in set(kinds())
    for kind in set(kinds()):
        if kind.status_openai in (429, 503) or kind.status_native in (429, 503):
            status, headers, _ = error_response(kind("no"), dialect)
            if status in (429, 503):
                assert 1 <= int(dict(headers)[b"retry-after"]) <= 120, kind
