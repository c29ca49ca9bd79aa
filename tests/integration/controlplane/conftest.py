"""Fixtures of the control plane's tests: real PostgreSQL, real Valkey, real processes where they matter.

This module is read before the session's servers run and Django is set up; so it imports neither at the top.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from controlplane.accounts.models import User
    from controlplane.common.actor import Actor
    from controlplane.fleet.models import Router
    from tests.support.control_plane import ApiClient, Site


@pytest.fixture
def committed_db(test_database: None, django_db_blocker: Any) -> Iterator[None]:
    """The database with real commits, for what several connections must see; emptied afterwards."""
    from tests.support.control_plane import empty_all_tables

    with django_db_blocker.unblock():
        try:
            yield
        finally:
            empty_all_tables()


@pytest.fixture
def old_database(test_database: None, django_db_blocker: Any) -> Iterator[dict[str, str]]:
    """Environment of a process with an empty database of its own."""
    from django.db import connection

    from tests.support.control_plane import database_environment

    with django_db_blocker.unblock():
        given = connection.settings_dict["NAME"]
        name = f"{given}_old"
        with connection.cursor() as cursor:
            cursor.execute(f'CREATE DATABASE "{name}"')
        environment = database_environment()
        try:
            yield environment | {"DATABASE_URL": environment["DATABASE_URL"].replace(f"/{given}?", f"/{name}?")}
        finally:
            with connection.cursor() as cursor:
                cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(autouse=True)
def _fresh_valkey() -> Iterator[None]:
    from controlplane.common.valkey import valkey

    valkey().flushdb()
    yield
    valkey().flushdb()


@pytest.fixture
def system() -> Actor:
    from controlplane.common.actor import system_actor

    return system_actor("test")


@pytest.fixture
def operator(db: None) -> User:
    from tests.support.control_plane import make_user

    return make_user()


@pytest.fixture
def viewer(db: None) -> User:
    from tests.support.control_plane import make_user

    return make_user(role="viewer")


@pytest.fixture
def api(operator: User) -> ApiClient:
    """REST on behalf of an operator."""
    from tests.support.control_plane import api_client

    return api_client(operator)


@pytest.fixture
def router(db: None, system: Actor) -> tuple[Router, dict[str, str]]:
    """A router and the headers it sends."""
    from controlplane.fleet.routers import create_router

    row, token = create_router(actor=system, name="test-router")
    return row, {"authorization": f"Bearer {token}"}


@pytest.fixture
def running_site(committed_db: None) -> Iterator[Site]:
    """Starts the control plane under gunicorn on the test's database; called with further variables."""
    from tests.support.control_plane import Site

    site = Site()
    try:
        yield site
    finally:
        site.stop()
