"""The prediction worker as a real child process: asked, late, hung, dying, talking nonsense; and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from router_ext.predict import client as clients
from router_ext.predict.client import MAX_DEATHS, MAX_OUTSTANDING, PredictionClient
from router_ext.predict.messages import Answer, Ask, Assigned, Ended

SUPPORT = str(Path(__file__).parents[2])


class Heard:
    """What a client tells."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.outcomes: list[Assigned] = []
        self.ends = 0

    def answered(self, seconds: float) -> None:
        assert seconds >= 0

    def batch_answered(self, count: int, seconds: float) -> None:
        self.batches.append(count)

    def model_assigned(self, outcome: Assigned) -> None:
        self.outcomes.append(outcome)

    def worker_ended(self) -> None:
        self.ends += 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(kind: str, tmp_path: Path, *, limit_s: float = 10.0) -> AsyncIterator[tuple[PredictionClient, Heard]]:
    heard = Heard()
    code = f"import sys; sys.path.insert(0, {SUPPORT!r}); from support.prediction_workers import main; main()"
    made = PredictionClient([sys.executable, "-c", code, kind, "--dir", str(tmp_path), "--fd"], heard, limit_s=limit_s)
    task = asyncio.create_task(made.run())
    try:
        await until(lambda: made.is_up)
        yield made, heard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def question(client: PredictionClient, text: str = "hello", pool: str = "pol") -> Ask:
    return Ask(
        id=client.next_id(),
        pool=pool,
        model="m",
        tenant="ten",
        key="key",
        prompt=text,
        is_chat=False,
        max_new_tokens=100,
        temperature=1.0,
        top_p=1.0,
        is_greedy=False,
        has_stop=False,
    )


async def test_the_limit_of_a_start_is_none_of_a_worker_that_is_ready(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    limits: list[asyncio.TimerHandle] = []
    later = loop.call_later

    def noted(delay: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        handle = later(delay, *args, **kwargs)
        if delay == clients.START_LIMIT_S:
            limits.append(handle)
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_later", noted)
        async with running("plain", tmp_path) as (client, heard):
            assert [limit.cancelled() for limit in limits] == [True], "it would be ended in the middle of its work"
            assert client.is_up
            assert heard.ends == 0


async def asked(client: PredictionClient, text: str = "hello") -> Answer | None:
    answer = client.ask(question(client, text))
    return None if answer is None else await asyncio.wait_for(answer, 20)


def learned(answer: Answer | None) -> int:
    """Ended answers the worker had heard of, by its own word."""
    assert answer is not None
    return int(answer.features.split()[1])


async def test_every_question_has_its_own_answer(tmp_path: Path) -> None:
    async with running("plain", tmp_path) as (client, _):
        answers = await asyncio.gather(*(asked(client, "x" * n) for n in range(50)))
        assert [int(a.features.split()[0]) for a in answers if a is not None] == list(range(50))
        assert client.outstanding == 0


async def test_what_comes_while_a_batch_runs_is_the_next_batch(tmp_path: Path) -> None:
    async with running("slow", tmp_path) as (client, heard):
        first = client.ask(question(client))
        assert first is not None
        await until(lambda: client.outstanding == 1)
        await asyncio.gather(first, *(asked(client) for _ in range(20)))
        assert sum(heard.batches) == 21
        assert len(heard.batches) <= 4


async def test_no_more_is_asked_than_can_be_answered(tmp_path: Path) -> None:
    async with running("hangs", tmp_path) as (client, _):
        sent = [client.ask(question(client)) for _ in range(MAX_OUTSTANDING + 10)]
        assert [answer is None for answer in sent] == [False] * MAX_OUTSTANDING + [True] * 10


async def test_nothing_is_asked_whose_answer_would_be_late(tmp_path: Path) -> None:
    """Once it is known how slow the worker is; when it has caught up it is asked again."""
    async with running("slow", tmp_path, limit_s=0.005) as (client, _):
        for _ in range(5):
            assert await asked(client) is not None
        first = client.ask(question(client))
        assert first is not None
        assert client.ask(question(client)) is None
        await first
        assert await asked(client) is not None


async def test_a_worker_that_hangs_is_killed_and_another_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "HANG_S", 0.2)
    async with running("hangs", tmp_path) as (client, heard):
        pid = client.pid
        assert await asked(client) is None
        assert "not answered" in client.why_down
        await until(lambda: heard.ends == 1 and client.is_up)
        assert client.pid != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


@pytest.mark.parametrize("kind", ["dies", "babbles"])
async def test_a_worker_that_ends_or_talks_nonsense_is_replaced(kind: str, tmp_path: Path) -> None:
    async with running(kind, tmp_path) as (client, heard):
        answers = await asyncio.gather(*(asked(client) for _ in range(3)))
        assert answers == [None] * 3
        assert await asked(client) is None
        await until(lambda: heard.ends == 1 and client.is_up)
        assert client.restarts == 1


async def test_a_prompt_that_trips_a_defect_has_no_answer(tmp_path: Path) -> None:
    async with running("refuses", tmp_path) as (client, heard):
        assert await asked(client) is None
        assert client.is_up
        assert heard.batches == [1]


async def test_models_are_loaded_by_digest_refused_and_taken_away(tmp_path: Path) -> None:
    def artifact(data: bytes) -> tuple[str, str]:
        digest = sha256(data).hexdigest()
        (tmp_path / digest).write_bytes(data)
        return digest, str(tmp_path / digest)

    good, path = artifact(b"model one")
    bad, bad_path = artifact(b"no model")
    async with running("plain", tmp_path) as (client, heard):
        client.assign("pol", good, path)
        await until(lambda: len(heard.outcomes) == 1)
        client.assign("pol", bad, bad_path)
        await until(lambda: len(heard.outcomes) == 2)
        client.assign("pol", "0" * 64, path)
        await until(lambda: len(heard.outcomes) == 3)
        client.assign("pol", "1" * 64, str(tmp_path / "missing"))
        await until(lambda: len(heard.outcomes) == 4)
        assert [(o.current, o.refused) for o in heard.outcomes] == [
            (good, None),
            (good, "this is no model"),
            (good, f"{good[:12]} does not fit its digest: it is damaged"),
            (good, "missing cannot be read: No such file or directory"),
        ]
        answer = await asked(client)
        assert answer is not None
        assert answer.model == good
        client.assign("pol", None)
        await until(lambda: len(heard.outcomes) == 5)
        answer = await asked(client)
        assert answer is not None
        assert answer.model is None


async def test_a_model_that_kills_the_worker_is_given_up_and_the_one_before_stays(tmp_path: Path) -> None:
    def artifact(data: bytes) -> tuple[str, str]:
        digest = sha256(data).hexdigest()
        (tmp_path / digest).write_bytes(data)
        return digest, str(tmp_path / digest)

    async def model() -> str | None:
        answer = await asked(client)
        assert answer is not None
        return answer.model

    (good, path), (deadly, deadly_path), (other, other_path) = map(artifact, (b"model one", b"deadly", b"model two"))
    async with running("plain", tmp_path) as (client, heard):
        for pool in ("pol", "second"):
            client.assign(pool, good, path)
        await until(lambda: len(heard.outcomes) == 2)
        client.assign("pol", deadly, deadly_path)
        await until(lambda: heard.ends == MAX_DEATHS and client.is_up)
        told = [outcome for outcome in heard.outcomes if outcome.digest == deadly]
        # How its end is seen depends on what was on the way: the socket closes, or breaks.
        reason = told[0].refused or ""
        assert reason.startswith(f"the worker ended {MAX_DEATHS} times while it loaded this model: ")
        assert told == [Assigned("pol", deadly, good, reason)]
        await until(lambda: heard.outcomes[-2:] == [Assigned(pool, good, good) for pool in ("pol", "second")])
        assert await model() == good
        # Wanted again, also by a pool that has none, it is refused at once.
        client.assign("third", deadly, deadly_path)
        assert heard.outcomes[-1] == Assigned("third", deadly, None, reason)
        client.assign("pol", other, other_path)
        await until(lambda: heard.outcomes[-1] == Assigned("pol", other, other))
        assert await model() == other
        assert heard.ends == MAX_DEATHS
    async with running("plain", tmp_path) as (client, heard):
        client.assign("pol", deadly, deadly_path)
        await until(lambda: heard.ends == 1)


async def test_a_worker_that_ends_otherwise_gives_up_no_model(tmp_path: Path) -> None:
    digest = sha256(b"model").hexdigest()
    (tmp_path / digest).write_bytes(b"model")
    async with running("dies", tmp_path) as (client, heard):
        client.assign("pol", digest, str(tmp_path / digest))
        for number in range(1, MAX_DEATHS + 2):
            await until(lambda: client.is_up and len(heard.outcomes) == number)  # noqa: B023 - awaited at once
            assert await asked(client) is None
            await until(lambda: heard.ends == number)  # noqa: B023
        assert all(outcome.refused is None for outcome in heard.outcomes)


async def test_a_worker_to_come_has_the_models_of_the_one_before(tmp_path: Path) -> None:
    digest = sha256(b"model").hexdigest()
    (tmp_path / digest).write_bytes(b"model")
    async with running("plain", tmp_path) as (client, heard):
        client.assign("pol", digest, str(tmp_path / digest))
        await until(lambda: len(heard.outcomes) == 1)
        os.kill(client.pid or 0, signal.SIGKILL)
        await until(lambda: len(heard.outcomes) == 2)
        assert heard.outcomes[1].current == digest


async def test_what_was_learned_outlives_the_worker_and_damage_does_not_stop_it(tmp_path: Path) -> None:
    async with running("plain", tmp_path) as (client, _):
        for _ in range(5):
            client.ended(Ended(1, 100, True))
        assert learned(await asked(client)) == 5
    state = tmp_path / "predictor.state"
    saved = state.read_bytes()
    assert saved.endswith(b".....")
    for damaged in (saved[:-1], saved[:20] + b"x" + saved[21:], b"", b"FLPRED02"):
        state.write_bytes(damaged)
        async with running("plain", tmp_path) as (client, _):
            assert learned(await asked(client)) == 0


async def test_a_worker_that_is_told_to_end_keeps_what_it_learned(tmp_path: Path) -> None:
    async with running("plain", tmp_path) as (client, heard):
        client.ended(Ended(1, 100, True))
        assert learned(await asked(client)) == 1
        os.kill(client.pid or 0, signal.SIGINT)  # the terminal's, which is meant for the router
        assert learned(await asked(client)) == 1
        os.kill(client.pid or 0, signal.SIGTERM)
        await until(lambda: heard.ends == 1 and client.is_up)
    assert (tmp_path / "predictor.state").read_bytes().endswith(b".")
    assert (tmp_path / "predictor.state").stat().st_mode & 0o077 == 0  # it holds the key of the signatures


async def test_what_is_learned_is_saved_while_questions_are_answered(tmp_path: Path) -> None:
    """In more slices than there are batches, and the worker is killed in the end."""
    state = tmp_path / "predictor.state"
    async with running("saves", tmp_path) as (client, heard):
        client.ended(Ended(1, 100, True))
        while not (state.exists() and state.read_bytes().endswith(b".")):
            assert await asked(client) is not None
        os.kill(client.pid or 0, signal.SIGKILL)
        await until(lambda: heard.ends == 1)
        await until(lambda: client.is_up)
        client.ended(Ended(1, 100, True))
        while not state.read_bytes().endswith(b".."):
            assert await asked(client) is not None


async def test_a_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    rest = b"\x07\0\0\0letters"
    (tmp_path / "predictor.state").write_bytes(b"FLPRED02" + sha256(rest).digest() + rest)
    async with running("plain", tmp_path) as (client, _):
        assert learned(await asked(client)) == 0


async def test_no_worker_outlives_its_router(tmp_path: Path) -> None:
    """Killed without a word, a router leaves no process behind, and what was learned is kept."""
    code = (
        f"import sys, asyncio; sys.path.insert(0, {SUPPORT!r})\n"
        "from pathlib import Path\n"
        "from integration.predict.test_worker import running\n"
        "async def main():\n"
        "    async with running('plain', Path(sys.argv[1])) as (client, heard):\n"
        "        print(client.pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = b""
    while not line.strip().isdigit():
        line = await asyncio.wait_for(process.stdout.readline(), 20)
        assert line, "the router ended first"
    process.kill()
    await process.wait()
    worker = int(line)
    await until(lambda: not Path(f"/proc/{worker}").exists() or _is_zombie(worker))
    assert (tmp_path / "predictor.state").exists()


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    return True


@pytest.mark.parametrize("has_unread", [False, True])
def test_a_router_that_ends_is_no_warning(tmp_path: Path, has_unread: bool) -> None:
    """Closed with something unread, its end of the socket answers with a reset."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "router_ext.predict.worker", "--dir", str(tmp_path), "--fd", str(theirs.fileno())]
    worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
    with theirs, ours:
        ready, _, _ = select.select([ours], [], [], 60)
        assert ready == [ours]
        if not has_unread:
            assert ours.recv(65_536)
    said, _ = worker.communicate(timeout=60)
    events = [json.loads(line) for line in said.splitlines()]
    assert worker.returncode == 0
    assert [each for each in events if each["level"] != "info"] == []
    assert [each["event"] for each in events].count("predictor.router_gone") == has_unread
