"""Whose address a request bears in the log, and whom the router believes about it."""

from __future__ import annotations

import pytest

from router_ext.errors import SettingsError
from router_ext.gateway.peers import MAX_HOPS, Peer, Peers
from router_ext.settings import load_router_settings


def seen(trusted: str, connection: str | None, *headers: tuple[str, str], scheme: str = "http") -> Peer:
    scope = {"client": None if connection is None else (connection, 1), "scheme": scheme}
    return Peers(trusted).of(scope, [(name.encode(), value.encode("latin-1")) for name, value in headers])


FORWARDED = ("x-forwarded-for", "203.0.113.7")
HTTPS = ("x-forwarded-proto", "https")


def test_nobody_is_believed_by_default() -> None:
    assert seen("", "10.0.0.1", FORWARDED, HTTPS) == Peer("10.0.0.1", "http")
    assert seen("", None, FORWARDED) == Peer(None, "http")


def test_a_stranger_is_not_believed() -> None:
    assert seen("10.0.0.0/8", "192.0.2.1", FORWARDED, HTTPS) == Peer("192.0.2.1", "http")


def test_a_trusted_proxy_is() -> None:
    assert seen("10.0.0.0/8", "10.0.0.1", FORWARDED, HTTPS) == Peer("203.0.113.7", "https")
    assert seen("192.0.2.1, 10.0.0.0/8", "192.0.2.1", FORWARDED) == Peer("203.0.113.7", "http")
    assert seen("::1", "::1", FORWARDED, scheme="https") == Peer("203.0.113.7", "https")
    assert seen("10.0.0.0/8", "::ffff:10.0.0.1", FORWARDED) == Peer("203.0.113.7", "http")


@pytest.mark.parametrize(
    ("chain", "address"),
    [
        ("1.1.1.1, 203.0.113.7", "203.0.113.7"),
        ("1.1.1.1, 203.0.113.7, 10.2.2.2", "203.0.113.7"),
        ("10.3.3.3, 10.2.2.2", "10.3.3.3"),
        ("203.0.113.7:4711", "203.0.113.7"),
        ("[2001:db8::1]:4711", "2001:db8::1"),
        ("1.1.1.1, nonsense", "10.0.0.1"),
        ("1.1.1.1, unknown, 10.2.2.2", "10.2.2.2"),
        ("", "10.0.0.1"),
        (", ".join(["1.1.1.1", *["10.0.0.9"] * (MAX_HOPS + 5)]), "10.0.0.9"),
    ],
)
def test_what_the_client_wrote_itself_is_left_of_what_is_believed(chain: str, address: str) -> None:
    assert seen("10.0.0.0/8", "10.0.0.1", ("x-forwarded-for", chain)).address == address


def test_several_headers_are_one_chain_and_nonsense_is_no_proto() -> None:
    headers = [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "203.0.113.7"), ("x-forwarded-proto", "javascript")]
    assert seen("10.0.0.0/8", "10.0.0.1", *headers) == Peer("203.0.113.7", "http")


@pytest.mark.parametrize("text", ["10.0.0.0/33", "proxy.example", "10.0.0.1/8"])
def test_a_network_that_is_none_is_refused(text: str) -> None:
    environ = {
        "FAIRLANE_KEY_PEPPER": "ab" * 32,
        "FAIRLANE_CONTROLPLANE_URL": "",
        "FAIRLANE_ROUTER_TRUSTED_PROXIES": text,
    }
    with pytest.raises(SettingsError, match="FAIRLANE_ROUTER_TRUSTED_PROXIES"):
        load_router_settings(environ)
