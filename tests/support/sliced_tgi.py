"""A TGI server reduced to what slicing can see, and the client's side of one generation.

An oracle: it follows TGI's own code (streaming detokenisation with its two offsets, the order of the stopping
criteria, text with special tokens skipped) and imports nothing of the router.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tokenizers import Tokenizer

NextToken = Callable[[Sequence[int]], int]


def scripted_model(script: Sequence[int], palette: Sequence[int]) -> NextToken:
    """Deterministic: follows ``script`` (prompt and answer ids) while the input agrees with it, else goes astray.

    One id off anywhere, and everything after it differs: a wrong cut cannot hide.
    """
    script = list(script)

    def next_token(ids: Sequence[int]) -> int:
        if len(ids) < len(script) and script[: len(ids)] == list(ids):
            return script[len(ids)]
        digest = blake2b(repr(list(ids)).encode(), digest_size=4).digest()
        return palette[int.from_bytes(digest, "big") % len(palette)]

    return next_token


class SlicedTgi:
    """Answers bodies of ``/generate_stream`` with the payloads of their events."""

    def __init__(self, tokenizer: Tokenizer, next_token: NextToken, eos_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.next_token = next_token
        self.eos_ids = eos_ids
        self.requests: list[dict[str, Any]] = []

    def _decode(self, ids: Sequence[int], *, skip: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip)

    def _difference(self, ids: Sequence[int], prefix: int, read: int, *, skip: bool = False) -> str:
        before, after = self._decode(ids[prefix:read], skip=skip), self._decode(ids[prefix:], skip=skip)
        return (
            after[len(before) :] if len(after) > len(before) and not after.endswith("\N{REPLACEMENT CHARACTER}") else ""
        )

    def answer(self, body: bytes) -> list[bytes]:
        request = json.loads(body)
        self.requests.append(request)
        parameters = request["parameters"]
        limit = parameters["max_new_tokens"]
        stops: list[str] = parameters.get("stop", [])
        ids: list[int] = self.tokenizer.encode(request["inputs"]).ids
        if parameters.get("truncate"):
            ids = ids[-parameters["truncate"] :]
        input_length = len(ids)
        prefix, read = max(input_length - 5, 0), input_length
        special = self.tokenizer.get_added_tokens_decoder()
        buffer, payloads = "", []
        for count in range(1, limit + 1):
            token = self.next_token(ids)
            ids.append(token)
            text = self._difference(ids, prefix, read)
            if text:
                prefix, read = read, len(ids)
            reason = None
            if count >= limit:
                reason = "length"
            elif token in self.eos_ids:
                reason = "eos_token"
            else:
                buffer += text
                if any(buffer.endswith(s) or (buffer.endswith("\n") and buffer[:-1].endswith(s)) for s in stops):
                    reason = "stop_sequence"
            event: dict[str, Any] = {
                "index": count,
                "token": {
                    "id": token,
                    "text": text,
                    "logprob": -0.25 * (token % 7) - 0.1,
                    "special": token in special and special[token].special,
                },
                "generated_text": None,
                "details": None,
            }
            if reason is not None:
                event["generated_text"] = self._difference(ids, len(ids) - count - 1, len(ids) - count, skip=True)
                event["details"] = {
                    "finish_reason": reason,
                    "generated_tokens": count,
                    "seed": parameters.get("seed"),
                    "input_length": input_length,
                }
            payloads.append(json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())
            if reason is not None:
                break
        return payloads


@dataclass
class Seen:
    """What one client was shown: (index, id, text, special) of every token, and the end."""

    tokens: list[tuple[int, int, str, bool]] = field(default_factory=list)
    finish_reason: str = ""
    generated_text: str = ""
    output_tokens: int = 0
    prompt_tokens: int = 0

    @classmethod
    def streamed(cls, payloads: Sequence[bytes]) -> Seen:
        """Read off a stream of ``/generate_stream``: only its last event may carry an end.

        TGI loses the text of an answer that ends inside a character; the tokens' own texts stand for it then.
        """
        seen = cls()
        event: dict[str, Any] = {}
        for payload in payloads:
            assert not event or event["details"] is event["generated_text"] is None, "an end in the middle"
            event = json.loads(payload)
            token = event["token"]
            seen.tokens.append((event["index"], token["id"], token["text"], token["special"]))
        details = event["details"]
        seen.finish_reason = details["finish_reason"]
        seen.output_tokens = details["generated_tokens"]
        seen.prompt_tokens = details["input_length"]
        plain = "".join(text for _, _, text, special in seen.tokens if not special)
        seen.generated_text = event["generated_text"] or plain
        return seen
