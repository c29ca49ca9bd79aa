"""``manage.py seed_demo``: repeated, with other servers, with and without what the caller held."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

pytestmark = pytest.mark.django_db(transaction=False)


@pytest.fixture
def seed(operator: object, tmp_path: Any) -> Any:
    from django.core.management import call_command

    def seed(pool: str, *urls: str, held: dict[str, Any] | None = None) -> dict[str, Any]:
        path = tmp_path / "held.json"
        path.write_text(json.dumps(held or {}))
        out = io.StringIO()
        words = [word for url in urls for word in ("--backend-url", url)]
        call_command("seed_demo", "--pool", pool, *words, "--held", str(path), stdout=out)
        return json.loads(out.getvalue())

    return seed


def _backends(pool: str) -> dict[str, str]:
    from controlplane.fleet.models import Backend

    return dict(Backend.objects.filter(pool__name=pool).values_list("name", "url"))


def test_credentials_that_are_held_and_good_stay(seed: Any) -> None:
    first = seed("m", "http://a:80")
    secrets = {name: first[name] for name in ("tenants", "operator_token", "router_token")}
    again = seed("m", "http://a:80", held=secrets)
    assert {name: again[name] for name in secrets} == secrets
    assert again["tenant_ids"] == first["tenant_ids"]


def test_credentials_that_were_lost_are_issued_anew(seed: Any) -> None:
    first = seed("m", "http://a:80")
    again = seed("m", "http://a:80")
    assert again["tenants"].keys() == first["tenants"].keys()
    for name in ("operator_token", "router_token", "tenants"):
        assert again[name] != first[name], name


def test_backends_follow_the_addresses(seed: Any) -> None:
    seed("m", "http://a:80")
    assert _backends("m") == {"local": "http://a:80"}
    seed("m", "http://b:80", "http://a:80", "http://c:80")
    assert _backends("m") == {"local": "http://a:80", "local-2": "http://b:80", "local-3": "http://c:80"}
    seed("m", "http://d:80")
    assert list(_backends("m").values()) == ["http://d:80"]


def test_backend_that_an_operator_added_stays(seed: Any, operator: object) -> None:
    from controlplane.common.actor import system_actor
    from controlplane.fleet.actions import create_backend

    seed("m", "http://a:80")
    create_backend(actor=system_actor("test"), pool="m", name="own", url="http://own:80")
    seed("m", "http://b:80")
    assert _backends("m") == {"local": "http://b:80", "own": "http://own:80"}


def test_held_key_asks_the_pool_of_the_model_that_runs_now(seed: Any) -> None:
    from controlplane.keys.models import ApiKey

    first = seed("small", "http://a:80")
    again = seed("large", "http://b:80", held=first)
    assert again["tenants"] == first["tenants"]
    assert set(ApiKey.objects.values_list("default_pool__name", flat=True)) == {"large"}
