"""The odd requests: 33 that were sent to a real TGI one by one, and more grammars that would fell or stall one.

``odd_requests.jsonl`` holds the 33 as they were posted to ``/generate`` (written for this project, Apache-2.0; what TGI
did under each is in ``tests/conformance/transcripts/poison.jsonl``); the others are the guard's own examples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, zip_longest
from typing import Any

from router_ext.devserver.constraint import Effect
from router_ext.devserver.hazards import TABLE
from router_ext.guard.examples import HAZARDS, TOOLS
from router_ext.guard.grammar import Grammar

_MANY_TOOLS = "20 tools of 3 fields"


@dataclass(frozen=True, slots=True)
class Odd:
    """One odd request. ``effect``: what it does to a backend that is given it, None where that is no harm."""

    name: str
    path: str
    body: dict[str, Any]
    effect: Effect | None

    def varied(self, number: int) -> dict[str, Any]:
        """Its body, another one for every ``number`` but 0: the same hazard under another digest."""
        if not number:
            return self.body
        if "messages" in self.body:
            messages = [*self.body["messages"], {"role": "user", "content": f"again {number}"}]
            return {**self.body, "messages": messages}
        return {**self.body, "inputs": f"{self.body['inputs']} {number}"}


def odd_requests() -> list[Odd]:
    """All of them, effects in turn: any few in a row are of different kinds."""
    by_effect: dict[Effect | None, list[Odd]] = {}
    for odd in _all():
        by_effect.setdefault(odd.effect, []).append(odd)
    kinds = [by_effect.get(effect, []) for effect in (Effect.DIE, Effect.FREEZE, Effect.FAIL, Effect.STALL, None)]
    return [odd for odd in chain.from_iterable(zip_longest(*kinds)) if odd is not None]


def _all() -> Iterator[Odd]:
    known = {_digest(field): TABLE[name].effect for name, field in HAZARDS.items() if name in TABLE}

    def effect(field: dict[str, Any] | None) -> Effect | None:
        return None if field is None else known.get(_digest(field))

    tools = TOOLS[_MANY_TOOLS]
    messages = [{"role": "user", "content": "What should be done?"}]
    yield Odd(_MANY_TOOLS, "/v1/chat/completions", {"messages": messages, "tools": tools, "max_tokens": 64}, None)
    for line in files(__package__).joinpath("odd_requests.jsonl").read_text("utf-8").splitlines():
        recorded = json.loads(line)
        body = recorded["body"]
        yield Odd(f"recorded: {recorded['name']}", "/generate", body, effect(body["parameters"].get("grammar")))
    for number, (name, field) in enumerate(HAZARDS.items()):
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 4, "grammar": field}}
        yield Odd(name, "/generate_stream" if number % 2 else "/generate", body, effect(field))


def _digest(field: dict[str, Any]) -> str | None:
    grammar = Grammar.of_field(field)
    return None if grammar is None else grammar.digest
