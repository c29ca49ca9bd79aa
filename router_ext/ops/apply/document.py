"""A YAML file with the line of every value, so that whatever is wrong can be pointed at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from router_ext.errors import SettingsError

Place = tuple[str | int, ...]
"""Names and positions from the top of the file to a value."""


def place_text(place: Place) -> str:
    """``tenants[3].limits.concurrent``."""
    text = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place)
    return text.removeprefix(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong, and where. ``line``: None where the file does not say it, such as an object to delete."""

    file: str
    line: int | None
    path: str
    message: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Document:
    """The plain content of a file. ``lines``: by place, from 1."""

    file: str
    content: Any
    lines: Mapping[Place, int]
    problems: list[Problem] = field(default_factory=list)

    def add(self, place: Place, message: str) -> None:
        """Note what is wrong with the value there, or, where none is, with what surrounds it."""
        known = place
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known)
        self.problems.append(Problem(file=self.file, line=line, path=place_text(place), message=message))


class _Loader(yaml.SafeLoader):
    """Days and instants stay the texts that REST takes; YAML would refuse wrong ones without their place."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_document(path: Path, text: str) -> Document:
    """The content of a YAML file; names that stand twice in one mapping are noted as problems.

    Raises:
        SettingsError: it is no YAML, with line and column.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[Place, int] = {}
        twice: list[Place] = []
        if node is not None:
            _walk(loader, node, (), lines, twice)
        content = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    finally:
        loader.dispose()
    document = Document(str(path), content, lines)
    for place in twice:
        document.add(place, "stands here a second time")
    return document


def _walk(loader: yaml.SafeLoader, node: yaml.Node, place: Place, lines: dict[Place, int], twice: list[Place]) -> None:
    lines[place] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        own = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        loader.flatten_mapping(node)
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            inner = (*place, name)
            _walk(loader, value, inner, lines, twice)
            lines[inner] = key.start_mark.line + 1
            if name in seen and own.count(name) > 1:
                twice.append(inner)
            seen.add(name)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            _walk(loader, value, (*place, number), lines, twice)
