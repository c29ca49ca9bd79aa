"""A deterministic stand-in for a model: the next token is a function of a hash of all ids before it.

Whoever feeds the same ids gets the same continuation, however they were split between prompt and output, so a
generation cut into slices and resumed as text equals the uninterrupted one whenever the text tokenises back to its
own ids. Sampling adds noise from the seed and a counter that restarts with the request and whenever the batch
changes, as on TGI's flash models: a seed is not reproducible across a cut or under load.

The text is words of the vocabulary, now and then a digit, a comma, a line break, or a word of characters that take
several tokens (emoji, other alphabets). Every unit begins with a space and is checked to be the tokenizer's own
split; with ``noncanonical`` some are not (a word in two tokens, two line breaks in a row).

Bound by a grammar, it takes a word where any text may stand, else a character that may follow: of a few mostly one
that leads to more (so that an object has members and a tool is called), of many often the way to the nearest end.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from array import array
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from router_ext.devserver.codec import REPLACEMENT, Codec
from router_ext.devserver.engine import Guide, Sampled, Sequence

_PACK = struct.Struct("<I").pack
_NOISE = struct.Struct("<QI").pack
_LOGPROBS = tuple(round(math.log1p(-n / 66), 7) for n in range(64))
_UNITS = (
    " 😀",
    " 🎉",
    " 👩‍💻",
    " 日本",
    " 東京",
    " 한국",
    " café",
    " naïve",
    " Москва",
    " мир",
    " Ωμέγα",
    " مرحبا",
    " שלום",
    " ñandú",
)
_AFTER_WORD = (",", ".", "\n", ";", "3", "7", "0")
_MAX_WORDS = 4096
_FEW, _MANY = 8, 32  # first characters that may follow: a choice of structure, of a digit or letter, of any text
_NUMBER = re.compile(rb"[1-9][0-9]{0,4}")
_SPREAD = 0.3


@dataclass(slots=True)
class _State:
    """Hash of the ids so far, how many outputs it covers, and the noise counter.

    ``ends_at``: how many ids, prompt included, end the answer; None where chance ends it at every token.
    """

    crc: int
    outputs: int
    noise: int
    ends_at: int | None = None


class ModelEngine:
    """See the module. Costs about a microsecond per token; takes no time of its own (the driver adds step time).

    Args:
        mean_tokens: mean length of an answer; 0 never ends one.
        obeys_numbers: an answer is about as long as the first number in its chat prompt says, so that lengths can be
            told from prompts: off by a factor of e^0.3 (one standard deviation) that the prompt decides, the same
            however the answer is cut into slices. Without a number or chat markup ``mean_tokens`` holds.
        noncanonical: also emit splits that the tokenizer would not make itself.
        special_every: mean tokens between special tokens other than EOS; 0 makes none.
        seed: tells one fake model from another.
    """

    runs_in_thread = False

    def __init__(
        self,
        codec: Codec,
        *,
        eos_id: int,
        mean_tokens: int = 256,
        obeys_numbers: bool = False,
        noncanonical: bool = False,
        special_every: int = 0,
        seed: int = 0,
    ) -> None:
        self._codec = codec
        self._eos_id = eos_id
        self._mean_tokens = mean_tokens
        self._obeys_numbers = obeys_numbers
        self._noncanonical = noncanonical
        self._special_every = special_every
        self._special_id = max(codec.special - {eos_id})
        self._salt = zlib.crc32(_NOISE(seed & (2**64 - 1), 0)) if seed else 0
        self._states: dict[Sequence, _State] = {}
        self._continue: dict[tuple[int, ...], int] = {}
        self._longest = 0
        self._open: set[int] = set()
        units = self._verified_units(codec)
        if noncanonical:
            units += _split_words(codec, limit=64)
        starts = self._index_units(units)
        self._words = [i for i in _plain_words(codec) if i not in self._open]
        self._word_set = frozenset(self._words)
        self._starts = starts
        self._after = [codec.encode(text, add_special_tokens=False) for text in _AFTER_WORD]
        self._after_ids = [ids[0] for ids in self._after if len(ids) == 1]
        newline = codec.encode("\n", add_special_tokens=False)
        self._newline = newline[0] if len(newline) == 1 else -1

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset((self._eos_id,))

    def step(self, *, prefill: list[tuple[Sequence, int]], decode: list[Sequence]) -> list[Sampled]:
        out: list[Sampled] = []
        started = False
        for sequence, chunk in prefill:
            if sequence.prefilled + chunk >= len(sequence.prompt_ids):
                started = True
                out.append(self._first(sequence))
        if started and decode:
            for sequence in decode:
                self._states[sequence].noise = 0
        states, crc32 = self._states, zlib.crc32
        for sequence in decode:
            state = states[sequence]
            state.crc = crc32(_PACK(sequence.output_ids[-1]), state.crc)
            out.append(self._choose(sequence, state))
        return out

    def remove(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def _first(self, sequence: Sequence) -> Sampled:
        crc = zlib.crc32(array("I", [*sequence.prompt_ids, *sequence.output_ids]).tobytes(), self._salt)
        ends_at = self._asked(sequence.prompt_ids) if self._obeys_numbers else None
        state = self._states[sequence] = _State(crc, len(sequence.output_ids), 0, ends_at)
        sampled = self._choose(sequence, state)
        if not sequence.sampling.wants_prefill:
            return sampled
        logprobs = tuple(_LOGPROBS[i * 2654435761 >> 16 & 63] for i in sequence.prompt_ids[1:])
        return Sampled(sequence, sampled.token_id, sampled.logprob, sampled.top, logprobs)

    def _choose(self, sequence: Sequence, state: _State) -> Sampled:
        mixed = state.crc
        sampling = sequence.sampling
        if sampling.do_sample:
            mixed ^= zlib.crc32(_NOISE(sampling.seed & (2**64 - 1), state.noise))
            state.noise += 1
        mixed = mixed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
        logprob = _LOGPROBS[mixed >> 8 & 63]
        guide = sequence.guide
        if guide is not None and sequence.guide_state >= 0:
            ids, token = self._bound(guide, sequence.guide_state, mixed >> 20)
            sequence.guide_state = guide.next(sequence.guide_state, token)
            top = [token, *(i for i in ids if i != token)][: sampling.top_n_tokens]
            return Sampled(sequence, token, logprob, tuple((i, round(logprob - n * 0.5, 7)) for n, i in enumerate(top)))
        token = self._next(sequence, mixed, state.ends_at)
        if sampling.top_n_tokens:
            return Sampled(sequence, token, logprob, self._top(token, logprob, mixed, sampling.top_n_tokens))
        return Sampled(sequence, token, logprob)

    def _bound(self, guide: Guide, state: int, pick: int) -> tuple[Ids[int], int]:
        """(tokens to choose from, the chosen one) inside a grammar."""
        ids, nearest = guide.options(state)
        if len(ids) <= _FEW:
            first = self._codec.token_bytes[nearest][:1]
            longer = [i for i in ids if self._codec.token_bytes[i][:1] != first]
            chosen = longer if longer and pick & 7 else ids
            return ids, chosen[(pick >> 3) % len(chosen)]
        if pick & (3 if len(ids) > _MANY else 1) == 0:
            return ids, nearest
        pick >>= 2
        if len(ids) > _MANY:
            word = self._words[pick % len(self._words)]
            if guide.next(state, word) >= 0:
                return ids, word
        return ids, ids[pick % len(ids)]

    def _asked(self, prompt_ids: list[int]) -> int | None:
        """Where the answer ends that the prompt asks for. It begins after the prompt's last special token."""
        special = self._codec.special
        start = next((i + 1 for i in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[i] in special), 0)
        number = _NUMBER.search(b"".join(self._codec.token_bytes[i] for i in prompt_ids[:start]))
        if number is None:
            return None
        crc = zlib.crc32(array("I", prompt_ids[:start]).tobytes(), self._salt)
        # The sum of four even draws, centred and scaled: as good as normal.
        chance = (sum(crc.to_bytes(4, "little")) / 255 - 2.0) * math.sqrt(3.0)
        return start + max(1, round(int(number[0]) * math.exp(_SPREAD * chance)))

    def _next(self, sequence: Sequence, mixed: int, ends_at: int | None) -> int:
        output = sequence.output_ids
        last = output[-1] if output else sequence.prompt_ids[-1]
        if last in self._open:
            found = self._continued(sequence)
            if found is not None:
                return found
        if ends_at is not None:
            if len(sequence.prompt_ids) + len(output) >= ends_at:
                return self._eos_id
        elif self._mean_tokens and mixed % self._mean_tokens == 0:
            return self._eos_id
        pick = mixed >> 20
        if self._special_every and pick % self._special_every == 0:
            return self._special_id
        if last in self._word_set and pick & 7 == 0:
            return self._after_ids[(pick >> 3) % len(self._after_ids)]
        if self._noncanonical and last == self._newline and pick & 3 == 1:
            return self._newline
        if pick & 15 == 7 and self._starts:
            return self._starts[(pick >> 4) % len(self._starts)]
        return self._words[(pick >> 4) % len(self._words)]

    def _continued(self, sequence: Sequence) -> int | None:
        """The rest of a unit that has begun, if the last ids are the beginning of one."""
        output = sequence.output_ids
        tail = output[-self._longest :]
        if len(tail) < self._longest:
            tail = sequence.prompt_ids[len(tail) - self._longest :] + tail
        for length in range(min(self._longest, len(tail)), 0, -1):
            found = self._continue.get(tuple(tail[-length:]))
            if found is not None:
                return found
        return None

    def _top(self, token: int, logprob: float, mixed: int, count: int) -> tuple[tuple[int, float], ...]:
        others = (self._words[(mixed >> (4 * n)) % len(self._words)] for n in range(1, 16))
        ids = list(dict.fromkeys([token, *others]))[:count]
        return tuple((i, round(logprob - n * 0.5, 7)) for n, i in enumerate(ids))

    def _verified_units(self, codec: Codec) -> list[list[int]]:
        """Units of several tokens whose every character-complete beginning is the tokenizer's own split."""
        units = []
        for text in _UNITS:
            ids = codec.encode(text, add_special_tokens=False)
            prefixes = [ids[:n] for n in range(1, len(ids) + 1)]
            if len(ids) > 1 and all(_is_own_split(codec, prefix) for prefix in prefixes):
                units.append(ids)
        return units

    def _index_units(self, units: list[list[int]]) -> list[int]:
        """Fill the table of continuations; a unit that would contradict an earlier one is left out."""
        starts = []
        for ids in units:
            steps = {tuple(ids[:n]): ids[n] for n in range(1, len(ids))}
            if any(self._continue.get(prefix, then) != then for prefix, then in steps.items()):
                continue
            self._continue.update(steps)
            starts.append(ids[0])
            self._open.update(prefix[-1] for prefix in steps)
            self._longest = max(self._longest, len(ids) - 1)
        return sorted(set(starts))


def _is_own_split(codec: Codec, ids: list[int]) -> bool:
    """True if the ids' text tokenises back to them, or ends inside a character and is never shown."""
    text = b"".join(codec.token_bytes[i] for i in ids).decode("utf-8", "replace")
    return text.endswith(REPLACEMENT) or codec.encode("a" + text, add_special_tokens=False)[1:] == ids


def _plain_words(codec: Codec) -> list[int]:
    """Tokens that are a space and at least two lower-case ASCII letters."""
    words = []
    for i, text in enumerate(codec.token_text):
        if text and text[0] == " " and len(text) > 2 and text[1:].isascii() and text[1:].isalpha() and text.islower():
            words.append(i)
            if len(words) == _MAX_WORDS:
                break
    return [i for i in words if codec.encode(codec.token_text[i] or "", add_special_tokens=False) == [i]]


def _split_words(codec: Codec, *, limit: int) -> list[list[int]]:
    """Words in two tokens that the tokenizer would make one."""
    by_text = {text: i for i, text in enumerate(codec.token_text) if text}
    found: list[list[int]] = []
    heads: set[int] = set()
    for i in _plain_words(codec):
        text = codec.token_text[i] or ""
        for cut in range(2, len(text)):
            head, tail = by_text.get(text[:cut]), by_text.get(text[cut:])
            if head is not None and tail is not None and head not in heads:
                heads.add(head)
                found.append([head, tail])
                break
        if len(found) == limit:
            break
    return found
