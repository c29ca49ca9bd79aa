"""README and the picture name things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router_ext import cli

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()


def test_every_folder_in_the_picture_exists() -> None:
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    named = set(re.findall(r"\b(?:router_ext|controlplane)(?:/\w+)?\b", picture))
    assert len(named) > 8
    assert [path for path in sorted(named) if not (ROOT / path).is_dir()] == []


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([\w-]+)", README))))
def test_every_make_target_in_the_readme_exists(target: str) -> None:
    assert re.search(rf"(?m)^{target}:", (ROOT / "Makefile").read_text())


@pytest.mark.parametrize("command", sorted(set(re.findall(r"\bfairlane ([a-z][\w-]+)\b", README))))
def test_every_command_in_the_readme_exists(command: str) -> None:
    assert command in cli.COMMANDS


def test_links_of_the_readme_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) >= 3
    assert [link for link in links if not (ROOT / link).exists()] == []
