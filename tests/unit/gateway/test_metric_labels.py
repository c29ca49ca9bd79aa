"""Labels stay bounded whatever clients send, and the pages say what the minimum set promises."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.routers import backend
from support.scripted import BODY, Peer, World, running, stream, until

from router_ext.backends.fake import Ending
from router_ext.gateway.streams import Client
from router_ext.obs import metrics
from router_ext.obs.metrics import Bounded, Metrics, Readings, TenantReading
from router_ext.obs.shares import Claim, Share, shares

PATHS = ["/", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as opened:
        yield opened


def value(page: bytes, name: str, **labels: str) -> float:
    """Sum of the series of this name that carry these labels."""
    total = 0.0
    for line in page.decode().splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{label}="{text}"' in (match[1] or "") for label, text in labels.items()):
            total += float(match[2])
    return total


def series(page: bytes) -> set[str]:
    return {line.rpartition(" ")[0] for line in page.decode().splitlines() if not line.startswith("#")}


async def _noise(world: World, rng: random.Random, count: int) -> None:
    """Requests of strangers, for models, tiers, paths and ids made up by chance; some of them are good."""
    for _ in range(count):
        word = f"zz{rng.getrandbits(64):x}"
        body = {"model": rng.choice([word, "main", "tgi"]), "inputs": "a b c", "prompt": "a b c", "max_tokens": 2}
        if rng.random() < 0.3:
            body = {word: word}
        peer = Peer(
            world,
            rng.choice([*PATHS, f"/{word}"]),
            body,
            method=rng.choice(["POST", "POST", "POST", "GET"]),
            key=rng.choice([world.key, world.key, f"sk-fl-{word}"]),
            headers={"x-request-id": word, "x-fairlane-tier": word, "x-fairlane-agent-id": word, word: word},
        )
        await peer.wait()


async def test_clients_cannot_make_series(world: World) -> None:
    """Hundreds of models, keys, tiers, ids and paths leave no more than the first of them did, and no word."""
    world.key = world.setup.key("alice", may_choose_tier=True)
    await world.router.apply(world.setup.snapshot())
    rng = random.Random(7)
    await _noise(world, rng, 150)
    before = series(world.router.metrics.page(is_admin=True))
    await _noise(world, rng, 300)
    page = world.router.metrics.page(is_admin=True)
    assert len(series(page) - before) <= 8, series(page) - before
    assert b"zz" not in page
    assert value(page, "fairlane_rejected_total", code="model_not_found", model="", tier="") > 20
    assert value(page, "fairlane_rejected_total", code="tier_not_allowed", model="main", tier="") > 5


def test_a_label_takes_so_many_values_and_no_more() -> None:
    bounded = Bounded()
    kept = {bounded(f"code{number}") for number in range(5_000)}
    assert len(kept) == metrics.MAX_VALUES + 1
    assert metrics.OTHER in kept
    assert bounded("code0") == "code0"


@pytest.mark.parametrize("is_bounded", [True, False])
def test_codes_tiers_and_models_cannot_blow_the_pages_up(is_bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_bounded:  # What the test is there to notice.
        monkeypatch.setattr(Bounded, "__call__", lambda self, value: value)
    page = Metrics(Readings)
    for number in range(1_000):
        page.count_refusal(f"code{number}", model=f"model{number}", tier=f"tier{number}")
    counted = len([line for line in series(page.page()) if line.startswith("fairlane_rejected_total")])
    assert (counted <= metrics.MAX_VALUES + 1) is is_bounded


def test_tenants_beyond_the_limit_are_summed() -> None:
    tenants = [
        TenantReading(
            pool="main",
            tenant=f"ten_{n}",
            queued=1,
            running=0,
            weight=1.0,
            prompt_tokens=1,
            output_tokens=n,
            counter=2.0,
        )
        for n in range(2_000)
    ]
    page = Metrics(lambda: Readings(tenants=tenants))
    admin = page.page(is_admin=True)
    queued = [line for line in series(admin) if line.startswith("fairlane_tenant_queue_length")]
    assert len(queued) == metrics.MAX_TENANTS + 1
    assert value(admin, "fairlane_tenant_queue_length") == 2_000
    assert value(admin, "fairlane_tenant_delivered_share_ratio") == pytest.approx(1.0)
    assert value(admin, "fairlane_tenant_entitled_share_ratio") == pytest.approx(1.0)
    assert len([line for line in series(admin) if line.startswith("fairlane_tenant_counter")]) == metrics.MAX_TENANTS
    assert b"ten_" not in page.page()


def test_shares_follow_weights_groups_and_use() -> None:
    found = shares(
        [
            Claim("alone", 1.0, None, 0.0, 30, True),
            Claim("first", 3.0, "team", 2.0, 60, True),
            Claim("second", 1.0, "team", 2.0, 10, True),
            Claim("asleep", 50.0, None, 0.0, 0, False),
            Claim("dozing", 50.0, "team", 2.0, 0, False),
        ]
    )
    assert found["alone"] == Share(pytest.approx(0.3), pytest.approx(1 / 3))
    assert found["first"] == Share(pytest.approx(0.6), pytest.approx(2 / 3 * 3 / 4))
    assert found["second"] == Share(pytest.approx(0.1), pytest.approx(2 / 3 / 4))
    assert found["asleep"] == found["dozing"] == Share(0.0, 0.0)
    assert shares([Claim("nobody", 1.0, None, 0.0, 0, False)]) == {"nobody": Share(0.0, 0.0)}


async def test_what_a_backend_holds_and_how_it_is(world: World) -> None:
    world.generation = stream(2, ending=Ending.HANG)
    peer = Peer(world, "/generate_stream", BODY)
    await until(lambda: peer.data.count(b"data: ") == 2)
    peer.exchange.paused()
    page = world.router.metrics.page()
    of = {"model": "main", "backend": "bke_one"}
    assert value(page, "fairlane_backend_reservations", **of) == 1
    assert value(page, "fairlane_backend_reserved_tokens", **of) > 0
    assert value(page, "fairlane_backend_state", **of, state="up") == 1
    assert value(page, "fairlane_backend_state", **of) == 1
    assert value(page, "fairlane_paused_clients", model="main") == 1
    client = next(iter(world.router.engines["pol_main"].calls)).client
    assert isinstance(client, Client)
    client._stalled()
    peer.exchange.connection_lost()
    await peer.wait()
    world.setup.backends = [backend(1, is_cordoned=True)]
    await world.router.apply(world.setup.snapshot())
    page = world.router.metrics.page()
    assert value(page, "fairlane_backend_state", **of, state="cordoned") == 1
    assert value(page, "fairlane_stalled_clients_total", model="main") == 1
    assert value(page, "fairlane_paused_clients", model="main") == 0
    assert b"fairlane_ledger_lag_seconds" not in page  # Nobody takes events from a router without a control plane.
