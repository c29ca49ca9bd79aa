"""Routers and the real control plane: what is used of a quota is exact on its whole way through the books."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from controlplane.common.actor import Actor
from controlplane.fleet.routers import create_router
from controlplane.tenants.actions import update_tenant
from router_ext.core.ids import KeyId, TenantId, TierName
from router_ext.gateway.auth import Identity
from router_ext.gateway.configure import Directory
from router_ext.gateway.limits import Limiter
from router_ext.sync.inflight import FIRST_DISPATCH_US, OUTPUT_TOKENS, PROMPT_TOKENS, RequestStart
from router_ext.sync.ledger import Ledger, new_event_id, now_us
from router_ext.sync.link import ControlPlaneLink
from router_ext.sync.quota import QuotaBook, day_of
from router_ext.wire.controlplane import ConfigSnapshot, Heartbeat
from tests.support.control_plane import Site, make_key, make_pool, make_tenant

QUOTA = 100_000


class Node:
    """A router without backends: its books, its link, its limiter."""

    def __init__(self, url: str, token: str, name: str, folder: Path) -> None:
        self.quotas = QuotaBook()
        self.limiter = Limiter(self.quotas, clock=asyncio.get_running_loop().time, lifetime_s=3_600.0)
        self.ledger = Ledger.open(folder, now_us=now_us())
        self.quotas.load(self.ledger.unsent())
        self.ledger.on_end = self.limiter.end
        self.name = name
        self.link = ControlPlaneLink(
            url=url, token=token, directory=folder, router=name, ledger=self.ledger, apply=self.apply,
            build_heartbeat=self.heartbeat, quotas=self.quotas,
        )  # fmt: skip
        self.task: asyncio.Task[None]

    def apply(self, snapshot: ConfigSnapshot) -> None:
        directory = Directory(snapshot, {1: b"0" * 32})
        self.limiter.apply(directory.limits, directory.ranks)
        if directory.has_new_quotas:
            assert self.link.totals is not None
            self.link.totals.notify(is_whole=True)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(router=self.name, version="0", address="", applied_revision=0, applied_at_us=now_us())

    async def start(self) -> None:
        await self.link.start()
        assert self.link.totals is not None
        self.link.totals._interval_s = 0.02
        self.task = asyncio.create_task(self.link.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.link.close(flush_s=0.0)
        self.ledger.close()

    def serve(self, who: Identity, tokens: int, *, is_refused: bool = False) -> int:
        """One request; the tokens that count."""
        at_us = now_us()
        event = new_event_id(at_us)
        assert self.limiter.admit(who, event, tokens + 7, at_us, float) is None
        slot = self.ledger.begin(
            RequestStart(
                event=event, request="r", router=self.name, tenant=who.tenant, key=who.key, pool="p", model="m",
                tier="standard", dialect="chat", arrived_at_us=at_us,
            )
        )  # fmt: skip
        if is_refused:
            self.ledger.discard(slot)
            return 0
        slot.words[FIRST_DISPATCH_US] = at_us
        slot.words[PROMPT_TOKENS] = 3
        slot.words[OUTPUT_TOKENS] = tokens
        self.ledger.finish(slot, outcome="completed", ended_at_us=at_us)
        return tokens + 3

    def used(self, who: Identity) -> tuple[int, int]:
        return self.quotas.used(who.tenant, day_of(now_us()))

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is awaited has no event
                await asyncio.sleep(0.005)


def test_two_routers_count_one_quota(running_site: Site, system: Actor, tmp_path: Path) -> None:
    tenant, pool = make_tenant(system), make_pool(system)
    key, _ = make_key(system, tenant, pool)
    update_tenant(actor=system, tenant_id=tenant.id, limits={"tokens_per_day": QUOTA})
    tokens = [create_router(actor=system, name=name)[1] for name in ("one", "two")]
    who = Identity(
        tenant=TenantId(tenant.id), tenant_name="", key=KeyId(key.id), public_id="", default_pool=pool.id,
        tiers=(TierName("standard"),), default_tier=TierName("standard"), may_choose_tier=False,
    )  # fmt: skip
    url = running_site()
    asyncio.run(course(url, tokens, who, tmp_path, running_site))


async def course(url: str, tokens: list[str], who: Identity, tmp_path: Path, site: Site) -> None:
    rng = random.Random(20261130)
    one = Node(url, tokens[0], "one", tmp_path / "one")
    two = Node(url, tokens[1], "two", tmp_path / "two")
    for node in (one, two):
        await node.start()
        await node.until(lambda node=node: node.limiter._limits.get(who.tenant) is not None)
        await node.until(lambda node=node: node.quotas.as_of_us)
    # Usage, acknowledgments and totals cross as they like; the router that served it all is right at every instant.
    mine = 0
    for _ in range(150):
        mine += one.serve(who, rng.randrange(1, 60), is_refused=rng.random() < 0.2)
        await asyncio.sleep(rng.choice([0, 0, 0.003, 0.02]))
        assert one.used(who) == (mine, mine)
    assert one.quotas.as_of_us > 0
    # The other learns of it, and of the two of them.
    await two.until(lambda: two.used(who) == (mine, mine))
    await two.until(lambda: two.quotas.live_routers == 2)
    theirs = two.serve(who, 500)
    await one.until(lambda: one.used(who) == (mine + theirs, mine + theirs))
    await one.until(lambda: not one.quotas._own)
    # Without its control plane, and across a restart, the router goes on with its own.
    site.stop()
    mine += one.serve(who, 40)
    assert one.used(who) == (mine + theirs, mine + theirs)
    await one.stop()
    await two.stop()
    again = Node(url, tokens[0], "one", tmp_path / "one")
    assert again.used(who)[0] >= 43
    assert again.limiter.count == 0
    again.ledger.close()
    await again.link.close(flush_s=0.0)
