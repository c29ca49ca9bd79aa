"""The fake model: a function of the ids, whose text tokenises back to them unless told otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router_ext.devserver import toy
from router_ext.devserver.codec import Codec
from router_ext.devserver.engine import Sampling, Sequence
from router_ext.devserver.model_engine import ModelEngine
from router_ext.devserver.smollm import EOS_ID, load_tokenizer

RESUME = Path(__file__).parents[2] / "conformance" / "transcripts" / "resume.jsonl"
PROMPTS = [json.loads(line)["prompt"] for line in RESUME.read_text(encoding="utf-8").splitlines()]
PROMPTS += [
    "ends with a space ",
    "two  ",
    "a\n",
    "a\n\n",
    "'",
    "tab\t",
    "12",
    "日",
    "😀",
    "<|im_start|>assistant\n",
    "x,",
]
TOKENS = 64
GREEDY = Sampling()


@pytest.fixture(scope="module")
def codec(model_dir: Path) -> Codec:
    return Codec(load_tokenizer(model_dir))


@pytest.fixture(scope="module")
def engine(codec: Codec) -> ModelEngine:
    return ModelEngine(codec, eos_id=EOS_ID, mean_tokens=0)


def generated(engine: ModelEngine, ids: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    sequence = Sequence(sequence_id=1, prompt_ids=list(ids), sampling=sampling)
    (sampled,) = engine.step(prefill=[(sequence, len(ids))], decode=[])
    sequence.output_ids.append(sampled.token_id)
    while len(sequence.output_ids) < count:
        (sampled,) = engine.step(prefill=[], decode=[sequence])
        sequence.output_ids.append(sampled.token_id)
    engine.remove(sequence)
    return sequence.output_ids


def text_of(codec: Codec, ids: list[int]) -> str | None:
    try:
        return b"".join(codec.token_bytes[i] for i in ids).decode()
    except UnicodeDecodeError:
        return None


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_cut_at_a_character_tokenises_back_to_its_own_ids(codec: Codec, engine: ModelEngine, prompt: str) -> None:
    ids = codec.encode(prompt, add_special_tokens=True)
    output = generated(engine, ids, TOKENS)
    for cut in range(1, TOKENS + 1):
        text = text_of(codec, output[:cut])
        if text is not None:
            assert codec.encode(prompt + text, add_special_tokens=True) == ids + output[:cut]


def test_a_greedy_generation_continues_from_any_cut(codec: Codec, engine: ModelEngine) -> None:
    ids = codec.encode(PROMPTS[0], add_special_tokens=True)
    whole = generated(engine, ids, TOKENS)
    for cut in range(1, TOKENS):
        assert generated(engine, ids + whole[:cut], TOKENS - cut) == whole[cut:]


def test_prompts_chunked_or_not_give_the_same_tokens(codec: Codec, engine: ModelEngine) -> None:
    ids = codec.encode(PROMPTS[1], add_special_tokens=True)
    sequence = Sequence(sequence_id=1, prompt_ids=ids, sampling=Sampling())
    for n in range(len(ids) - 1):
        assert engine.step(prefill=[(sequence, 1)], decode=[]) == []
        sequence.prefilled = n + 1
    (sampled,) = engine.step(prefill=[(sequence, 1)], decode=[])
    assert [sampled.token_id] == generated(engine, ids, 1)


def test_characters_of_several_tokens_occur(codec: Codec, engine: ModelEngine) -> None:
    outputs = [generated(engine, codec.encode(p, add_special_tokens=True), TOKENS) for p in PROMPTS]
    assert sum(codec.token_text[i] is None for output in outputs for i in output) > 50


def test_a_seed_repeats_alone_and_not_when_resumed(codec: Codec, engine: ModelEngine) -> None:
    ids = codec.encode("Once upon a time", add_special_tokens=True)
    seeded = Sampling(do_sample=True, seed=7)
    whole = generated(engine, ids, TOKENS, seeded)
    assert generated(engine, ids, TOKENS, seeded) == whole
    assert generated(engine, ids, TOKENS, Sampling(do_sample=True, seed=8)) != whole
    assert generated(engine, ids + whole[:20], TOKENS - 20, seeded) != whole[20:]


def test_answers_end_at_the_mean_asked_for(codec: Codec) -> None:
    engine = ModelEngine(codec, eos_id=EOS_ID, mean_tokens=32)
    lengths = []
    for n in range(300):
        output = generated(engine, codec.encode(f"prompt {n}", add_special_tokens=True), 400)
        lengths.append(output.index(EOS_ID) if EOS_ID in output else 400)
    assert 26 < sum(lengths) / len(lengths) < 44


def test_special_tokens_come_back_from_their_own_spelling(codec: Codec) -> None:
    engine = ModelEngine(codec, eos_id=EOS_ID, mean_tokens=0, special_every=8)
    ids = codec.encode("Some prompt", add_special_tokens=True)
    output = generated(engine, ids, TOKENS)
    assert sum(i in codec.special for i in output) > 2
    text = text_of(codec, output)
    assert text is not None
    assert codec.encode("Some prompt" + text, add_special_tokens=True) == ids + output


class TestToyTokenizer:
    def test_encoding_adds_the_bos_that_the_template_holds_as_well(self) -> None:
        codec = Codec(toy.tokenizer())
        assert codec.encode("", add_special_tokens=True) == [toy.BOS_ID]
        assert codec.encode(toy.BOS + "of", add_special_tokens=False)[0] == toy.BOS_ID
        assert codec.spans("the", add_special_tokens=True)[0] == {"id": 0, "text": "", "start": 0, "stop": 0}

    def test_odd_splits_appear_only_when_asked_for(self) -> None:
        codec = Codec(toy.tokenizer())
        odd = {}
        for noncanonical in (False, True):
            engine = ModelEngine(codec, eos_id=toy.EOS_ID, mean_tokens=0, noncanonical=noncanonical)
            odd[noncanonical] = 0
            for n in range(20):
                ids = codec.encode(f"prompt {n}", add_special_tokens=True)
                output = generated(engine, ids, TOKENS)
                text = text_of(codec, output)
                if text is not None:
                    odd[noncanonical] += codec.encode(f"prompt {n}{text}", add_special_tokens=True) != ids + output
        assert odd[False] == 0
        assert odd[True] > 10


def test_a_chat_is_answered_at_the_length_it_asks_for_however_it_is_cut(codec: Codec) -> None:
    engine = ModelEngine(codec, eos_id=EOS_ID, obeys_numbers=True)
    whole: dict[int, list[int]] = {}
    for asked in (10, 100, 400):
        lengths = []
        for topic in ("rivers", "bread", "chess"):
            text = (
                f"<|im_start|>user\nWrite {asked} words on {topic}, 3 of them long.<|im_end|>\n<|im_start|>assistant\n"
            )
            ids = codec.encode(text, add_special_tokens=False)
            answer = until_eos(engine, ids)
            lengths.append(len(answer))
            # Cut in the middle and resumed, by ids: the same tokens, the same end.
            half = len(answer) // 2
            assert until_eos(engine, ids + answer[:half]) == answer[half:]
        assert all(asked / 2.5 < length < asked * 2.5 for length in lengths), (asked, lengths)
        assert len(set(lengths)) > 1
        whole[asked] = lengths
    assert max(whole[10]) < min(whole[100]) < max(whole[100]) < min(whole[400])


def until_eos(engine: ModelEngine, ids: list[int]) -> list[int]:
    """Greedy tokens to the end, EOS included."""
    sequence = Sequence(sequence_id=1, prompt_ids=list(ids), sampling=GREEDY)
    (sampled,) = engine.step(prefill=[(sequence, len(ids))], decode=[])
    while sampled.token_id != EOS_ID:
        sequence.output_ids.append(sampled.token_id)
        (sampled,) = engine.step(prefill=[], decode=[sequence])
    engine.remove(sequence)
    return [*sequence.output_ids, EOS_ID]
