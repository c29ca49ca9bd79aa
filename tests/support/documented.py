"""Parts of the documentation that are made of what the tests check. In ``tests``: ``python -m support.documented``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from support import friendlier, router_differences

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def friendlier_table() -> str:
    lines = ["| in a request | on | a TGI | the router |", "| --- | --- | --- | --- |"]
    for case in friendlier.cases():
        paths = ", ".join(f"`{path}`" for path in case["examples"])
        lines.append(f"| {case['what']} | {paths} | {case['tgi']} | {case['router']} |")
    return "\n".join(lines)


def differences_table() -> str:
    listed = router_differences.listed()
    names = defaultdict(list)
    for name, entry in listed["exchanges"].items():
        names[entry["reason"]].append(name)
    lines = ["| TGI | the router | recorded exchanges |", "| --- | --- | --- |"]
    for reason, told in listed["reasons"].items():
        lines.append(f"| {told['tgi']} | {told['router']} | {'; '.join(names[reason])} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {"friendlier": friendlier_table, "differences": differences_table}


def documented(page: str) -> str:
    """The page with its parts made anew.

    Raises:
        ValueError: a part has no place on it.
    """
    for name, make in PARTS.items():
        begin, end = f"<!-- {name}: made by tests/support/documented.py -->\n", f"\n<!-- end of {name} -->"
        head, rest = page.split(begin)
        page = head + begin + make() + end + rest.split(end)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(documented(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
