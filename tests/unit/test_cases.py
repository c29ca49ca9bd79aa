"""The table of faults in ``tests/README.md`` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_named_in_the_table_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "README.md").read_text())
    assert len(named) > 60
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (TESTS / path).is_file() or not re.search(rf"def {name}\(", (TESTS / path).read_text())
    ]
    assert missing == []
