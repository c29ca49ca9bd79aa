"""``manage.py create_router``: the credential that a deployed router is given."""

from __future__ import annotations

import io

import pytest

pytestmark = pytest.mark.django_db


def _token(*words: str) -> str:
    from django.core.management import call_command

    out = io.StringIO()
    call_command("create_router", *words, stdout=out)
    return out.getvalue().strip()


def test_token_is_printed_alone_and_opens_the_machine_endpoints() -> None:
    from controlplane.fleet.routers import authenticate_router

    router = authenticate_router(f"Bearer {_token('east')}")
    assert router is not None
    assert router.name == "east"


def test_renewed_token_replaces_the_old_one() -> None:
    from controlplane.fleet.routers import authenticate_router

    old = _token("east")
    new = _token("east", "--renew")
    assert authenticate_router(f"Bearer {old}") is None
    assert authenticate_router(f"Bearer {new}") is not None


@pytest.mark.parametrize(("words", "text"), [(("east",), "exists"), (("west", "--renew"), "no router 'west'")])
def test_wrong_name_is_refused(words: tuple[str, ...], text: str) -> None:
    from django.core.management import CommandError

    _token("east")
    with pytest.raises(CommandError, match=text):
        _token(*words)
