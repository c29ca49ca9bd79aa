"""What a backend's model lets a router resume, and what books and metrics say of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.scripted import INFO, Peer, World, running, stream

from router_ext.backends.fake import Ending, Script
from router_ext.gateway.bos import PROBE_CHAT
from router_ext.gateway.generation import ResumeClass, worst_class

BODY = {"inputs": "a b c", "parameters": {"max_new_tokens": 5}}
CHAT = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5}
ANSWER = {
    "object": "chat.completion",
    **{"id": "", "created": 1, "model": "m", "system_fingerprint": "f"},
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "d"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
}


def tokens(*ids: int) -> Script:
    return Script(pieces=(json.dumps([{"id": i, "text": f"t{i}", "start": 0, "stop": 1} for i in ids]).encode(),))


class Model(World):
    """A backend whose tokenizer adds ``front`` and ``back``; ``template``: the ids of every templated chat.

    Attributes:
        has_template: None: for every chat but the router's own first question.
    """

    def __init__(
        self,
        *,
        front: tuple[int, ...] = (),
        back: tuple[int, ...] = (),
        template: tuple[int, ...] = (1, 2, 3),
        has_template: bool | None = True,
        reads_images: bool = False,
        info: bytes = INFO,
    ) -> None:
        super().__init__()
        self.front, self.back, self.template = front, back, template
        self.has_template, self.reads_images, self.info = has_template, reads_images, info
        self.generations: dict[str, list[Script]] = {}

    def play(self, path: str, body: bytes) -> Script:
        if path == "/info":
            return Script(pieces=(self.info,))
        if path == "/tokenize":
            text = json.loads(body)["inputs"]
            if text == "![](-)" and self.reads_images:
                return Script(status=422, pieces=(b'{"error":"invalid image content","error_type":"validation"}',))
            if " t1" in text:
                return self.cut
            if text == "".join(f"t{i}" for i in self.template[len(self.front) :]):
                return tokens(*self.template)
            return tokens(*self.front, *((1, 2, 3) if text else ()), *self.back)
        if path == "/chat_tokenize":
            if self.has_template or (self.has_template is None and body != PROBE_CHAT):
                found = json.loads(tokens(*self.template).pieces[0])
                text = "".join(token["text"] for token in found)
                return Script(pieces=(json.dumps({"tokenize_response": found, "templated_text": text}).encode(),))
            return super().play(path, body)
        if path == "/v1/chat/completions":
            return Script(headers=((b"content-type", b"application/json"),), pieces=(json.dumps(ANSWER).encode(),))
        scripts = self.generations.get(json.loads(body)["inputs"]) if path == "/generate_stream" else None
        return scripts.pop(0) if scripts else super().play(path, body)

    def metric(self, name: str, **labels: str) -> float:
        lines = self.router.metrics.page().decode().splitlines()
        named = [line for line in lines if line.startswith(name + "{")]
        return sum(
            float(line.rpartition(" ")[2])
            for line in named
            if all(f'{label}="{value}"' in line for label, value in labels.items())
        )

    def booked(self) -> dict[str, Any]:
        batch = self.router.ledger.read_batch()
        assert batch is not None
        event: dict[str, Any] = json.loads(batch.payloads[-1])
        return event


APPENDS = {"back": (2,)}
SMALL = {"info": b'{"model_id":"m","max_input_tokens":6,"max_total_tokens":4096}'}


@pytest.mark.parametrize(
    ("model", "path", "body", "reason"),
    [
        ({}, "/generate", BODY, None),
        ({}, "/v1/chat/completions", CHAT, None),
        ({"front": (9,)}, "/generate", BODY, None),
        ({"front": (9,), "template": (9, 1, 2)}, "/v1/chat/completions", CHAT, None),
        ({"front": (9,)}, "/v1/chat/completions", CHAT, "bos"),
        ({"front": (9,), "back": (2,)}, "/generate", BODY, "model"),
        (APPENDS, "/generate", BODY, "model"),
        (APPENDS, "/v1/chat/completions", CHAT, "bos"),
        ({"has_template": None}, "/v1/chat/completions", CHAT, "template"),
        (SMALL, "/generate", BODY, "limits"),
        (SMALL, "/v1/chat/completions", CHAT, "limits"),
    ],
)
async def test_each_request_that_cannot_be_resumed_is_counted_by_its_reason(
    tmp_path: Path, model: dict[str, Any], path: str, body: Any, reason: str | None
) -> None:
    async with running(tmp_path, Model(**model)) as world:
        assert isinstance(world, Model)
        peer = Peer(world, path, body)
        await peer.wait()
        assert peer.status == 200, peer.data
        assert world.booked()["resume_class"] == ("exact" if reason is None else "never")
        assert world.metric("fairlane_unresumable_requests_total") == (reason is not None)
        if reason is not None:
            assert world.metric("fairlane_unresumable_requests_total", reason=reason) == 1
        assert world.metric("fairlane_resumes_total") == 0


@pytest.mark.parametrize("model", [{}, APPENDS])
async def test_a_broken_stream_goes_on_only_where_text_can_be_continued(tmp_path: Path, model: dict[str, Any]) -> None:
    """An appended end of text would stand between the answer's parts."""
    made = Model(**model)
    async with running(tmp_path, made):
        made.generations["a b c"] = [stream(3, ending=Ending.CUT)]
        await Peer(made, "/generate_stream", BODY).wait()
        outcome, resumes = ("failed", 0) if model else ("completed", 1)
        event = made.booked()
        assert (event["outcome"], event["resume_class"]) == (outcome, "never" if model else "approximate")
        assert made.metric("fairlane_resumes_total", **{"class": "approximate"}) == resumes
        assert event["output_tokens"] == (3 if model else 8)


@pytest.mark.parametrize("reads_images", [True, False])
async def test_an_image_named_by_an_answer_is_not_fetched(tmp_path: Path, reads_images: bool) -> None:
    made = Model(reads_images=reads_images)
    async with running(tmp_path, made):
        script = stream(3, ending=Ending.CUT)
        pieces = [piece.replace(b'" t2"', b'"![](http://h/i.png)"') for piece in script.pieces]
        made.generations["a b c"] = [replace(script, pieces=tuple(pieces))]
        await Peer(made, "/generate_stream", BODY).wait()
        event = made.booked()
        wanted = ("failed", "never") if reads_images else ("completed", "approximate")
        assert (event["outcome"], event["resume_class"]) == wanted


async def test_several_prompts_have_the_class_of_the_least_faithful(tmp_path: Path) -> None:
    """Not that of the one that ended last."""
    made = Model()
    async with running(tmp_path, made):
        made.generations = {"a": [stream(2, ending=Ending.CUT)], "b": [stream(5)], "a t1 t2": [stream(1)]}
        body = {"prompt": ["a", "b"], "max_tokens": 5, "temperature": 0}
        assert (await Peer(made, "/v1/completions", body).wait()).count(b'"finish_reason":"length"') == 2
        event = made.booked()
        assert (event["outcome"], event["resume_class"], event["segments"]) == ("completed", "approximate", 3)


async def test_an_answer_that_fails_after_a_resume_has_its_class(tmp_path: Path) -> None:
    made = Model()
    async with running(tmp_path, made):
        refused = Script(status=422, pieces=(b'{"error":"Input validation error: no","error_type":"validation"}',))
        made.generations = {"a b c": [stream(2, ending=Ending.CUT)], "a b c t1 t2": [refused]}
        await Peer(made, "/generate_stream", BODY).wait()
        event = made.booked()
        assert (event["outcome"], event["output_tokens"], event["resume_class"]) == ("failed", 2, "approximate")


def test_the_worst_class() -> None:
    exact, approximate, never = ResumeClass.EXACT, ResumeClass.APPROXIMATE, ResumeClass.NEVER
    assert worst_class([exact, never, approximate]) is never
    assert worst_class([exact, approximate, exact]) is approximate
    assert worst_class([exact]) is exact
    assert worst_class([]) is None
