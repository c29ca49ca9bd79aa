"""Where text may be cut, and where encoding may start afresh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from router_ext.devserver.smollm import load_tokenizer
from router_ext.gateway.cuts import (
    CutDecision,
    CutJob,
    TextTokenizer,
    boundaries,
    choose_cut,
    cut_unchecked,
    search_cut,
)

PIECES = [
    "a",
    " b",
    "\n",
    "\n\n",
    "  ",
    " ",
    "日本",
    "🎉",
    " <|im_end|>",
    "<|im_start|>",
    "12",
    "!",
    "\t",
    "\u00a0",
    "'s",
]


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> TextTokenizer:
    return TextTokenizer(load_tokenizer(model_dir))


def metaspace_tokenizer() -> Tokenizer:
    """SentencePiece's way: a leading space only at the very start."""
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"])]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=20))
def test_encoding_may_start_afresh_at_a_safe_start(tokenizer: TextTokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    start = tokenizer.safe_start(text)
    tail = tokenizer.encode_tail(text[start:])
    assert tokenizer.encode(text)[len(tokenizer.encode(text)) - len(tail) :] == tail


def cut_of_the_whole(tokenizer: TextTokenizer, job: CutJob) -> CutDecision:
    search = search_cut(job, tokenizer.encode(job.base_text))
    text = next(search)
    while True:
        try:
            text = search.send(tokenizer.encode(job.base_text + text))
        except StopIteration as stop:
            decision: CutDecision = stop.value
            return decision


@given(
    base=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join),
    answer=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6),
)
def test_a_cut_from_a_safe_start_is_the_cut_of_the_whole(
    tokenizer: TextTokenizer, base: str, answer: list[str]
) -> None:
    ids = [tokenizer.encode_tail(piece) for piece in answer]
    tokens = [
        (i, piece if place == len(group) - 1 else "")
        for piece, group in zip(answer, ids, strict=True)
        for place, i in enumerate(group)
    ]
    job = CutJob(base, [i for i, _ in tokens], [text for _, text in tokens], lowest=0, highest=len(tokens))
    assert choose_cut(tokenizer, job) == cut_of_the_whole(tokenizer, job)


def test_which_tokenizers_allow_a_fresh_start(tokenizer: TextTokenizer) -> None:
    assert tokenizer.is_restartable
    assert not TextTokenizer(metaspace_tokenizer()).is_restartable


@pytest.mark.parametrize("change", ["normalizer", "split", "swallowing token"])
def test_anything_unknown_forbids_a_fresh_start(tokenizer: TextTokenizer, model_dir: Path, change: str) -> None:
    odd = load_tokenizer(model_dir)
    if change == "normalizer":
        odd.normalizer = normalizers.Strip()
    elif change == "split":
        odd.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        odd.add_tokens([AddedToken("<two words>", normalized=False)])
    assert not TextTokenizer(odd).is_restartable


def test_a_tokenizer_with_a_dummy_prefix_is_checked_whole() -> None:
    tokenizer = TextTokenizer(metaspace_tokenizer())
    base = tokenizer.encode("a b")
    good = tokenizer.encode("a b ab")[len(base) :]
    assert choose_cut(tokenizer, CutJob("a b", good, [" ab"], 0, 1)) == CutDecision(1, True, 1)


def test_boundaries_lie_behind_whole_characters() -> None:
    assert boundaries(["a", "", "", "é", ""], 1, 5) == [4, 1]
    assert cut_unchecked(CutJob("", [1, 2, 3], ["a", "b", ""], 0, 3)) == CutDecision(2, False, None)
    assert cut_unchecked(CutJob("", [1], [""], 0, 1)) == CutDecision(0, True, None)


def test_the_search_works_on_a_backends_tokenize_answers() -> None:
    """Both sides carry what the tokenizer adds by itself (here id 1)."""
    search = search_cut(CutJob("x", [8, 9], ["a", "b"], 1, 2), [1, 7])
    assert next(search) == "ab"
    assert search.send([1, 7, 89]) == "a"
    with pytest.raises(StopIteration) as stop:
        search.send([1, 7, 8])
    assert stop.value.value == CutDecision(1, True, 1)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version":"1.0"}')
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        TextTokenizer.load(path)
    with pytest.raises(OSError, match=r"missing\.json"):
        TextTokenizer.load(tmp_path / "missing.json")


def test_ends_of_text_are_read_from_beside_the_file(tmp_path: Path) -> None:
    metaspace_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer.load(tmp_path / "tokenizer.json").eos_ids == frozenset()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert TextTokenizer.load(tmp_path / "tokenizer.json").eos_ids == {5, 6}
