"""Between text and token ids: encoding for prompts, bytes and JSON of single tokens for streams.

A byte-level vocabulary is a table: every id stands for fixed bytes, so a stream is decoded by appending bytes
instead of decoding a window of ids twice per token, as TGI's shard does with the same result.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import orjson
from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019), byte-level BPE.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)})
    return table


class Codec:
    """A byte-level tokenizer with everything a stream needs looked up beforehand.

    Attributes:
        token_bytes: bytes of each id; special tokens as their own spelling.
        token_text: text of each id that is whole by itself, else None.
        special: ids that decoding with ``skip_special_tokens`` leaves out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        alphabet = byte_alphabet()
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.token_bytes: list[bytes] = []
        self.token_text: list[str | None] = []
        for i in range(size):
            token = tokenizer.id_to_token(i) or ""
            if i in added or any(c not in alphabet for c in token):
                raw = token.encode()
            else:
                raw = bytes(alphabet[c] for c in token)
            self.token_bytes.append(raw)
            self.token_text.append(_whole(raw))
        self._json: list[bytes | None] = [None] * size
        self.size = size

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. Releases the interpreter lock while it works."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def spans(self, text: str, *, add_special_tokens: bool) -> list[dict[str, Any]]:
        """Tokens as ``/tokenize`` lists them; ``start`` and ``stop`` are byte offsets into ``text``."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        offsets = _byte_offsets(text)
        return [
            {"id": i, "text": text[start:stop], "start": offsets[start], "stop": offsets[stop]}
            for i, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def token_json(self, token_id: int) -> bytes:
        """``"id":7,"text":" word"`` of a token whose text is whole."""
        found = self._json[token_id]
        if found is None:
            found = self._json[token_id] = b'"id":%d,"text":%b' % (
                token_id,
                orjson.dumps(self.token_text[token_id] or ""),
            )
        return found

    def text_of(self, token_id: int) -> str:
        """A token's text by itself, bytes that are no character as U+FFFD."""
        return self.token_bytes[token_id].decode("utf-8", "replace")

    def generated_text(self, ids: Iterable[int]) -> str:
        """The whole output without special tokens; empty if it ends inside a character, as in TGI."""
        raw = b"".join(self.token_bytes[i] for i in ids if i not in self.special)
        text = raw.decode("utf-8", "replace")
        return "" if text.endswith(REPLACEMENT) else text


def _whole(raw: bytes) -> str | None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text if text and not text.endswith(REPLACEMENT) else None


def _byte_offsets(text: str) -> Any:
    if text.isascii():
        return range(len(text) + 1)
    offsets = [0]
    for character in text:
        offsets.append(offsets[-1] + len(character.encode("utf-8", "surrogatepass")))
    return offsets
