"""``fairlane top`` on the operators' port of a real router, served on a socket."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.routers import backend
from support.scripted import BODY, Peer, World, running, stream, until
from textual.widgets import DataTable, Static

from router_ext import cli
from router_ext.backends.fake import Ending
from router_ext.errors import SettingsError
from router_ext.gateway.admin import AdminApp
from router_ext.gateway.server import listen, make_server
from router_ext.ops.credentials import Credentials, write_credentials
from router_ext.ops.top import rows
from router_ext.ops.top.command import print_once
from router_ext.ops.top.sources import Look, Source, find_sources, look_at
from router_ext.ops.top.view import TopApp
from router_ext.wire.log_histogram import bucket

TOKEN = "token-of-the-operators"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[World, str]]:
    """A router with a stream that runs and one that waits, and the address of its admin port."""
    made = World()
    made.setup.backends = [backend(1, "gpu", kv_tokens=12, block_size=1)]
    other = made.setup.key("bob")
    made.setup.tenant("bob", weight=3.0)
    made.generation = stream(2, ending=Ending.HANG)
    async with running(tmp_path, made) as world:
        settings = world.router.settings
        with listen(settings, host="127.0.0.1", port=0) as listener:
            server = make_server(AdminApp(world.router, TOKEN), settings)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            busy = Peer(world, "/generate_stream", BODY)
            await until(lambda: busy.data.count(b"data: ") == 2)
            waiting = Peer(world, "/generate_stream", BODY, key=other)
            await until(lambda: world.router.engines["pol_main"].stats().queued == 1)
            try:
                yield world, f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                for peer in (busy, waiting):
                    peer.exchange.connection_lost()
                    await peer.wait()
                server.finish()
                await task


async def looked(url: str, token: str = TOKEN) -> Look:
    return (await asyncio.to_thread(look_at, [Source(url, token)]))[0]


def table_rows(app: TopApp, name: str) -> list[list[str]]:
    table = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(index)] for index in range(table.row_count)]


async def test_the_live_view_follows_a_router(served: tuple[World, str]) -> None:
    world, url = served
    app = TopApp([Source(url, TOKEN)], every_s=3_600.0)
    async with app.run_test(size=(160, 45)) as pilot:
        (pool,) = table_rows(app, "pools")
        assert (pool[0], pool[1], pool[2], pool[3], pool[4]) == ("main", "slo-fair", "1", "standard 1", "1")
        tiers = {row[0]: row[1:] for row in table_rows(app, "tiers")}
        assert tiers["interactive"] == ["main", "0", "0", "-", "-", "-", "1 s", "-"]
        assert tiers["standard"][:3] == ["main", "1", "1"]
        assert all(cell.endswith(" ms") for cell in tiers["standard"][3:6])
        by_running = table_rows(app, "tenants")
        assert [row[0] for row in by_running] == ["alice", "bob"]
        assert [row[2:4] for row in by_running] == [["0", "1"], ["1", "0"]]
        assert [row[4] for row in by_running] == ["100.0%", "0.0%"]
        assert [row[5] for row in by_running] == ["25.0%", "75.0%"]
        (gpu,) = table_rows(app, "backends")
        assert gpu[:4] == ["gpu", "main", "up", "1"]
        assert gpu[4].startswith("█")
        assert "ready, revision 1" in str(app.query_one("#routers", Static).render())
        # Keys: order, its reverse, pause.
        await pilot.press("w")
        assert [row[0] for row in table_rows(app, "tenants")] == ["bob", "alice"]
        await pilot.press("v")
        assert [row[0] for row in table_rows(app, "tenants")] == ["alice", "bob"]
        await pilot.press("space")
        world.setup.backends = [backend(1, "gpu", kv_tokens=12, block_size=1, is_cordoned=True)]
        await world.router.apply(world.setup.snapshot())
        await app.look()
        assert table_rows(app, "backends")[0][2] == "up"
        await pilot.press("space")
        await app.look()
        assert table_rows(app, "backends")[0][2] == "cordoned"
        await pilot.press("q")
    assert app.return_code == 0


async def test_a_router_that_goes_away_is_said_to(served: tuple[World, str], unused_tcp_port: int) -> None:
    _, url = served
    app = TopApp([Source(url, TOKEN), Source(f"http://127.0.0.1:{unused_tcp_port}", TOKEN)], every_s=3_600.0)
    async with app.run_test(size=(160, 45)):
        said = str(app.query_one("#routers", Static).render())
        assert "does not answer" in said
        assert len(table_rows(app, "tenants")) == 2


def test_percentiles_of_several_routers_are_of_all_their_requests() -> None:
    def look(times_ms: list[int]) -> Look:
        buckets = [bucket(ms * 1_000) for ms in times_ms]
        tier = {
            "tier": "fast", "ttft_target_s": 0.5, "buckets": buckets, "counts": [1] * len(buckets),
            "in_time": sum(ms <= 500 for ms in times_ms),
        }  # fmt: skip
        return Look("", {"pools": [{"model": "m", "queued_by_tier": {"fast": 2}, "tiers": [tier]}]})

    looks = [look([10, 20, 30]), look([900]), Look("", {"pools": [{"model": "m", "queued_by_tier": {"fast": 1}}]})]
    ((_, _, queued, count, p50, p95, _, target, in_time),) = rows.tier_rows(looks)
    assert (queued, count, target, in_time) == ("4", "4", "0.5 s", "75.0%")
    assert abs(int(p50.removesuffix(" ms")) - 20) <= 1
    assert abs(int(p95.removesuffix(" ms")) - 900) <= 9


async def test_one_plain_table(served: tuple[World, str], tmp_path: Path) -> None:
    _, url = served
    with (tmp_path / "out").open("w+") as file:
        print_once([await looked(url)], "w", Console(file=file, width=160, highlight=False))
        file.seek(0)
        text = file.read()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("alice", "bob"))] == ["bob", "alice"]
    assert any(line.startswith("gpu") and "█" in line for line in lines)


async def test_the_command_finds_the_stack_by_its_folder(
    served: tuple[World, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FAIRLANE_ADMIN_TOKEN", "FAIRLANE_ADMIN_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    _, url = served
    folder = tmp_path / "stack"
    (folder / "secrets").mkdir(parents=True)
    (folder / "secrets" / "admin_token").write_text(TOKEN)
    write_credentials(folder / "credentials.json", credentials(admin_url=url))
    status = await asyncio.to_thread(cli.main, ["top", "--json", "--dir", str(folder)])
    (said,) = json.loads(capsys.readouterr().out)
    assert (status, said["url"], said["problem"]) == (0, url, None)
    assert said["router"]["pools"][0]["model"] == "main"
    status = await asyncio.to_thread(cli.main, ["top", "--once", "--sort", "queued", "--dir", str(folder)])
    assert (status, "Tenants" in capsys.readouterr().out) == (0, True)
    # By address, with a token that is not the router's.
    monkeypatch.setenv("FAIRLANE_ADMIN_TOKEN", "another")
    status = await asyncio.to_thread(cli.main, ["top", "--once", "--url", url])
    assert (status, "the token is not the router's" in capsys.readouterr().err) == (1, True)
    assert (await looked(url, "another")).document is None


def credentials(**fields: Any) -> Credentials:
    named = dict.fromkeys(("router_url", "console_url", "pool", "operator_email", "operator_token"), "x")
    return Credentials(**named, tenants={}, **fields)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FAIRLANE_ADMIN_TOKEN", "FAIRLANE_ADMIN_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SettingsError, match="needs the router's token"):
        find_sources(["http://router:1"], token_file=None, directory=tmp_path)
    with pytest.raises(SettingsError, match="start the stack"):
        find_sources([], token_file=None, directory=tmp_path)
    write_credentials(tmp_path / "credentials.json", credentials())
    with pytest.raises(SettingsError, match="names no admin port"):
        find_sources([], token_file=None, directory=tmp_path)
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    with pytest.raises(SettingsError, match="'router:1' is no http"):
        find_sources(["router:1"], token_file=file, directory=tmp_path)
    found = find_sources(["http://one:1/", "https://two:2"], token_file=file, directory=tmp_path)
    assert found == [Source("http://one:1", TOKEN), Source("https://two:2", TOKEN)]
    monkeypatch.setenv("FAIRLANE_ADMIN_TOKEN_FILE", str(file))
    assert find_sources(["http://one:1"], token_file=None, directory=tmp_path)[0].token == TOKEN


def document(at_s: float, **tokens: int) -> Look:
    tenants = [
        {"tenant": f"ten_{n}", "name": n, "group": None, "weight": 1.0, "queued": 0, "running": 0, "counter": 0.0}
        | {"output_tokens": count, "entitled": 0.5}
        for n, count in tokens.items()
    ]
    return Look("u", {"router": "r", "at_us": int(at_s * 1e6), "pools": [{"model": "m", "tenants": tenants}]})


def test_shares_are_those_of_the_window() -> None:
    shares = rows.Shares()

    def delivered(look: Look) -> dict[str, float]:
        return {t.name: round(t.delivered, 3) for t in shares.tenants([look])}

    assert delivered(document(0, a=300, b=100)) == {"a": 0.75, "b": 0.25}
    assert delivered(document(1, a=310, b=130)) == {"a": 0.25, "b": 0.75}
    assert delivered(document(50, a=400, b=130)) == {"a": 0.769, "b": 0.231}
    # Older looks than the window count no more; who stopped has 0.
    assert delivered(document(111, a=500, b=130)) == {"a": 1.0, "b": 0.0}
    # Another process counts from 0.
    assert delivered(document(112, a=1, b=3)) == {"a": 0.25, "b": 0.75}
    assert delivered(document(113, a=1, b=3)) == {"a": 0.0, "b": 0.0}


@pytest.mark.parametrize(("part", "cells"), [(0.0, 0), (0.5, 6), (1.0, 12), (1.7, 12), (-1.0, 0)])
def test_a_bar_stays_in_its_cells(part: float, cells: int) -> None:
    drawn = rows.bar(part).split(" ")[0]
    assert (drawn.count("█"), len(drawn)) == (cells, rows.BAR_CELLS)


def test_the_view_is_not_loaded_for_a_plain_table() -> None:
    program = "import sys, router_ext.ops.top.command; print('textual' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
