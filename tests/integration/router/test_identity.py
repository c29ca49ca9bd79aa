"""With greedy decoding the text through the router, in slices of eight tokens, is that of one unsliced request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.exchange import call, events
from support.modelserver import DATA_DIR, ModelServer, model_server
from support.recorded_tgi import FOLDER
from support.routers import RouterProcess, Setup, backend, router
from support.tenants import new_tenant

SLICES = {"max_slice_tokens": 8, "min_slice_tokens": 8}
PROMPTS = [json.loads(line)["prompt"] for line in (FOLDER / "resume.jsonl").read_text(encoding="utf-8").splitlines()]
MORE = [
    "Γράψε ένα ποίημα για τη θάλασσα",
    "写一首关于山的诗",
    "اكتب قصة قصيرة",
    "🎉🚀 emoji only 👩‍👩‍👧‍👦",
    "def f(x):\n    return x\n\n\n",
    "  leading spaces and trailing   ",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a" * 300,
]


def tokens(port: int, body: Any, headers: dict[str, str] | None = None) -> list[Any]:
    status, _, answer = call(port, "POST", "/generate_stream", body, headers=headers)
    assert status == 200, answer
    return events(answer)


def with_text(answer: list[Any]) -> list[Any]:
    """TGI loses the whole text of an answer that ends inside a character; the router gives what its tokens say."""
    last = answer[-1]
    if last["generated_text"] == "":
        last["generated_text"] = "".join(e["token"]["text"] for e in answer if not e["token"]["special"])
    return answer


@pytest.fixture(scope="module", params=["canonical", "bos"])
def server(request: pytest.FixtureRequest) -> Iterator[ModelServer]:
    """Ends come early, late and not at all; ``bos``: the tokenizer adds a token of its own to every text."""
    extra = ("--sim-bos", "on") if request.param == "bos" else ()
    with model_server("--sim-step-ms", "0.2", "--sim-mean-tokens", "40", *extra) as running:
        yield running


@pytest.fixture(scope="module", params=["backend", "file"])
def slicing(request: pytest.FixtureRequest, server: ModelServer) -> Iterator[RouterProcess]:
    """Cuts are checked by the backend's ``/tokenize``, or by a tokenizer file of the pool."""
    path = None
    if request.param == "file":
        path = str(next(DATA_DIR.rglob("tokenizer.json")))
    with router(Setup(backends=[backend(server.port)], scheduling=SLICES, tokenizer_path=path)) as running:
        yield running


def test_sliced_text_is_the_unsliced_text(server: ModelServer, slicing: RouterProcess) -> None:
    tenant = new_tenant(slicing)
    assert len(PROMPTS) >= 60
    different = []
    total = 0
    for number, prompt in enumerate(PROMPTS + MORE):
        stop = [["e"], ["the ", " o"], []][number % 3]
        parameters = {"max_new_tokens": 30 + number % 40, "details": True, "do_sample": False, "stop": stop}
        body = {"inputs": prompt, "parameters": parameters}
        wanted, found = with_text(tokens(server.port, body)), tokens(slicing.port, body, tenant.headers)
        total += len(found)
        if wanted != found:
            different.append((prompt, wanted[-1], found[-1]))
    assert different == []
    books = tenant.usage(len(PROMPTS + MORE))
    assert sum(event.output_tokens for event in books) == total
    assert sum(event.segments for event in books) > 2 * len(books)
    assert {event.resume_class for event in books} == {"exact"}
    assert {event.finish_reason for event in books} == {"length", "eos_token", "stop_sequence"}


def test_sliced_chats_are_the_unsliced_chats(server: ModelServer, slicing: RouterProcess) -> None:
    tenant = new_tenant(slicing)
    for number, prompt in enumerate((PROMPTS + MORE)[::4]):
        body = {
            "model": "tgi",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}],
            "max_tokens": 40,
            "temperature": 0,
            "stream": number % 2 == 0,
            "stream_options": {"include_usage": True},
        }
        answers = [
            call(port, "POST", "/v1/chat/completions", body, headers=headers)
            for port, headers in ((server.port, {}), (slicing.port, tenant.headers))
        ]
        assert [status for status, _, _ in answers] == [200, 200]
        if body["stream"]:
            wanted, found = (events(answer) for _, _, answer in answers)
        else:
            wanted, found = ([json.loads(answer)] for _, _, answer in answers)
        for event in (*wanted, *found):
            if isinstance(event, dict):
                event.pop("created")
        assert wanted == found, prompt


def test_whole_answers_are_the_unsliced_ones(server: ModelServer, slicing: RouterProcess) -> None:
    tenant = new_tenant(slicing)
    for prompt in PROMPTS[::6]:
        parameters = {"max_new_tokens": 33, "details": True, "do_sample": False, "top_n_tokens": 2}
        for path in ("/generate", "/"):
            body = {"inputs": prompt, "parameters": parameters}
            direct = call(server.port, "POST", path, body)[2]
            routed = call(slicing.port, "POST", path, body, headers=tenant.headers)[2]
            assert json.loads(routed) == json.loads(direct), prompt
