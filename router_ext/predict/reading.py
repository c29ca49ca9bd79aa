"""A prompt, read once: its start and end, and their words as hashes. What features and signatures are made from.

    prompt --bound--> head + tail --lower case, split at blanks--> chunks --cached--> words, 3 hashes each

Cost: bounded by ``HEAD_CHARS`` + ``TAIL_CHARS`` whatever the length: 0.05 ms for a page of chunks seen before, 2 us
more for each that was not.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.prompts import Prompt

HEAD_CHARS, TAIL_CHARS = 2_048, 1_024
"""What a request asks for stands at its start or at its end; the middle is material."""

_WORDS = re.compile(r"[^\W\d_]+|\d+|\n+|[^\w\s]|_")


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one prompt. ``seen``: head and tail. ``lower``: the same in lower case. ``hashes``: [words, 3] uint32, of each
    word and of its first four and six letters (0 where it has no more), a line's end between head and tail."""

    prompt: Prompt
    seen: str
    lower: str
    hashes: NDArray[np.uint32]


def read(prompt: Prompt) -> Reading:
    """Read a prompt."""
    head, tail = _bounded(prompt)
    lower_head = head.lower()
    chunks = lower_head.split(" ")
    lower_tail = ""
    if tail:
        lower_tail = tail.lower()
        chunks.append("\n")
        chunks += lower_tail.split(" ")
    hashes = np.frombuffer(b"".join(map(_chunks.__getitem__, chunks)), np.uint32).reshape(-1, 3)
    return Reading(prompt, head + tail, lower_head + lower_tail, hashes)


def _bounded(prompt: Prompt) -> tuple[str, str]:
    """Start and end of a prompt, the turns of a chat one after the other. The end is empty where the start is all."""
    if isinstance(prompt, str):
        text = prompt
    else:
        texts = [text for _, text in prompt]
        if sum(map(len, texts)) > 4 * (HEAD_CHARS + TAIL_CHARS):
            texts = _outer(texts)
        text = "\n".join(texts)
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text, ""
    return text[:HEAD_CHARS], text[-TAIL_CHARS:]


def _outer(texts: list[str]) -> list[str]:
    """The turns that head and tail can reach; the rest of a long chat is never joined."""
    first, n = 0, 0
    while first < len(texts) and n <= HEAD_CHARS:
        n += len(texts[first])
        first += 1
    last, n = len(texts), 0
    while last > first and n <= TAIL_CHARS:
        last -= 1
        n += len(texts[last])
    return texts[:first] + texts[last:]


class _Chunks(dict[str, bytes]):
    """Hashes of the words of what stands between two blanks, by its text. Those not used for longest are forgotten, in
    halves: a dictionary that is full becomes the old one, of which only what is asked for again is kept."""

    _LONGEST, _MOST = 24, 8_192
    """Characters; entries, of some 250 bytes at most each."""

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[str, bytes] = {}

    def __missing__(self, chunk: str) -> bytes:
        hashes = self._old.get(chunk)
        if hashes is None:
            hashes = b"".join(map(_word, _WORDS.findall(chunk)))
        if len(chunk) <= self._LONGEST:
            if len(self) >= self._MOST:
                self._old = dict(self)
                self.clear()
            self[chunk] = hashes
        return hashes


_chunks = _Chunks()
_pack = struct.Struct("=3I").pack


def _word(word: str) -> bytes:
    """Hashes of a word and of its stems, 3 x uint32."""
    n = len(word)
    if n <= 4:
        return _pack(zlib.crc32(word.encode("utf-8", "replace")), 0, 0)
    four = zlib.crc32(b"4" + word[:4].encode("utf-8", "replace"))
    six = zlib.crc32(b"6" + word[:6].encode("utf-8", "replace")) if n > 6 else 0
    return _pack(zlib.crc32(word.encode("utf-8", "replace")), four, six)
