"""Where a slice may end: the last place whose text re-tokenises to the ids that were sampled.

A continuation is sent upstream as text, so the backend re-tokenises everything generated so far. Sampled sequences are
not always the tokenizer's own split of their text (two newline tokens that would be one, a word sampled in odd
pieces). ``choose_cut`` finds the last boundary where they are; behind it the tokens are dropped and generated again.

    tokenizer = TextTokenizer.load(path)                     # once per pool
    decision = await asyncio.to_thread(choose_cut, tokenizer, continuation.cut_job())

Without a tokenizer file, drive ``search_cut`` with one ``/tokenize`` call per yielded text.

Source: measured on a running TGI (``tests/conformance/transcripts/resume.jsonl``): the one answer of 60 that came out
otherwise than unsliced is the one whose cuts fail this check.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_PATTERNS = frozenset(
    {
        # GPT-2's, Llama 3's and Qwen 2's pre-tokenisation. None of their alternatives goes from a character that is
        # not white space to a space, so that place always is a split, whatever stands to its left.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        _CONTRACTIONS + "|" + _WORDS + r"|\p{N}{1,3}|" + _REST,
        _CONTRACTIONS + "|" + _WORDS + r"|\p{N}|" + _REST,
    }
)


@dataclass(frozen=True, slots=True)
class CutJob:
    """One slice to be cut. ``base_text`` is what was sent upstream as ``inputs`` (all of it, before truncation).

    Attributes:
        ids, texts: the slice's tokens in order.
        lowest: tokens already shown to the client; the cut may not lie before them.
        highest: last boundary to be considered (it may exclude a token that could be an unknown end of text).
    """

    base_text: str
    ids: Sequence[int]
    texts: Sequence[str]
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class CutDecision:
    """Keep the first ``kept`` tokens of the slice.

    ``is_exact``: the kept text re-tokenises to the kept ids. ``text_tokens``: how many tokens the kept text has when
    tokenised again behind its base (equal to ``kept`` if exact), None if nobody tokenised it.
    """

    kept: int
    is_exact: bool
    text_tokens: int | None


def boundaries(texts: Sequence[str], lowest: int, highest: int) -> list[int]:
    """Cut places from the last to the first: behind a token with text (no character pending), and ``lowest``."""
    places = [place for place in range(highest, lowest, -1) if texts[place - 1]]
    places.append(lowest)
    return places


def search_cut(job: CutJob, base_ids: Sequence[int]) -> Generator[str, Sequence[int], CutDecision]:
    """The search itself: yields a continuation text, wants the ids of base and that text, returns the decision.

    ``base_ids`` and the ids sent in are of the same kind (both with, or both without what the tokenizer adds itself).
    """
    base = list(base_ids)
    fallback: CutDecision | None = None
    for place in boundaries(job.texts, job.lowest, job.highest):
        if place == 0:
            # Nothing kept is always exact, but no progress: only when there is no other place.
            return fallback or CutDecision(0, True, 0)
        ids = yield "".join(job.texts[:place])
        if list(ids) == [*base, *job.ids[:place]]:
            return CutDecision(place, True, place)
        if fallback is None:
            fallback = CutDecision(place, False, max(len(ids) - len(base), 0))
    assert fallback is not None
    return fallback


def cut_unchecked(job: CutJob) -> CutDecision:
    """The last complete boundary, for pools where nobody can tokenise: never called exact."""
    place = boundaries(job.texts, job.lowest, job.highest)[0]
    return CutDecision(place, place == 0, None)


def choose_cut(tokenizer: TextTokenizer, job: CutJob) -> CutDecision:
    """Search with a local tokenizer. Usually one encoding of a few hundred tokens; call it in a worker thread."""
    start = tokenizer.safe_start(job.base_text)
    tail = job.base_text[start:]
    encode: Callable[[str], list[int]] = tokenizer.encode_tail if start else tokenizer.encode
    search = search_cut(job, encode(tail))
    try:
        text = next(search)
        while True:
            text = search.send(encode(tail + text))
    except StopIteration as stop:
        decision: CutDecision = stop.value
        return decision


class TextTokenizer:
    """A pool's ``tokenizer.json``: counts, ids, and where encoding may start afresh.

    Attributes:
        added_ids: ids of added tokens; an end-of-text token is always among them.
        eos_ids: end-of-text ids told by ``generation_config.json`` or ``config.json`` beside the file.
        vocabulary: number of its tokens, added ones included.
        is_restartable: every place between a non-space and a space is a split, so encoding may start there.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        description = json.loads(tokenizer.to_str())
        self.added_ids = frozenset(int(item["id"]) for item in description.get("added_tokens") or ())
        self.eos_ids = eos_ids
        self.vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        self.is_restartable = _is_restartable(description)

    @classmethod
    def load(cls, path: str | Path) -> TextTokenizer:
        """From a ``tokenizer.json``.

        Raises:
            OSError, ValueError: not readable, or not a tokenizer.
        """
        path = Path(path)
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path}: not a tokenizer.json ({error})") from error
        return cls(tokenizer, _read_eos_ids(path.parent))

    def encode(self, text: str) -> list[int]:
        """Ids as TGI counts a prompt: with what the tokenizer adds by itself."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def encode_tail(self, text: str) -> list[int]:
        """Ids of a text that goes on from something: nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def safe_start(self, text: str) -> int:
        """Largest offset from which encoding gives the same ids as in the whole; 0 if there is none."""
        if not self.is_restartable:
            return 0
        place = text.rfind(" ")
        while place > 0:
            if not text[place - 1].isspace():
                return place
            place = text.rfind(" ", 0, place)
        return 0


def _is_restartable(description: dict[str, object]) -> bool:
    """Byte-level BPE with a known split pattern, and no added token that reaches across such a place."""
    model = description.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("dropout"):
        return False
    normalizer = description.get("normalizer")
    if normalizer is not None and not (isinstance(normalizer, dict) and normalizer.get("type") in ("NFC", "NFD")):
        return False
    tokens = description.get("added_tokens")
    for token in tokens if isinstance(tokens, list) else ():
        content = token["content"]
        crosses = any(not a.isspace() and b == " " for a, b in itertools.pairwise(content))
        if crosses or token.get("rstrip") or token.get("single_word"):
            return False
    splitters = description.get("pre_tokenizer")
    if not isinstance(splitters, dict):
        return False
    parts = splitters["pretokenizers"] if splitters.get("type") == "Sequence" else [splitters]
    is_split = False
    for part in parts:
        match part:
            case {"type": "ByteLevel", "add_prefix_space": False, **rest}:
                is_split = is_split or bool(rest.get("use_regex", True))
            case {"type": "Digits"}:
                pass
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                if pattern not in _SPLIT_PATTERNS:
                    return False
                is_split = True
            case _:
                return False
    return is_split


def _read_eos_ids(folder: Path) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool):
                ids.add(item)
    return frozenset(ids)
