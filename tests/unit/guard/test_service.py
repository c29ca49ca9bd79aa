"""The guard with its real nursery: proofs, deaths, turns."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router_ext.errors import GuardUnavailable
from router_ext.guard import service
from router_ext.guard.examples import COMMON, HAZARDS
from router_ext.guard.grammar import Grammar
from router_ext.guard.service import Guard


@pytest.fixture
async def guard() -> AsyncIterator[Guard]:
    guard = Guard(wait_s=300.0)
    task = asyncio.create_task(guard.run())
    yield guard
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def grammar_of(name: str) -> Grammar:
    found = Grammar.of_field({**COMMON, **HAZARDS}[name])
    assert found is not None
    return found


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_at_work(nursery: int) -> None:
    while not children(nursery):
        os.sched_yield()
    os.kill(nursery, signal.SIGKILL)


async def test_a_grammar_is_compiled_once_for_all_who_ask(guard: Guard) -> None:
    grammar = grammar_of("invoice lines")
    first, second = await asyncio.gather(guard.prove(grammar, "a", 2.0), guard.prove(grammar, "b", 2.0))
    assert first is second
    assert first.states > 10
    assert 0 < first.cpu_s < 2
    assert await guard.prove(grammar, "c", 9.0) is first
    assert (guard.compiled, guard.found) == (1, 1)


async def test_what_takes_too_long_is_given_up_and_remembered(guard: Guard) -> None:
    grammar = grammar_of("12 optional fields")
    proof = await guard.prove(grammar, "a", 0.5)
    assert proof.is_cost
    assert "not compiled within 0.5 s of CPU time" in (proof.problem or "")
    assert await guard.prove(grammar, "a", 0.4) is proof, "a refusal is kept as well"
    assert guard.known(grammar, 1.0) is None, "with more time it may be proven"


async def test_memory_has_a_limit(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MEMORY_MB", 2)
    proof = await guard.prove(grammar_of("40 required fields"), "a", 20.0)
    assert proof.is_cost
    assert "memory" in (proof.problem or "")


async def test_a_nursery_that_dies_is_replaced_and_its_work_done_again(guard: Guard) -> None:
    await guard.prove(grammar_of("point"), "a", 2.0)
    running = asyncio.create_task(guard.prove(grammar_of("40 required fields"), "a", 20.0))
    nursery = guard.pid
    assert nursery is not None
    await asyncio.to_thread(kill_at_work, nursery)
    assert (await running).states == 712
    assert guard.pid not in (None, nursery)


async def test_tenants_take_turns(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a tenant's many grammars waits for one of the others', not the reverse."""
    monkeypatch.setattr(guard, "_jobs", 1)
    order: list[str] = []

    async def ask(tenant: str, i: int) -> None:
        await guard.prove(Grammar.regex(f"{tenant}{i}"), tenant, 2.0)
        order.append(tenant)

    await asyncio.gather(*(ask("flood", i) for i in range(8)), *(ask("quiet", i) for i in range(2)))
    assert [place for place, tenant in enumerate(order) if tenant == "quiet"] <= [1, 3]


async def test_one_tenant_cannot_fill_the_queue(guard: Guard) -> None:
    asks = [asyncio.ensure_future(guard.prove(Grammar.regex(f"x{i}"), "flood", 2.0)) for i in range(40)]
    found = await asyncio.gather(*asks, return_exceptions=True)
    refused = [one for one in found if isinstance(one, GuardUnavailable)]
    assert len(refused) >= 40 - service.MAX_WAITING - service.JOBS
    assert all(one.code == "rate_limit_exceeded" for one in refused)
    assert (await guard.prove(Grammar.regex("y"), "flood", 2.0)).states == 2, "nothing is stuck behind them"


async def test_a_huge_grammar_is_not_read(guard: Guard) -> None:
    proof = await guard.prove(Grammar.regex("a" * 300_000), "a", 2.0)
    assert "300000 characters, at most 262144" in (proof.problem or "")
    assert guard.compiled == 0


async def test_without_a_nursery_nothing_is_let_through() -> None:
    guard = Guard(wait_s=0.2, command=["/bin/false"])
    task = asyncio.create_task(guard.run())
    with pytest.raises(GuardUnavailable, match=r"not judged within 0\.2 s"):
        await guard.prove(Grammar.regex("a"), "a", 2.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
