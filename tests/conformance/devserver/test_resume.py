"""60 greedy answers cut into slices of eight tokens and resumed as text, with the figures recorded from a TGI.

The client here is the simplest one that resumes: it keeps back at most four tokens of a slice, cuts at the last
boundary that the tokenizer splits again into its own ids, and lets the next slice generate the rest again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from support.exchange import call, events
from support.modelserver import DATA_DIR, model_server
from support.recorded_tgi import FOLDER
from tokenizers import Tokenizer

pytestmark = [pytest.mark.torch_engine, pytest.mark.slow, pytest.mark.timeout(1_800)]
RECORDED = [json.loads(line) for line in (FOLDER / "resume.jsonl").read_text("utf-8").splitlines()]
TOKENS, SLICE, HELD_BACK = 48, 8, 4
EOS_ID = 2
AT_ONCE = 6


@dataclass(frozen=True, slots=True)
class Found:
    """What the recording says of a prompt."""

    tokens: int
    slices: int
    dropped: int
    approximate_cuts: int
    identical_ids: bool
    identical_text: bool
    finish: list[str]


def stream(port: int, text: str, tokens: int) -> tuple[list[dict[str, Any]], str]:
    """Tokens of one stream and the reason of its end."""
    asked = {"inputs": text, "parameters": {"max_new_tokens": tokens, "details": True}}
    status, _, data = call(port, "POST", "/generate_stream", asked)
    assert status == 200
    found = events(data)
    return [event["token"] for event in found], found[-1]["details"]["finish_reason"]


def resumed(port: int, tokenizer: Tokenizer, prompt: str) -> Found:
    """One prompt, whole and in slices."""
    whole, reason = stream(port, prompt, TOKENS)
    kept: list[dict[str, Any]] = []
    slices = dropped = approximate = 0
    while True:
        text = prompt + "".join(token["text"] for token in kept)
        more, sliced_reason = stream(port, text, min(SLICE, TOKENS - len(kept)))
        slices += 1
        kept += more
        if sliced_reason == "length" and kept[-1]["id"] == EOS_ID:
            sliced_reason = "eos_token"
        if sliced_reason != "length" or len(kept) == TOKENS:
            break
        cut = next((n for n in range(HELD_BACK + 1) if is_exact(tokenizer, prompt, kept[: len(kept) - n])), None)
        if cut is None:
            approximate += 1
            continue
        dropped += cut
        kept = kept[: len(kept) - cut]
    return Found(
        tokens=len(whole),
        slices=slices,
        dropped=dropped,
        approximate_cuts=approximate,
        identical_ids=[t["id"] for t in whole] == [t["id"] for t in kept],
        identical_text=[t["text"] for t in whole] == [t["text"] for t in kept],
        finish=[reason, sliced_reason],
    )


def is_exact(tokenizer: Tokenizer, prompt: str, kept: list[dict[str, Any]]) -> bool:
    """Whether the text so far splits into the prompt's ids and those that were sampled."""
    text = prompt + "".join(token["text"] for token in kept)
    ids: list[int] = tokenizer.encode(text).ids
    return ids == tokenizer.encode(prompt).ids + [token["id"] for token in kept]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Found]]:
    flags = ("--max-input-tokens", "1024", "--max-total-tokens", "2100", "--max-batch-prefill-tokens", "1024")
    padded = ("--sim-block-size", "0", "--sim-chunking", "off")
    with model_server(*flags, *padded, engine="torch") as server, ThreadPoolExecutor(AT_ONCE) as pool:
        tokenizer = Tokenizer.from_file(str(next(DATA_DIR.rglob("tokenizer.json"))))
        prompts = [record["prompt"] for record in RECORDED]
        yield dict(zip(prompts, pool.map(lambda prompt: resumed(server.port, tokenizer, prompt), prompts), strict=True))


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record["prompt"][:40])
def test_a_resumed_answer_is_what_it_was_on_tgi(found: dict[str, Found], record: dict[str, Any]) -> None:
    expected = {name: record[name] for name in Found.__slots__}
    assert asdict(found[record["prompt"]]) == expected
