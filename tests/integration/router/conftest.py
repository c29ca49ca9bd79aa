"""A model server (model engine) and a router in front of it, shared by the tests of this folder.

Each test gets tenants of its own, so that its books can be told from the others'.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.modelserver import ModelServer, model_server
from support.routers import RouterProcess, Setup, backend, router
from support.tenants import Tenant, new_tenant


@pytest.fixture(scope="session")
def server() -> Iterator[ModelServer]:
    """Answers never end by themselves: every count in a test is the one it asked for."""
    with model_server("--sim-step-ms", "1", "--sim-mean-tokens", "0", "--max-total-tokens", "2048") as running:
        yield running


@pytest.fixture(scope="session")
def shared_router(server: ModelServer) -> Iterator[RouterProcess]:
    with router(Setup(backends=[backend(server.port)])) as running:
        yield running


@pytest.fixture
def tenant(shared_router: RouterProcess) -> Tenant:
    return new_tenant(shared_router)
