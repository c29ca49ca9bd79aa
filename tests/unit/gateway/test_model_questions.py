"""Short questions to backends: none waits for one that says nothing while another could answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router_ext.backends.base import Backend
from router_ext.backends.fake import Ending, FakeBackend, Script
from router_ext.errors import UpstreamFailed
from router_ext.gateway import model as model_module
from router_ext.gateway.model import Member, PoolModel

ANSWER = Script(pieces=(b"[]",))


def backend(name: str, script: Script, *, answered_s: float) -> Member:
    client = FakeBackend(lambda path, body: script, unary_timeout_s=20.0)
    return cast(Member, SimpleNamespace(name=name, client=client, answered_s=answered_s))


def pool(members: list[Member], failed: list[Any]) -> PoolModel:
    return PoolModel(
        name="main",
        config=cast(Any, None),
        backends=cast(Any, SimpleNamespace(up=members)),
        executor=cast(ThreadPoolExecutor, None),
        tokenizer_path=None,
        on_failure=lambda member, error: failed.append(member),
    )


async def ask(model: PoolModel, **options: Any) -> str:
    async def question(client: Backend) -> bytes:
        return (await client.call("POST", "/tokenize")).body

    member, _ = await model.ask(question, **options)
    return str(cast(Any, member).name)


async def test_one_that_says_nothing_is_passed_over_without_being_called_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_module, "OTHER_ASKED_S", 0.005)
    now = asyncio.get_running_loop().time()
    failed: list[Any] = []
    members = [backend("frozen", Script(ending=Ending.HANG), answered_s=now), backend("well", ANSWER, answered_s=now)]
    model = pool(members, failed)
    async with asyncio.timeout(10):
        assert {await ask(model) for _ in range(20)} == {"well"}
    assert cast(Any, members[0]).client.requests, "nobody could know before"
    assert failed == []


async def test_one_whose_health_is_silent_is_not_asked_while_another_speaks() -> None:
    now = asyncio.get_running_loop().time()
    members = [
        backend("silent", Script(ending=Ending.HANG), answered_s=now - 60),
        backend("well", ANSWER, answered_s=now),
    ]
    async with asyncio.timeout(10):
        assert {await ask(pool(members, [])) for _ in range(20)} == {"well"}
    assert cast(Any, members[0]).client.requests == []


async def test_all_silent_are_asked_all_the_same() -> None:
    members = [backend(name, ANSWER, answered_s=-60.0) for name in ("one", "two")]
    assert {await ask(pool(members, [])) for _ in range(40)} == {"one", "two"}


async def test_a_long_question_is_left_to_the_one_it_was_put_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "OTHER_ASKED_S", 0.0)
    now = asyncio.get_running_loop().time()
    members = [backend(name, ANSWER, answered_s=now) for name in ("one", "two")]
    assert await ask(pool(members, []), takes_long=True) in ("one", "two")


async def test_one_that_breaks_is_told_and_another_asked() -> None:
    now = asyncio.get_running_loop().time()
    failed: list[Any] = []
    members = [backend("broken", Script(ending=Ending.CUT), answered_s=now)] * 2
    with pytest.raises(UpstreamFailed):
        await ask(pool(members, failed))
    assert len(failed) == model_module.ATTEMPTS
