"""The guides of compiled grammars: the real worker process over the toy vocabulary."""

from __future__ import annotations

import asyncio
import gc
import re
import select
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from router_ext.devserver import grammars as grammars_module
from router_ext.devserver import toy
from router_ext.devserver.codec import Codec
from router_ext.devserver.constraints import regex_of
from router_ext.devserver.engine import Guide, Sampling, Sequence
from router_ext.devserver.grammar_worker import Compile
from router_ext.devserver.grammars import KEPT, CompiledGuide, CompilerGone, GrammarFailed, Grammars, ScriptedGuide
from router_ext.devserver.model_engine import ModelEngine
from router_ext.guard.examples import COMMON
from router_ext.guard.grammar import functions_of, tool_schema

REGEXES = {
    "choice": "(yes|no|maybe)",
    "date": "[0-9]{4}-[0-9]{2}",
    "letters": "[a-z]{40}",
    "other alphabets": "(日本|мир|é)+!",
    "text in quotes": '"[ -!#-~]{0,12}"',
    "person": regex_of(COMMON["person"]["value"]),
    "labels": regex_of(COMMON["labels"]["value"]),
    "tools": regex_of(
        tool_schema(functions_of([{"function": {"name": "now", "parameters": {"type": "object"}}}], "auto", None))
    ),
}


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(toy.tokenizer())


@pytest.fixture(scope="module")
def grammars(codec: Codec) -> Iterator[Grammars]:
    grammars = Grammars(codec, toy.EOS_ID)
    yield grammars
    grammars.close()


def guide_of(grammars: Grammars, regex: str) -> CompiledGuide:
    return asyncio.run(grammars.guide(regex))


def text_of(codec: Codec, ids: list[int]) -> str:
    return b"".join(codec.token_bytes[i] for i in ids if i != toy.EOS_ID).decode()


def walk(guide: Guide, seed: str) -> list[int]:
    """Any allowed tokens, one after another; towards the end after a while."""
    state, ids = guide.initial, []
    while state >= 0 and len(ids) < 200:
        allowed = guide.allowed(state)
        pick = zlib.crc32(f"{seed} {len(ids)}".encode())
        token = allowed[pick % len(allowed)] if len(ids) < 30 else guide.options(state)[1]
        ids.append(token)
        if token == toy.EOS_ID:
            break
        state = guide.next(state, token)
    return ids


@pytest.mark.parametrize("name", REGEXES)
def test_whatever_is_allowed_leads_to_a_match(codec: Codec, grammars: Grammars, name: str) -> None:
    guide = guide_of(grammars, REGEXES[name])
    for seed in range(8):
        ids = walk(guide, f"{name} {seed}")
        assert ids[-1] == toy.EOS_ID
        assert re.fullmatch(REGEXES[name], text_of(codec, ids)), text_of(codec, ids)


class Unbound(ScriptedGuide):
    """A guide whose allowed tokens nobody may rely on."""

    def options(self, state: int) -> tuple[Any, int]:
        return range(3, 12), 3


def answer(codec: Codec, guide: Guide | None, prompt: str, *, top_n_tokens: int = 0) -> tuple[list[int], list[Any]]:
    engine = ModelEngine(codec, eos_id=toy.EOS_ID, mean_tokens=0)
    ids = codec.encode(prompt, add_special_tokens=True)
    sequence = Sequence(sequence_id=1, prompt_ids=ids, sampling=Sampling(top_n_tokens=top_n_tokens), guide=guide)
    sequence.guide_state = -1 if guide is None else guide.initial
    (sampled,) = engine.step(prefill=[(sequence, len(ids))], decode=[])
    tops = [sampled.top]
    sequence.output_ids.append(sampled.token_id)
    while sequence.output_ids[-1] != toy.EOS_ID and len(sequence.output_ids) < 400:
        (sampled,) = engine.step(prefill=[], decode=[sequence])
        tops.append(sampled.top)
        sequence.output_ids.append(sampled.token_id)
    return sequence.output_ids, tops


@pytest.mark.parametrize("name", REGEXES)
def test_the_model_engine_stays_inside_and_ends(codec: Codec, grammars: Grammars, name: str) -> None:
    guide = guide_of(grammars, REGEXES[name])
    texts = set()
    for number in range(12):
        ids, tops = answer(codec, guide, f"prompt {number}", top_n_tokens=2)
        assert ids[-1] == toy.EOS_ID
        texts.add(text_of(codec, ids))
        assert [top[0][0] for top in tops] == ids
        assert all(1 <= len(top) <= 2 for top in tops)
    assert all(re.fullmatch(REGEXES[name], text) for text in texts)
    assert len(texts) > 1


@pytest.mark.parametrize("guide", [None, Unbound([], toy.EOS_ID)], ids=["without a guide", "ignoring the guide"])
def test_a_model_engine_that_is_not_bound_does_not_match(codec: Codec, guide: Guide | None) -> None:
    ids, _ = answer(codec, guide, "prompt 1")
    assert not re.fullmatch(REGEXES["person"], text_of(codec, ids))


@pytest.mark.parametrize(
    ("regex", "message", "is_fatal"),
    [
        ("(", "", False),
        (r"(a)\1", "Group references are not implemented", False),
        ("(?=a)b", "The vocabulary does not allow us to build a sequence that matches the input", False),
        ("(" * 500 + "a" + ")" * 500, "maximum recursion depth exceeded", True),
    ],
)
def test_a_grammar_fails_with_the_words_of_the_compiler(
    grammars: Grammars, regex: str, message: str, is_fatal: bool
) -> None:
    with pytest.raises(GrammarFailed) as caught:
        guide_of(grammars, regex)
    assert str(caught.value).startswith(message)
    assert bool(message) == bool(str(caught.value))
    assert caught.value.is_fatal is is_fatal


def test_the_last_32_grammars_are_kept_and_others_as_long_as_somebody_uses_them(codec: Codec) -> None:
    grammars = Grammars(codec, toy.EOS_ID)
    first = guide_of(grammars, "a{1,3}")
    assert guide_of(grammars, "a{1,3}") is first
    for number in range(KEPT):
        guide_of(grammars, f"b{{{number + 1}}}")
    again = guide_of(grammars, "a{1,3}")
    assert again is not first
    assert first.next(first.initial, first.allowed(first.initial)[0]) >= 0, "still known to the worker"
    key = first._key
    del first, again
    gc.collect()
    held = guide_of(grammars, "c")
    with pytest.raises(CompilerGone):  # the worker looks in vain for what nobody uses: it was told to forget it
        CompiledGuide(held._link, key, 0).next(0, 3)
    grammars.close()


def test_a_worker_that_dies_is_noticed(codec: Codec) -> None:
    grammars = Grammars(codec, toy.EOS_ID)
    guide = guide_of(grammars, "ab")
    grammars.close()
    with pytest.raises(CompilerGone):
        guide.next(guide.initial, 5)


def test_a_compilation_without_end_ends_with_the_server(codec: Codec) -> None:
    async def closed_meanwhile() -> None:
        grammars = Grammars(codec, toy.EOS_ID)
        await grammars.guide("a")
        endless = asyncio.create_task(grammars.guide(r"(\w{1,30}[a-z]{1,30}){1,200}"))
        await asyncio.sleep(0.2)
        assert not endless.done()
        grammars.close()
        with pytest.raises(CompilerGone):
            await endless

    asyncio.run(closed_meanwhile())


def test_a_worker_ends_with_a_server_that_has_not_read_its_answer(codec: Codec) -> None:
    """As one that was killed: closing with unread bytes resets the link."""
    link = grammars_module._Link(codec, toy.EOS_ID)
    assert link._setup is not None
    link._send(link._setup)
    link._send(Compile(1, "a+"))
    select.select([link._socket], [], [], 30)
    link._socket.close()
    assert link._process.wait(timeout=30) == 0


def test_a_script_is_followed_to_its_end() -> None:
    guide = ScriptedGuide([5, 6], toy.EOS_ID)
    state, seen = guide.initial, []
    while state >= 0:
        (token,) = guide.allowed(state)
        assert guide.options(state) == ((token,), token)
        seen.append(token)
        state = guide.next(state, token)
    assert seen == [5, 6, toy.EOS_ID]
