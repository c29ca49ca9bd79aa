"""What a prompt says about the length of its answer: bounded, hashed, without its text.

    prompt --bound--> head + tail --+-- dense: counts and shares, ``DENSE`` names them
                                    `-- ids, counts: hashed words, word pairs, stems, first and last words

Training and serving both go through ``extract``; ``FEATURE_VERSION`` is stored with every sample and every model, and
changes with anything here that changes a number.

Privacy: 16-bit hashes of single words and pairs, at most ``MAX_IDS`` of them without order. They cannot be turned back
into the text, though somebody who guesses a word can test for it with one chance in a few hundred of being wrong.
Signatures are 64-bit and keyed: who does not have the router's key cannot even test a guess.

Cost: bounded as ``reading`` is whatever the length, 0.03 ms for a line and 0.06 for a page, signatures 0.02; naming the
whole text costs 0.2 us per 1,000 characters more.
"""

from __future__ import annotations

import hashlib
import math
import string
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router_ext.errors import FeaturesRefused
from router_ext.predict.numbers_named import NO_NUMBERS, numbers_of
from router_ext.predict.prompts import Prompt
from router_ext.predict.reading import Reading, read
from router_ext.predict.versions import FEATURE_VERSION

__all__ = ("DENSE", "FEATURE_VERSION", "Features", "Prompt", "RequestFacts", "Signatures", "Signer", "extract")

ID_BITS = 16
MAX_IDS = 256
"""Half of real prompts have fewer than 230; of the others a sample by hash is kept, the same for similar prompts."""

_CUES = (
    "```", "json", "code", "function", "write", "list", "essay", "story", "explain", "summar", "translate", "step",
    "word", "paragraph", "short", "brief", "detail", "table", "example", "def ", "class ", "for ", "while ", "return",
    "poem", "python", "how", "what", "why", "which", "create", "design", "article", "answer", "reason", "compare",
)  # fmt: skip
_COUNTED = ("\n", "?", ".", ",", "(", "[", "{", "\\", "$", "^", "=", "'", '"', ":", "/", "%", "#", "-", "*", "    ")
_FACTS = (
    "log_limit", "has_limit", "temperature", "is_greedy", "top_p", "log_top_k", "typical_p", "repetition_penalty",
    "has_stop", "is_chat",
)  # fmt: skip
_OF_PROMPT = (
    "chars", "words", "turns", "has_system", "last_turn_chars", "digits", "capitals", "non_ascii", "beyond_latin",
    "numbers", "largest_number", "word_length", "distinct_words", "asked_tokens", "asked_items",
    *(f"cue_{cue.strip()}" for cue in _CUES),
    *(f"count_{ord(mark[0])}_{len(mark)}" for mark in _COUNTED),
)  # fmt: skip
DENSE: tuple[str, ...] = (*_FACTS, *_OF_PROMPT)
"""Names of the dense features. Counts are ln(1 + n); shares are of the characters looked at."""
N_FACTS = len(_FACTS)

_HEADER = struct.Struct("<BBHHH")
_MAGIC = 0xF1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What a request says beside its prompt.

    Numbers are None where the client stated none.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    is_greedy: bool = False
    has_stop: bool = False
    is_chat: bool = False

    def numbers(self) -> tuple[float, ...]:
        """As dense features, ``N_FACTS`` of them."""
        limit = self.max_new_tokens
        temperature = 0.0 if self.is_greedy else _within(self.temperature, 2.0)
        return (
            math.log(min(max(limit, 1), 1 << 20)) if limit else 0.0,
            float(bool(limit)),
            temperature,
            float(self.is_greedy),
            _within(self.top_p, 1.0),
            math.log1p(min(max(self.top_k, 0), 1 << 20)) if self.top_k is not None else _NOT_STATED,
            _within(self.typical_p, 1.0),
            _within(self.repetition_penalty, 2.0),
            float(self.has_stop),
            float(self.is_chat),
        )


_NOT_STATED = -1.0


def _within(value: float | None, highest: float) -> float:
    return _NOT_STATED if value is None or not math.isfinite(value) else min(max(value, 0.0), highest)


@dataclass(frozen=True, slots=True)
class Features:
    """Of one request.

    Shape: ``dense`` [len(DENSE)] float32, each exact in float16; ``ids`` [n <= MAX_IDS] uint16, rising;
    ``counts`` [n] uint8, at least 1.
    """

    dense: NDArray[np.float32]
    ids: NDArray[np.uint16]
    counts: NDArray[np.uint8]

    def pack(self) -> bytes:
        """At most 950 bytes, little-endian: header, dense as float16, ids, counts."""
        head = _HEADER.pack(_MAGIC, FEATURE_VERSION, len(self.dense), len(self.ids), 0)
        return b"".join(
            (head, self.dense.astype("<f2").tobytes(), self.ids.astype("<u2").tobytes(), self.counts.tobytes())
        )

    @classmethod
    def unpack(cls, data: bytes) -> Features:
        """Raises:
        FeaturesRefused: damaged, or of another ``FEATURE_VERSION``.
        """
        if len(data) < _HEADER.size:
            raise FeaturesRefused(f"{len(data)} bytes are no features")
        magic, version, n_dense, n_ids, _ = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != FEATURE_VERSION or n_dense != len(DENSE):
            raise FeaturesRefused(f"features of version {version} with {n_dense} numbers, not {FEATURE_VERSION}")
        if n_ids > MAX_IDS or len(data) != _HEADER.size + 2 * n_dense + 3 * n_ids:
            raise FeaturesRefused(f"{len(data)} bytes do not hold {n_ids} ids")
        dense = np.frombuffer(data, "<f2", n_dense, _HEADER.size).astype(np.float32)
        ids = np.frombuffer(data, "<u2", n_ids, _HEADER.size + 2 * n_dense).astype(np.uint16)
        counts = np.frombuffer(data, np.uint8, n_ids, _HEADER.size + 2 * n_dense + 2 * n_ids)
        if not np.isfinite(dense).all() or (np.diff(ids.astype(np.int32)) <= 0).any() or (counts == 0).any():
            raise FeaturesRefused("features with numbers that no prompt has")
        return cls(dense, ids, counts)


@dataclass(frozen=True, slots=True)
class Signatures:
    """Keyed names of a prompt in the router's memory, 64 bits each.

    ``exact`` is equal for equal prompts, and differs for others unless they were made to have one checksum. ``near``:
    prompts whose word pairs agree to a share s have one of the four in common with probability
    1 - (1 - s**6)**4: 0.98 at 0.95, 0.86 at 0.85, 0.06 at 0.5.
    """

    exact: int
    near: tuple[int, ...]


class Signer:
    """Makes signatures under a key that stays in the router.

    Source: Broder, On the resemblance and containment of documents (1997), with bands.
    """

    _BANDS, _ROWS = 4, 6

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.blake2b(key, digest_size=32).digest()
        words = hashlib.shake_128(self._key + b"near").digest(8 * self._BANDS * self._ROWS)
        numbers = np.frombuffer(words, "<u4").reshape(2, -1)
        self._multiplier = (numbers[0] | np.uint32(1))[:, None]
        self._addend = numbers[1][:, None]

    def sign(self, prompt: Prompt) -> Signatures:
        """Signatures of a prompt."""
        return self.of(read(prompt))

    def of(self, reading: Reading) -> Signatures:
        """Signatures of a prompt that is read already. Cost: 0.02 ms for a page."""
        exact = hashlib.blake2b(key=self._key, digest_size=8)
        prompt = reading.prompt
        whole = prompt if isinstance(prompt, str) else "".join([f"\x00{role}\x01{text}" for role, text in prompt])
        data = whole.encode("utf-8", "surrogatepass")
        # Beside start and end a checksum stands for the text, in a fifth of the time. Who makes up two prompts with the
        # same one confuses the memory of nobody but himself.
        exact.update(struct.pack("<QI", len(data), zlib.crc32(data)))
        exact.update(reading.seen.encode("utf-8", "surrogatepass"))
        pairs = _pairs(reading.words)
        near: tuple[int, ...] = ()
        if len(pairs):
            mixed = (pairs * _GOLDEN >> np.uint64(32)).astype(np.uint32) * self._multiplier
            mixed += self._addend
            rows = mixed.min(axis=1).astype("<u4").reshape(self._BANDS, self._ROWS)
            near = tuple(
                _number(hashlib.blake2b(rows[band].tobytes(), key=self._key, digest_size=8, salt=bytes([band])))
                for band in range(self._BANDS)
            )
        return Signatures(_number(exact), near)


def _number(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "little")


def extract(prompt: Prompt, facts: RequestFacts) -> Features:
    """Features of a request: its facts, the lengths of its prompt, and the prompt's start and end."""
    return features_of(read(prompt), facts)


def features_of(reading: Reading, facts: RequestFacts) -> Features:
    """The same of a prompt that is read already."""
    ids, counts, n_distinct = _hashed(reading)
    dense = _dense(reading, facts, n_distinct)
    return Features(dense.astype(np.float16).astype(np.float32), ids, counts)


def _pairs(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return words[:-1] * np.uint64(0x9E3779B1) + words[1:] * np.uint64(0x85EBCA6B) + np.uint64(1)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PLACES = np.arange(1, 5, dtype=np.uint64) << np.uint64(34)


def _hashed(reading: Reading) -> tuple[NDArray[np.uint16], NDArray[np.uint8], int]:
    """Ids and counts, and how many of the words differ."""
    words = reading.words
    n = len(words)
    if not n:
        return np.zeros(0, np.uint16), np.zeros(0, np.uint8), 0
    everything = np.concatenate(
        (
            words,
            _pairs(words),
            reading.stems,
            words[:4] + _PLACES[:n],
            words[:12] + np.uint64(5 << 34),
            words[-12:] + np.uint64(6 << 34),
        )
    )
    everything *= _GOLDEN
    everything >>= np.uint64(64 - ID_BITS)
    all_ids = everything.astype(np.uint16)
    own = np.sort(all_ids[:n])
    n_distinct = 1 + int(np.count_nonzero(own[1:] != own[:-1]))
    ids, counts = _counted(all_ids)
    if len(ids) > MAX_IDS:
        # The multiplication by an odd number permutes: which ids are kept does not depend on the others.
        kept = np.sort(np.argsort(ids * np.uint16(40_503), kind="stable")[:MAX_IDS])
        ids, counts = ids[kept], counts[kept]
    return ids, np.minimum(counts, 255).astype(np.uint8), n_distinct


def _counted(ids: NDArray[np.uint16]) -> tuple[NDArray[np.uint16], NDArray[np.intp]]:
    """Distinct ones, rising, and how often each is there; as ``numpy.unique``, in half the time."""
    ids.sort()
    starts = np.flatnonzero(ids[1:] != ids[:-1])
    starts += 1
    bounds = np.concatenate((_ZERO, starts, np.array((len(ids),))))
    return ids[bounds[:-1]], bounds[1:] - bounds[:-1]


_ZERO = np.zeros(1, np.intp)


def _dense(reading: Reading, facts: RequestFacts, n_distinct: int) -> NDArray[np.float64]:
    """``DENSE``, in its order."""
    prompt, seen, lower, points = reading.prompt, reading.seen, reading.lower, reading.points
    if isinstance(prompt, str):
        n_chars = n_last = len(prompt)
        n_turns, has_system = 1, False
    else:
        n_chars, n_turns = sum(len(text) for _, text in prompt), len(prompt)
        n_last = len(prompt[-1][1]) if prompt else 0
        has_system = bool(prompt) and prompt[0][0] == "system"
    n, n_words = max(1, len(seen)), max(1, len(reading.words))
    data = seen.encode("utf-8", "surrogatepass")
    n_capitals = len(data) - len(data.translate(None, _CAPITALS))
    of: NDArray[np.intp]
    if points.itemsize == 1:
        of = np.bincount(points, minlength=128)
        beyond_ascii = beyond_latin = 0
    else:
        of = np.bincount(np.minimum(points, 128), minlength=129)
        beyond_ascii, beyond_latin = int(of[128]), int(np.count_nonzero(points > 0x24F))
    numbers = numbers_of(lower, reading.digits) if len(reading.digits) else NO_NUMBERS
    log = math.log1p
    values = np.empty(len(DENSE))
    values[:_FIRST_COUNT] = (
        *facts.numbers(),
        *(log(n_chars), log(len(reading.words)), log(max(0, n_turns - 1)), log(has_system), log(n_last)),
        *(int(of[48:58].sum()) / n, n_capitals / n, beyond_ascii / n, beyond_latin / n),
        *(log(numbers.n), log(numbers.largest), n / n_words / 10.0, n_distinct / n_words),
        *(log(numbers.asked_tokens), log(numbers.asked_items)),
    )
    counts = values[_FIRST_COUNT:]
    counts[: len(_CUES)] = list(map(lower.count, _CUES))
    values[-len(_COUNTED) : -1] = of[_MARKS]
    values[-1] = lower.count(_COUNTED[-1])
    np.log1p(counts, out=counts)
    return values


_FIRST_COUNT = DENSE.index(f"cue_{_CUES[0]}")
_MARKS = np.array([ord(mark) for mark in _COUNTED[:-1]])
_CAPITALS = string.ascii_uppercase.encode()
