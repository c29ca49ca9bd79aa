"""Folders of real answers (``answer_files``), as training and judging take them; several are joined.

Of the columns only those are features that a router has: the prompt's text, the model and the sampling parameters.
``source`` and ``subset`` name tenants in replays and kinds of prompts in figures; no predictor sees them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router_ext.predict.answer_files import directories, is_complete, read_outputs, read_prompts
from router_ext.predict.baseline import MAX_TOKENS
from router_ext.predict.features import Features, RequestFacts, extract
from router_ext.predict.training import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer. ``kind``: source and subset of its prompt; ``tenant``: source and model."""

    text: str
    kind: str
    tenant: str
    model: str
    facts: RequestFacts
    output_tokens: int
    is_complete: bool


def read_answers(folder: Path) -> list[Answer]:
    """All answers of a folder, in the order of its files.

    Raises:
        AnswersRefused: naming file, row, value and what is accepted.
    """
    found: list[Answer] = []
    for directory in directories(folder):
        prompts = dict(read_prompts(directory, _prompt))
        found += read_outputs(directory, prompts, _answer)
    return found


def _prompt(plain: Any) -> tuple[str, tuple[str, str, str]]:
    """Id, and text, source and kind."""
    source = str(plain["source"])
    kind = f"{source}/{plain['subset']}" if plain.get("subset") else source
    return str(plain["prompt_id"]), (str(plain["text"]), source, kind)


def _answer(prompt: tuple[str, str, str], row: Mapping[str, str], where: str) -> Answer:
    text, source, kind = prompt
    tokens = int(row["out_tokens"])
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"out_tokens {tokens} is not from 1 to {MAX_TOKENS:,}")
    return Answer(
        text=text,
        kind=kind,
        tenant=f"{source} {row['model']}",
        model=row["model"],
        facts=_facts(row),
        output_tokens=tokens,
        is_complete=is_complete(row),
    )


def _facts(row: Mapping[str, str]) -> RequestFacts:
    temperature, limit, top_k = _number(row, "temperature"), _number(row, "max_new_tokens"), _number(row, "top_k")
    return RequestFacts(
        max_new_tokens=None if limit is None else int(limit),
        temperature=temperature,
        top_p=_number(row, "top_p"),
        top_k=None if top_k is None else int(top_k),
        typical_p=_number(row, "typical_p"),
        repetition_penalty=_number(row, "repetition_penalty"),
        is_greedy=temperature == 0.0,
    )


def _number(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column)
    if not text:
        return None
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{column} {text[:40]!r} is no number from 0 on")
    return value


class Samples:
    """Answers with their features, each made once per prompt and facts."""

    def __init__(self) -> None:
        self._features: dict[tuple[str, RequestFacts], Features] = {}

    def of(self, answer: Answer) -> Sample:
        """One answer as training takes it."""
        key = (answer.text, answer.facts)
        features = self._features.get(key)
        if features is None:
            features = self._features[key] = extract(answer.text, answer.facts)
        return Sample(
            features=features,
            model=answer.model,
            output_tokens=answer.output_tokens,
            is_complete=answer.is_complete,
        )
