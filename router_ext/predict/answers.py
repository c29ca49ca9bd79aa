"""Folders of real answers: ``prompts.jsonl.gz`` beside ``outputs.csv.gz``, searched recursively, several are joined.

Of the columns only those are features that a router has: the prompt's text, the model and the sampling parameters.
``source`` and ``subset`` name tenants in replays and kinds of prompts in figures; no predictor sees them.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router_ext.errors import AnswersRefused
from router_ext.predict.baseline import MAX_TOKENS
from router_ext.predict.features import Features, RequestFacts, extract
from router_ext.predict.training import Sample

PROMPTS, OUTPUTS = "prompts.jsonl.gz", "outputs.csv.gz"


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
    directories = sorted(path.parent for path in folder.rglob(OUTPUTS))
    if not directories:
        raise AnswersRefused(f"{folder}: no {OUTPUTS} in it or below")
    return [answer for directory in directories for answer in _read(directory)]


def _read(directory: Path) -> list[Answer]:
    path = directory / OUTPUTS
    prompts = _prompts(directory / PROMPTS)
    found, number = [], 1
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(_text(path), newline="")), 2):
            prompt = prompts.get(row["prompt_id"])
            if prompt is None:
                raise AnswersRefused(f"{path} row {number}: prompt {row['prompt_id'][:40]!r} is not in {PROMPTS}")
            text, source, kind = prompt
            tokens = int(row["out_tokens"])
            if not 1 <= tokens <= MAX_TOKENS:
                raise ValueError(f"out_tokens {tokens} is not from 1 to {MAX_TOKENS:,}")
            found.append(
                Answer(
                    text=text,
                    kind=kind,
                    tenant=f"{source} {row['model']}",
                    model=row["model"],
                    facts=_facts(row),
                    output_tokens=tokens,
                    is_complete=row.get("hit_cap") != "1",
                )
            )
    except (csv.Error, KeyError, ValueError, TypeError) as error:
        raise AnswersRefused(f"{path} row {number}: {type(error).__name__}: {error}") from error
    return found


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


def _prompts(path: Path) -> dict[str, tuple[str, str, str]]:
    """Text, source and kind by id."""
    found = {}
    # Not splitlines, which takes characters for line ends that may stand within a prompt.
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), 1):
        try:
            plain = json.loads(line)
            source = str(plain["source"])
            kind = f"{source}/{plain['subset']}" if plain.get("subset") else source
            found[str(plain["prompt_id"])] = (str(plain["text"]), source, kind)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise AnswersRefused(f"{path} row {number}: not a prompt ({type(error).__name__}: {error})") from error
    return found


def _text(path: Path) -> str:
    try:
        return gzip.decompress(path.read_bytes()).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise AnswersRefused(f"{path}: {error}") from error


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
