"""Real answers: prompts, and how long models' answers to them were, from a folder (``predict.answer_files``).

A trace says when clients send, not what: with answers each of its clients becomes one source of prompts and one model,
and each of its requests one prompt with the length of a real answer. Half of the prompts are replayed, those whose
digest is even (near-duplicates go by that of the first of them); a model of lengths is trained on the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from router_ext.errors import AnswersRefused, SimulationError
from router_ext.predict.answer_files import directories, is_complete, read_outputs, read_prompts
from router_ext.sim.traces import MAX_TOKENS

NEEDED = "fairlane[predictor]"

_LEAST_PROMPTS = 10
"""A source and model with fewer prompts to replay makes no client: it would send the same few over and over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a client sends. ``text`` is what a predictor may read. ``is_replayed``: simulations send it; else models may
    be trained on it.
    """

    prompt_id: str
    source: str
    text: str
    input_tokens: int
    is_replayed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One real answer: its model, its sampling parameters (None: not known), its length, whether that is all of it."""

    prompt: Prompt
    model: str
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    output_tokens: int
    is_complete: bool


Kind: TypeAlias = tuple[tuple[Answer, ...], ...]
"""What one client sends: the answers of one model to each prompt of one source."""


@cache
def kinds(folder: Path) -> Mapping[tuple[str, str], Kind]:
    """By source and model, in their order: the answers to the prompts that are replayed.

    Raises:
        SimulationError: naming file, row, column, value and what is accepted.
    """
    found: dict[tuple[str, str], dict[str, list[Answer]]] = {}
    for answer in read_answers(folder):
        prompt = answer.prompt
        if prompt.is_replayed:
            by_prompt = found.setdefault((prompt.source, answer.model), {})
            by_prompt.setdefault(prompt.prompt_id, []).append(answer)
    enough = {
        name: tuple(map(tuple, found[name].values())) for name in sorted(found) if len(found[name]) >= _LEAST_PROMPTS
    }
    if not enough:
        raise SimulationError(
            f"{folder}: no source and model with answers to {_LEAST_PROMPTS} prompts that are replayed"
        )
    return enough


def read_answers(folder: Path) -> Iterator[Answer]:
    """All answers of a folder, file by file.

    Raises:
        SimulationError: naming file, row, column, value and what is accepted.
    """
    try:
        for directory in directories(folder):
            yield from read_outputs(directory, _prompts(directory), _answer)
    except AnswersRefused as error:
        raise SimulationError(str(error)) from error


def _prompts(directory: Path) -> Mapping[str, Prompt]:
    """By id. Cost: some 0.3 ms each, to find near-duplicates."""
    try:
        # Numpy comes with the predictor, which simulations of lengths alone do not need.
        from router_ext.predict import grouping
        from router_ext.predict.features import RequestFacts, extract
    except ModuleNotFoundError as error:
        raise SimulationError(f"real answers need {NEEDED}: {error}") from error
    found = read_prompts(directory, _prompt)
    groups = grouping.groups([extract(prompt.text, RequestFacts()) for prompt in found])
    return {
        prompt.prompt_id: replace(prompt, is_replayed=_is_even(found[int(first)].text))
        for prompt, first in zip(found, groups, strict=True)
    }


def _prompt(plain: Any) -> Prompt:
    return Prompt(
        prompt_id=str(plain["prompt_id"]),
        source=str(plain["source"]),
        text=str(plain["text"]),
        input_tokens=max(1, int(plain["in_tokens"])),
        is_replayed=False,
    )


def _is_even(text: str) -> bool:
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 2 == 0


def _answer(prompt: Prompt, row: Mapping[str, str], where: str) -> Answer:
    return Answer(
        prompt=prompt,
        model=row["model"],
        max_new_tokens=_number(row, "max_new_tokens", int),
        temperature=_number(row, "temperature", float),
        top_p=_number(row, "top_p", float),
        output_tokens=_length(row, where),
        is_complete=is_complete(row),
    )


def _number(row: Mapping[str, str], column: str, kind: type[Any]) -> Any:
    text = row[column]
    return kind(text) if text else None


def _length(row: Mapping[str, str], where: str) -> int:
    value = int(row["out_tokens"])
    if not 1 <= value <= MAX_TOKENS:
        raise SimulationError(f"{where}, column out_tokens: {value} is not a whole number from 1 to {MAX_TOKENS:,}")
    return value
