"""The port for clients under TLS: versions, a certificate that is renewed, and the rules of plain connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from router_ext.errors import SettingsError
from router_ext.gateway.certificate import follow_certificate
from router_ext.gateway.exchange import EXTENSION, Exchange
from router_ext.gateway.server import listen, make_server, tls_context
from router_ext.settings import RouterSettings, load_router_settings
from tests.unit.gateway.test_server import GET, echo, until


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop of the product: its TLS is not the standard library's."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return make_pair(tmp_path, "one")


def settings(pair: tuple[Path, Path], **values: Any) -> RouterSettings:
    cert, key = pair
    fixed = {"key_pepper": "ab" * 32, "controlplane_url": "", "port": 0, "dir": Path("unused")}
    return RouterSettings(**fixed, tls_cert_file=cert, tls_key_file=key, **values)


@contextlib.asynccontextmanager
async def serving(app: Any, chosen: RouterSettings) -> AsyncIterator[tuple[int, ssl.SSLContext]]:
    listener = listen(chosen, host="127.0.0.1", port=0)
    context = tls_context(chosen)
    assert context is not None
    server = make_server(app, chosen, tls=context)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield listener.getsockname()[1], context
        finally:
            server.finish()


def trusting(*certificates: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for certificate in certificates:
        context.load_verify_locations(certificate)
    return context


async def talk(port: int, data: bytes, context: ssl.SSLContext) -> tuple[bytes, str]:
    """The answer, and the common name of the certificate that was shown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("peercert")["subject"][0][0][1]
    writer.write(data)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        await writer.wait_closed()
    return answer, shown


@on_uvloop
async def test_a_request_and_a_refusal(pair: tuple[Path, Path]) -> None:
    async with serving(echo, settings(pair)) as (port, _):
        answer, _ = await talk(port, GET, trusting(pair[0]))
        assert answer.startswith(b"HTTP/1.1 200 ")
        answer, _ = await talk(port, b"GET /x HTTP/1.1\r\n\r\n", trusting(pair[0]))
        assert answer.startswith(b"HTTP/1.1 400 ")


@on_uvloop
async def test_old_versions_are_refused(pair: tuple[Path, Path]) -> None:
    async with serving(echo, settings(pair)) as (port, context):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        old = trusting(pair[0])
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await talk(port, GET, old)
        lowest = trusting(pair[0])
        lowest.maximum_version = ssl.TLSVersion.TLSv1_2
        answer, _ = await talk(port, GET, lowest)
        assert answer.startswith(b"HTTP/1.1 200 ")


@on_uvloop
async def test_plain_http_on_it_is_no_request(pair: tuple[Path, Path]) -> None:
    async with serving(echo, settings(pair)) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionResetError):
                assert b"200" not in await reader.read()
        writer.close()


@on_uvloop
@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01"], ids=["silent", "begun"])
async def test_a_handshake_that_stalls_is_cut_as_a_slow_head(pair: tuple[Path, Path], begun: bytes) -> None:
    async with serving(echo, settings(pair, header_timeout_s=0.2)) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


@on_uvloop
async def test_a_renewed_certificate_is_shown_and_a_broken_one_is_not(pair: tuple[Path, Path], tmp_path: Path) -> None:
    chosen = settings(pair)
    cert, key = make_pair(tmp_path, "two")
    both = trusting(pair[0], cert)
    async with serving(echo, chosen) as (port, context):
        watch = asyncio.create_task(follow_certificate(context, chosen, poll_s=0.01))
        assert (await talk(port, GET, both))[1] == "one"
        # Half of the new pair does not fit the other half of the old one.
        shutil.copy(cert, pair[0])
        await asyncio.sleep(0.1)
        assert (await talk(port, GET, both))[1] == "one"
        shutil.copy(key, pair[1])
        async with asyncio.timeout(5):
            while (await talk(port, GET, both))[1] != "two":  # noqa: ASYNC110 - what is awaited has no event
                await asyncio.sleep(0.01)
        pair[0].unlink()
        await asyncio.sleep(0.1)
        assert (await talk(port, GET, both))[1] == "two"
        watch.cancel()


class Streaming:
    """A stream that goes on until its client leaves; pauses when told."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.is_gone = False
        self.sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = self.exchange = scope["extensions"][EXTENSION]
        ended = asyncio.get_running_loop().create_future()

        def gone() -> None:
            self.is_gone = True
            ended.set_result(None)

        exchange.on_gone = gone
        exchange.open(200, [])
        while not self.is_gone and self.sent < 50_000_000:
            if exchange.is_paused:
                break
            exchange.write(b"x" * 10_000)
            self.sent += 10_000
            await asyncio.sleep(0)
        await ended


@on_uvloop
async def test_a_client_that_leaves_is_noticed(pair: tuple[Path, Path]) -> None:
    app = Streaming()
    async with serving(app, settings(pair)) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(pair[0]))
        writer.write(GET)
        await reader.readexactly(1_000)
        writer.transport.abort()
        await until(lambda: app.is_gone)


@on_uvloop
async def test_a_client_that_does_not_read_pauses_its_stream_within_a_bound(pair: tuple[Path, Path]) -> None:
    app = Streaming()
    async with serving(app, settings(pair)) as (port, _):
        plain = socket.create_connection(("127.0.0.1", port))
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
        context = trusting(pair[0])
        wrapped = await asyncio.to_thread(lambda: context.wrap_socket(plain, server_hostname="127.0.0.1"))
        wrapped.sendall(GET)
        await until(lambda: app.exchange is not None and app.exchange.is_paused)
        assert app.sent < 1_500_000
        wrapped.close()
        await until(lambda: app.is_gone)


def test_half_of_the_settings_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    environ = {
        "FAIRLANE_KEY_PEPPER": "ab" * 32,
        "FAIRLANE_CONTROLPLANE_URL": "",
        "FAIRLANE_ROUTER_TLS_CERT_FILE": str(pair[0]),
    }
    with pytest.raises(SettingsError, match="come together"):
        load_router_settings(environ)
    other = make_pair(tmp_path, "two")
    with pytest.raises(SettingsError, match="cannot be used"):
        tls_context(settings((pair[0], other[1])))
    with pytest.raises(SettingsError, match="No such file"):
        tls_context(settings((tmp_path / "none", pair[1])))
