"""Every policy that a pool may choose has its page, and the index knows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router_ext.core.config import KNOBS, policy_pages

DOCS = Path(__file__).parents[4] / "docs" / "policies"
PARTS = ["Rule", "Guarantee", "Cost", "Failure mode", "Knobs", "Source"]


@pytest.mark.parametrize("name", policy_pages())
def test_a_page_says_rule_guarantee_cost_failure_mode_knobs_and_source(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    assert [part for part in re.findall(r"^## (.+)$", text, re.MULTILINE) if part in PARTS] == PARTS


@pytest.mark.parametrize("name", policy_pages())
def test_a_page_lists_the_knobs_that_its_policy_reads_and_their_defaults(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text().partition("## Knobs\n")[2].partition("\n## ")[0]
    stated = {knob: float(default) for knob, default in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE)}
    assert stated == {knob.name: knob.default for knob in KNOBS.values() if name in knob.policies}


def test_the_index_leads_to_every_page() -> None:
    rows = re.findall(r"^\| \[([\w-]+)\]\(([\w-]+)\.md\)", (DOCS / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(policy_pages())
    assert all(name == page for name, page in rows)


def test_no_link_of_a_page_leads_nowhere() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (DOCS / target).resolve().is_file(), f"{page.name}: {target}"
