"""Requests in every dialect that a model server and a router are asked alike, and what of their answers is compared."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from support.exchange import call, events

WINDOW = 4
"""Tokens of a stop string: with slices of eight, some cut is inside it."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        return self.path == "/generate_stream" or bool(self.body.get("stream"))

    def stopped(self, port: int) -> list[Question]:
        """The same with a stop string of several tokens that its answer holds; none if that is too short."""
        pieces = [_piece(event) for event in events(ask(port, self))]
        for end in range(10, len(pieces)):
            window = pieces[end - WINDOW : end]
            if all(window) and "\N{REPLACEMENT CHARACTER}" not in "".join(window):
                # From inside a token on, and not only this answer's own words.
                stop = ["".join(window)[1:], "no answer says this"]
                body = dict(self.body)
                if "parameters" in body:
                    body["parameters"] = {**body["parameters"], "stop": stop}
                else:
                    body["stop"] = stop
                return [Question(f"{self.name}, stopped", self.path, body)]
        return []


def _piece(event: Any) -> str:
    if event == "[DONE]":
        return ""
    if "token" in event:
        return str(event["token"]["text"])
    if not event["choices"]:
        return ""
    choice = event["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def questions(prompt: str, tokens: int) -> list[Question]:
    """One prompt in every dialect, greedily, with all that can be asked of its tokens; a stream first in each."""
    native = {"max_new_tokens": tokens, "do_sample": False, "details": True, "top_n_tokens": 2}
    chat = {
        "model": "tgi",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    told = {"logprobs": True, "top_logprobs": 2}
    text = {"model": "tgi", "max_tokens": tokens, "temperature": 0}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return [
        Question("native stream", "/generate_stream", {"inputs": prompt, "parameters": native}),
        Question("native", "/generate", {"inputs": prompt, "parameters": {**native, "return_full_text": True}}),
        Question("native root", "/", {"inputs": prompt, "parameters": native}),
        Question("chat stream", "/v1/chat/completions", {**chat, **usage}),
        Question("chat stream, told", "/v1/chat/completions", {**chat, **told, "stream": True}),
        Question("chat", "/v1/chat/completions", {**chat, **told}),
        Question("completions stream", "/v1/completions", {**text, "prompt": prompt, "stream": True}),
        Question("completions", "/v1/completions", {**text, "prompt": prompt}),
        Question("completions of two", "/v1/completions", {**text, "prompt": [prompt, prompt[::-1]], "stream": True}),
    ]


def ask(port: int, question: Question, headers: dict[str, str] | None = None) -> bytes:
    """The answer's body.

    Raises:
        AssertionError: it is not 200.
    """
    status, _, answer = call(port, "POST", question.path, question.body, headers=headers)
    assert status == 200, (question, answer)
    return answer


def has_lost_text(answer: bytes, question: Question) -> bool:
    """Whether a whole answer of TGI's has no text because it ends inside a character; the router gives it then."""
    if question.is_stream:
        return False
    data = json.loads(answer)
    if "choices" in data:
        choice = data["choices"][0]
        return not (choice["text"] if "text" in choice else choice["message"]["content"])
    text = (data[0] if isinstance(data, list) else data)["generated_text"]
    return text in ("", question.body["inputs"])


def comparable(answer: bytes, question: Question) -> list[bytes]:
    """The answer's bytes, event by event, without its instant; of several prompts, each one's events in their order.

    The text that TGI loses at the end of a stream (``has_lost_text``) is put in.
    """
    answer = re.sub(rb'"created":\d+', b'"created":0', answer)
    if not question.is_stream:
        return [answer]
    parts = answer.split(b"\n\n")
    if question.path == "/generate_stream" and b'"generated_text":"",' in parts[-2]:
        found = events(answer)
        text = "".join(e["token"]["text"] for e in found if not e["token"]["special"])
        told = json.dumps(text, ensure_ascii=False).encode()
        parts[-2] = parts[-2].replace(b'"generated_text":"",', b'"generated_text":' + told + b",")
    if isinstance(question.body.get("prompt"), list):
        parts.sort(key=lambda part: re.findall(rb'"index":(\d+)', part)[:1])
    return parts
