"""A figure: drawings side by side, mostly one per policy on the same scales, and their numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Protocol

from router_ext.sim.report.svg import NAMESPACE, Element, element, serialize

_LIMITS = (240, 120, 60, 30)
"""Points per curve, down to where a picture is small enough."""

_MARGIN, _HEAD = 10, 44
_WIDEST = 1_120
"""Pixels: wider pictures are shrunk where they are embedded, until their text cannot be read."""


class Drawing(Protocol):
    """One of the pictures of a figure: what it is called, what is to be seen, and how it is drawn."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]: ...

    def draw(self, *, limit: int) -> list[Element]:
        """Contents of an SVG of ``size``, with at most ``limit`` points per curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The same numbers for those who cannot see pictures, or want to copy them."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """See the module.

    Attributes:
        name: of its file and its place in the page. axis: what all drawings measure, with the unit.
        caption: what is to be seen, and how it was made.
    """

    name: str
    title: str
    axis: str
    caption: str
    drawings: Sequence[Drawing]
    table: Table


def inline(figure: Figure, drawing: Drawing, *, limit: int = _LIMITS[0]) -> str:
    """One drawing as an SVG for a page that has the sheet ``chart.css``."""
    return serialize(_svg(figure, drawing, limit))


def picture(figure: Figure, *, max_bytes: int) -> str:
    """The whole figure as one SVG file that needs nothing else, with as many points as fit into so many bytes.

    A file may be larger only if it is so with the fewest points already.
    """
    text = ""
    for limit in _LIMITS:
        text = _file(figure, limit)
        if len(text.encode()) <= max_bytes:
            break
    return text


def sheet() -> str:
    """Colours and type of all pictures, light and dark."""
    return (resources.files(__package__) / "assets" / "chart.css").read_text(encoding="utf-8")


def _svg(figure: Figure, drawing: Drawing, limit: int, *, x: float | None = None, y: float | None = None) -> Element:
    name = f"{figure.name}-{drawing.name}".replace(" ", "-")
    width, height = drawing.size
    return element(
        "svg",
        element("title", id=f"{name}-title", text=f"{figure.title}, {drawing.name}"),
        element("desc", id=f"{name}-desc", text=drawing.about),
        *drawing.draw(limit=limit),
        class_="chart",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        viewBox=f"0 0 {width} {height}",
        x=x,
        y=y,
        width=None if x is None else width,
        height=None if x is None else height,
    )


def _file(figure: Figure, limit: int) -> str:
    across = max(drawing.size[0] for drawing in figure.drawings) + _MARGIN
    down = max(drawing.size[1] for drawing in figure.drawings) + _MARGIN
    num = len(figure.drawings)
    columns = min(num, max(2, _WIDEST // across))
    width = _MARGIN + columns * across
    height = _HEAD + -(-num // columns) * down
    placed = []
    for index, drawing in enumerate(figure.drawings):
        row, column = divmod(index, columns)
        placed.append(_svg(figure, drawing, limit, x=_MARGIN + column * across, y=_HEAD + row * down))
    root = element(
        "svg",
        element("title", text=figure.title),
        element("style", text=sheet()),
        element("rect", class_="paper", width=width, height=height, rx=8),
        element("text", class_="heading", x=_MARGIN + 10, y=27, text=f"{figure.title}: {figure.axis}"),
        *placed,
        xmlns=NAMESPACE,
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
    )
    return serialize(root) + "\n"
