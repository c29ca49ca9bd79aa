"""The files of real answers: ``prompts.jsonl.gz`` beside ``outputs.csv.gz``, searched recursively.

What a prompt and an answer are made of is the reader's own affair; where the files are, how they are packed and how the
place of a fault is named is not. Standard library only, so that who needs no model needs no numpy.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from router_ext.errors import AnswersRefused

PROMPTS, OUTPUTS = "prompts.jsonl.gz", "outputs.csv.gz"

_Prompt = TypeVar("_Prompt")
_Answer = TypeVar("_Answer")


def directories(folder: Path) -> list[Path]:
    """Folders that hold answers, in order.

    Raises:
        AnswersRefused: there is none.
    """
    found = sorted(path.parent for path in folder.rglob(OUTPUTS))
    if not found:
        raise AnswersRefused(f"{folder}: no {OUTPUTS} in it or below")
    return found


def read_prompts(directory: Path, parse: Callable[[Any], _Prompt]) -> list[_Prompt]:
    """The prompts of one folder, each made by ``parse`` of its JSON value.

    Raises:
        AnswersRefused: naming file, row and what is wrong.
    """
    path = directory / PROMPTS
    found = []
    # Not splitlines, which takes characters for line ends that may stand within a prompt.
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), 1):
        try:
            found.append(parse(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise AnswersRefused(f"{path} row {number}: not a prompt ({type(error).__name__}: {error})") from error
    return found


def read_outputs(
    directory: Path,
    prompts: Mapping[str, _Prompt],
    parse: Callable[[_Prompt, Mapping[str, str], str], _Answer],
) -> Iterator[_Answer]:
    """The answers of one folder, each made by ``parse`` of its prompt, its row and the row's place in words.

    Raises:
        AnswersRefused: naming file, row and what is wrong.
    """
    path = directory / OUTPUTS
    number = 1
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(_text(path), newline="")), 2):
            where = f"{path} row {number}"
            prompt = prompts.get(row["prompt_id"])
            if prompt is None:
                raise AnswersRefused(f"{where}: prompt {row['prompt_id'][:40]!r} is not in {PROMPTS}")
            yield parse(prompt, row, where)
    except (csv.Error, KeyError, ValueError, TypeError) as error:
        raise AnswersRefused(f"{path} row {number}: {type(error).__name__}: {error}") from error


def is_complete(row: Mapping[str, str]) -> bool:
    """Whether an answer came to its own end, as far as is known."""
    return row.get("hit_cap") != "1"


def _text(path: Path) -> str:
    try:
        return gzip.decompress(path.read_bytes()).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise AnswersRefused(f"{path}: {error}") from error
