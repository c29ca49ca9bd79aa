"""An answer that was cut anywhere is, byte for byte, the one that was not: in every dialect, with the model engine.

Each question is put to the model server and to a router in front of it, greedily. Between the two something breaks
streams after a random number of tokens, or inside one; the router cuts into slices of eight; or both at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.cutting import Cutter, cutter
from support.exchange import call
from support.modelserver import DATA_DIR, ModelServer, model_server
from support.resumed import Question, ask, comparable, has_lost_text, questions
from support.routers import RouterProcess, Setup, backend, router
from support.tenants import new_tenant

FLAGS = ("--sim-step-ms", "0.2", "--sim-mean-tokens", "150", "--sim-special", "20", "--max-total-tokens", "2048")
SLICED = {"max_slice_tokens": 8, "min_slice_tokens": 8}
WHOLE = {"max_slice_tokens": 1024, "min_slice_tokens": 1024}
PROMPTS = [
    "Tell me a story",
    "This ends in a space ",
    "  two before, three behind   ",
    "Half a wor",
    "def f(x):\n    return x\n\n\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "写一首关于山的诗 🎉",
]


@dataclass(frozen=True, slots=True)
class Cuttable:
    """A model server, the router in front of it, and what breaks streams between them."""

    server: ModelServer
    cutter: Cutter
    router: RouterProcess
    asked: list[Question]

    def use(self, scheduling: dict[str, int], longest: int) -> None:
        self.cutter.longest = longest
        self.router.setup.scheduling = scheduling
        self.router.publish()


@pytest.fixture(scope="module", params=["flash", "bos, padded"])
def cuttable(request: pytest.FixtureRequest) -> Iterator[Cuttable]:
    """``bos``: the tokenizer adds a token to every text, and cuts are checked by the backend, not with a file."""
    is_flash = request.param == "flash"
    more = () if is_flash else ("--sim-bos", "on", "--sim-block-size", "0", "--sim-chunking", "off")
    path = str(next(DATA_DIR.rglob("tokenizer.json"))) if is_flash else None
    with model_server(*FLAGS, *more) as server, cutter(server.port) as between:
        asked: list[Question] = []
        for number, prompt in enumerate(PROMPTS if is_flash else PROMPTS[::2]):
            every = questions(prompt, 41 + number)
            asked += [each for each in every if not has_lost_text(ask(server.port, each), each)]
            for place in (0, 3, 6):
                asked += every[place].stopped(server.port)
        with router(Setup(backends=[backend(between.port)], scheduling=SLICED, tokenizer_path=path)) as running:
            assert len(asked) >= 10 * (number + 1)
            yield Cuttable(server, between, running, asked)


@pytest.mark.parametrize("kind", ["slices", "cuts", "both"])
def test_a_cut_answer_is_the_uncut_one(cuttable: Cuttable, kind: str) -> None:
    cuttable.use(WHOLE if kind == "cuts" else SLICED, 0 if kind == "slices" else 12)
    running, before = cuttable.router, cuttable.cutter.cuts
    resumes = {each: running.metric("fairlane_resumes_total", **{"class": each}) for each in ("exact", "approximate")}
    tenant = new_tenant(running)
    for question in cuttable.asked:
        wanted, found = ask(cuttable.server.port, question), ask(running.port, question, tenant.headers)
        assert comparable(found, question) == comparable(wanted, question), question
    books = tenant.usage(len(cuttable.asked))
    reasons = {event.finish_reason for event in books}
    assert reasons == {"length", "eos_token", "stop_sequence"}
    assert {event.resume_class for event in books} == {"exact"}
    assert (cuttable.cutter.cuts - before > len(books)) == (kind != "slices")
    prompts = [len(q.body["prompt"]) if isinstance(q.body.get("prompt"), list) else 1 for q in cuttable.asked]
    resumed = sum(event.segments for event in books) - sum(prompts)
    assert resumed > len(books)
    exact = running.metric("fairlane_resumes_total", **{"class": "exact"}) - resumes["exact"]
    # A slice that ends before its first whole character begins anew, which is no resume.
    assert 0.9 * resumed <= exact <= resumed
    assert running.metric("fairlane_resumes_total", **{"class": "approximate"}) == resumes["approximate"]


def test_the_rest_of_a_seeded_answer_is_drawn_anew(cuttable: Cuttable) -> None:
    """It is complete, and says that it is not the one the seed alone would give."""
    cuttable.use(SLICED, 0)
    running, tenant = cuttable.router, new_tenant(cuttable.router)
    before = {each: running.metric("fairlane_resumes_total", **{"class": each}) for each in ("exact", "approximate")}
    parameters = {"max_new_tokens": 30, "details": True, "do_sample": True, "temperature": 0.7}
    # Without a seed an answer may be so short that one slice holds it; hardly all of five.
    for seed in ({"seed": 7}, *[{}] * 5):
        body = {"inputs": "Tell me", "parameters": {**parameters, **seed}}
        status, _, answer = call(running.port, "POST", "/generate", body, headers=tenant.headers)
        details = json.loads(answer)["details"]
        assert (status, len(details["tokens"])) == (200, details["generated_tokens"])
        assert details["seed"] == 7 or not seed
    seeded, *free = tenant.usage(6)
    assert [seeded.resume_class, *(each.resume_class for each in free)] == ["approximate", *["exact"] * 5]
    after = {each: running.metric("fairlane_resumes_total", **{"class": each}) for each in before}
    assert after["approximate"] - before["approximate"] == seeded.segments - 1 > 0
    assert after["exact"] - before["exact"] == sum(each.segments - 1 for each in free) > 0
