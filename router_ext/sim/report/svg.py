"""Elements of an SVG picture: well-formed whatever the text in them, and as short as they can be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

Element = ElementTree.Element

NAMESPACE = "http://www.w3.org/2000/svg"

_UNFIT = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def fit(text: str) -> str:
    """Text without the characters that no XML document may contain, even escaped."""
    return _UNFIT.sub("\ufffd", text)


def number(value: float) -> str:
    """A coordinate, to a tenth of a unit.

    Raises:
        ValueError: it is not finite; a picture would silently miss what it belongs to.
    """
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a coordinate")
    return _tenths(round(value * 10))


def element(
    tag: str, /, *children: Element | None, text: str | None = None, **attributes: str | float | None
) -> Element:
    """An element. ``class_`` and ``stroke_width`` stand for ``class`` and ``stroke-width``; None is left out."""
    result = Element(
        tag,
        {
            name.rstrip("_").replace("_", "-"): fit(value) if isinstance(value, str) else number(value)
            for name, value in attributes.items()
            if value is not None
        },
    )
    if text is not None:
        result.text = fit(text)
    result.extend(child for child in children if child is not None)
    return result


def serialize(root: Element) -> str:
    """The element as text."""
    return ElementTree.tostring(root, encoding="unicode")


def path(runs: Iterable[Sequence[tuple[float, float]]], *, is_closed: bool = False) -> str:
    """Path data through every run of points. Steps are relative, of whole tenths, so that no error adds up."""
    parts: list[str] = []
    for run in runs:
        last_x = last_y = 0
        for index, (x, y) in enumerate(run):
            if not (math.isfinite(x) and math.isfinite(y)):
                raise ValueError(f"({x}, {y}) is not a point")
            at_x, at_y = round(x * 10), round(y * 10)
            if index == 0:
                parts.append(f"M{_pair(at_x, at_y)}")
            else:
                parts.append(f"{'l' if index == 1 else _gap(at_x - last_x)}{_pair(at_x - last_x, at_y - last_y)}")
            last_x, last_y = at_x, at_y
        if len(run) == 1:
            # A lone point is seen as a dot, by the round end of its line.
            parts.append("h0")
        if is_closed and run:
            parts.append("z")
    return "".join(parts)


def _pair(x: int, y: int) -> str:
    return f"{_tenths(x)}{_gap(y)}{_tenths(y)}"


def _gap(value: int) -> str:
    return "" if value < 0 else " "


def _tenths(value: int) -> str:
    sign = "-" if value < 0 else ""
    whole, tenth = divmod(abs(value), 10)
    if not tenth:
        return f"{sign}{whole}"
    return f"{sign}{whole or ''}.{tenth}"
