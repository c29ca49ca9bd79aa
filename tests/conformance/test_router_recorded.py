"""Every recorded request, sent to a router in front of the model server: its answer is the recorded TGI's, or the
difference is in ``router_differences.toml``, word for word and with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from support.modelserver import model_server
from support.recorded_tgi import NARROW, WIDE, cases, exchanges
from support.router_differences import listed, routed, router_differences
from support.routers import Setup, backend, router
from support.tenants import Tenant, new_tenant

MODEL = ("--sim-step-ms", "0.2", "--sim-mean-tokens", "0")
FILES = {
    WIDE: ("basics", "generate", "streams", "chat_and_completions"),
    NARROW: ("errors",),
    (*WIDE, "--sim-bos", "on"): ("bos",),
}
LISTED = listed()


@contextlib.contextmanager
def stack(*flags: str) -> Iterator[Tenant]:
    with model_server(*flags, *MODEL) as server, router(Setup(backends=[backend(server.port)])) as running:
        yield new_tenant(running)


@pytest.fixture(scope="module")
def wide() -> Iterator[Tenant]:
    with stack(*WIDE) as tenant:
        yield tenant


@pytest.fixture(scope="module")
def narrow() -> Iterator[Tenant]:
    with stack(*NARROW) as tenant:
        yield tenant


@pytest.fixture(scope="module")
def adding() -> Iterator[Tenant]:
    """The tokenizer adds BOS."""
    with stack(*WIDE, "--sim-bos", "on") as tenant:
        yield tenant


def of(*files: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, {**e, "name": name}) for name, e in exchanges(*files)]


def check(tenant: Tenant, exchange: dict[str, Any]) -> None:
    found = router_differences(exchange, *routed(tenant.router.port, exchange, tenant.headers))
    allowed = LISTED["exchanges"].get(exchange["name"], {"differs": []})
    assert found == allowed["differs"]


@cases(of("basics", "generate", "streams", "chat_and_completions"))
def test_answers(wide: Tenant, exchange: dict[str, Any]) -> None:
    check(wide, exchange)


@cases(of("errors"))
def test_refusals(narrow: Tenant, exchange: dict[str, Any]) -> None:
    check(narrow, exchange)


@cases(of("bos"))
def test_a_tokenizer_that_adds_bos(adding: Tenant, exchange: dict[str, Any]) -> None:
    check(adding, exchange)


def test_what_is_listed_exists_and_has_a_reason() -> None:
    known = {name for files in FILES.values() for name, _ in exchanges(*files)}
    assert LISTED["exchanges"].keys() <= known
    reasons = {entry["reason"] for entry in LISTED["exchanges"].values()}
    assert reasons == LISTED["reasons"].keys()
    assert all(entry["differs"] for entry in LISTED["exchanges"].values())
