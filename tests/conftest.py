"""What every test session shares.

Tests of the control plane run on a real PostgreSQL and a real Valkey: those that ``DATABASE_URL`` and ``REDIS_URL``
name, else a private pair started for the session (by xdist's controller, when there is one). Sessions that select
none of those tests start nothing and do not load Django.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from router_ext import compiled

# No test is timed: hypothesis would fail an example after 200 ms, which a busy machine takes for any of them.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

TESTS = Path(__file__).parent
LATE = {"e2e": 1, "property": 2}
NEED_SERVERS = tuple(TESTS / folder for folder in ("unit/controlplane", "integration/controlplane", "e2e"))
# Tests never read the secrets of a real installation.
TEST_SETTINGS = {
    "FAIRLANE_SECRET_KEY": "test-only-secret-key-" + "0" * 40,
    "FAIRLANE_KEY_PEPPER": "0f" * 32,
    "FAIRLANE_INSECURE_HTTP": "1",
    "FAIRLANE_ROUTER_TOKEN": "test-only-router-token-" + "0" * 20,
}
_WORKER_ENVIRONMENT = "FAIRLANE_TEST_SERVERS"  # set when this session's own servers are the ones in the environment


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", help="seeds of the fault script (tests/integration/ledger), separated by commas")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(TEST_SETTINGS)
    # The workers have the cores among them: more threads of a library would only wait for each other, and busily.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Tests replace methods of the core, which compiled classes do not allow. One of ops compares the two.
    os.environ.setdefault(compiled.CORE_VARIABLE, "source")
    compiled.activate(os.environ)
    if not _needs_servers(config):
        return
    folder = Path(tempfile.mkdtemp(prefix="fairlane-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if hasattr(config, "workerinput"):
        if _WORKER_ENVIRONMENT in os.environ:  # a Valkey database of its own; pytest-django does so for PostgreSQL
            number = int(config.workerinput["workerid"].removeprefix("gw")) % 15 + 1
            os.environ["REDIS_URL"] = os.environ["REDIS_URL"].rpartition("/")[0] + f"/{number}"
    else:
        _start_missing_servers(config, folder)
    if config.getoption("numprocesses", None):
        return  # Workers that inherit the name of the settings would read them before they have their own Valkey.
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    import django

    django.setup()
    _hash_passwords_fast()


def _hash_passwords_fast() -> None:
    """The product's own hasher with the least of cost: hundreds of tests sign in, at 0.4 s of processor each."""
    from django.contrib.auth.hashers import Argon2PasswordHasher

    Argon2PasswordHasher.time_cost = Argon2PasswordHasher.parallelism = 1
    Argon2PasswordHasher.memory_cost = 8


def _start_missing_servers(config: pytest.Config, folder: Path) -> None:
    from router_ext.ops.embedded import EmbeddedPostgres, EmbeddedValkey

    if "DATABASE_URL" not in os.environ:
        unsafe = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        postgres = EmbeddedPostgres(folder / "postgres", parameters=unsafe)
        config.add_cleanup(postgres.stop)
        os.environ["DATABASE_URL"] = postgres.start()
    if "REDIS_URL" not in os.environ:
        valkey = EmbeddedValkey(folder / "valkey")
        config.add_cleanup(valkey.stop)
        os.environ["REDIS_URL"] = valkey.start()
        os.environ[_WORKER_ENVIRONMENT] = "1"
    else:
        _refuse_used_valkey(os.environ["REDIS_URL"])


def _refuse_used_valkey(url: str) -> None:
    """Tests empty the database of ``REDIS_URL`` again and again; PostgreSQL's is left alone, Django makes another."""
    import redis

    with redis.Redis.from_url(url) as client:
        n_keys = client.dbsize()
    if n_keys:
        raise pytest.UsageError(f"REDIS_URL names a database with {n_keys} keys, which the tests would delete")


def _needs_servers(config: pytest.Config) -> bool:
    """Whether a selected path holds, or lies in, a folder whose tests need the servers."""
    selected = [Path(config.invocation_params.dir, str(arg).partition("::")[0]).resolve() for arg in config.args]
    return any(
        path.is_relative_to(folder) or folder.is_relative_to(path) for path in selected for folder in NEED_SERVERS
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests come last.

    Browser tests come late: Playwright leaves its event loop running in the thread, where no other can start. Behind
    them are only laws, many and short, which need no loop and keep every worker busy to the end.
    """
    items.sort(key=lambda item: LATE.get(item.path.relative_to(TESTS).parts[0], 0))


def pytest_collection_finish() -> None:
    """Thousands of tests and all they import stay to the end: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope``: a module's tests share servers, models and files, so they run in one worker.

    The laws at the end, which share nothing that is dear, run one by one wherever there is time.
    """
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            folder = module.split("/")[1]
            if folder == "e2e":
                return folder
            return nodeid if folder == "property" else module

    return ByServers(config, log)


@pytest.fixture(autouse=True)
def logs_stay_as_they_are() -> Iterator[None]:
    """A test that configures logs of its process anew would make others, much later, look for lines in vain."""
    before = structlog.get_config()["processors"]
    yield
    assert structlog.get_config()["processors"] is before, "logs were configured anew"


@pytest.fixture(scope="session")
def model_dir(pytestconfig: pytest.Config) -> Path:
    """Where the torch engine keeps its converted weights: ``FAIRLANE_MODEL_DIR``, else a folder kept between runs."""
    named = os.environ.get("FAIRLANE_MODEL_DIR")
    folder = Path(named) if named else pytestconfig.rootpath / ".pytest_cache" / "d" / "model"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def test_database(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The database of tests, made here where pytest-django saw no test that asks for it by its own fixtures."""
    from django.test.utils import setup_databases, teardown_databases

    from tests.support.control_plane import is_test_database

    if is_test_database():
        yield
        return
    with django_db_blocker.unblock():
        databases = setup_databases(verbosity=0, interactive=False, aliases={"default"})
    yield
    with django_db_blocker.unblock():
        teardown_databases(databases, verbosity=0)
