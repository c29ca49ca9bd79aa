"""Requests made of the router's own OpenAPI document, and the answers held against it: right ones and wrong ones.

A few of each operation in the default selection; many under ``slow`` (``FAIRLANE_SCHEMATHESIS_EXAMPLES``, 60 each).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from support.modelserver import ModelServer, model_server
from support.routers import RouterProcess, Setup, backend, router

from router_ext.gateway.openapi import document

MANY = int(os.environ.get("FAIRLANE_SCHEMATHESIS_EXAMPLES", "60"))
SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations()}
# Every value may be of the right shape and still not fit the model, the pool or the caller's rights.
EXCLUDED = [CHECKS.get_one("positive_data_acceptance")]


@pytest.fixture(scope="module")
def short_server() -> Iterator[ModelServer]:
    flags = ("--sim-step-ms", "0.1", "--sim-mean-tokens", "3", "--max-total-tokens", "256")
    with model_server(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def fresh_router(short_server: ModelServer) -> Iterator[tuple[RouterProcess, str]]:
    setup = Setup(backends=[backend(short_server.port)])
    key = setup.key("alpha", may_choose_tier=True)
    with router(setup) as running:
        yield running, key


def run(found: tuple[RouterProcess, str], label: str, n_examples: int) -> Counter[int]:
    """How often each status was answered; everything is given back afterwards."""
    running, key = found
    statuses: Counter[int] = Counter()

    def check(case: Any) -> None:
        answer = case.call(base_url=running.base, headers={"Authorization": f"Bearer {key}"}, timeout=30)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, f"{answer.status_code} to\n{case.as_curl_command()}\n{answer.content!r}"
        case.validate_response(answer, excluded_checks=EXCLUDED)

    operation = OPERATIONS[label]
    modes = [GenerationMode.POSITIVE]
    if operation.body or operation.headers:
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:
        strategy = operation.as_strategy(generation_mode=mode)
        kept = settings(
            max_examples=n_examples,
            derandomize=n_examples < MANY,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        kept(given(case=strategy)(check))()
    running.wait(running.is_idle)
    return statuses


@pytest.mark.parametrize("label", OPERATIONS)
def test_answers_are_what_the_document_says(fresh_router: tuple[RouterProcess, str], label: str) -> None:
    run(fresh_router, label, 2)


@pytest.mark.slow
@pytest.mark.parametrize("label", OPERATIONS)
def test_many_answers_are_what_the_document_says(fresh_router: tuple[RouterProcess, str], label: str) -> None:
    statuses = run(fresh_router, label, MANY)
    # Of those two there is nothing to tell here: no request of such an id, and no control plane.
    assert statuses[200] or "/v1/requests/" in label or "/v1/usage" in label, statuses


def test_methods_that_are_not_served_are_named_as_such(fresh_router: tuple[RouterProcess, str]) -> None:
    running, _ = fresh_router
    connection = HTTPConnection("127.0.0.1", running.port, timeout=10)
    for path, item in document()["paths"].items():
        served = {name.upper() for name in item if name in ("get", "post")}
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - served:
            connection.request(method, path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 405, (method, path)
            allowed = set((answer.getheader("allow") or "").split(", "))
            assert allowed == served | ({"HEAD"} if "GET" in served else set())
    connection.close()
