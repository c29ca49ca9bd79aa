"""Fewer points, same picture. Everywhere ``x`` ascends; all of it costs O(number of points)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]

_ANY = (float("-inf"), float("inf"))
"""Slopes that the next point may have where nothing is known yet."""


def extremes(points: Sequence[Point], limit: int) -> Sequence[Point]:
    """At most ``limit`` points (at least 4): the first, the last, and between them the lowest and the highest of every
    stretch of as many points.

    What is lowest and highest is so on every ascending scale, so this may come before any.
    """
    if len(points) <= max(limit, 4):
        return points
    inner = points[1:-1]
    ys = [y for _, y in inner]
    length = -(-len(inner) // max(1, (limit - 2) // 2))
    result = [points[0]]
    for first in range(0, len(inner), length):
        part = ys[first : first + length]
        low, high = part.index(min(part)), part.index(max(part))
        result.append(inner[first + min(low, high)])
        if low != high:
            result.append(inner[first + max(low, high)])
    result.append(points[-1])
    return result


def straighten(points: Sequence[Point], tolerance: float) -> Sequence[Point]:
    """Leave out points within ``tolerance``, in ``y``, of the straight line between those that stay.

    The first and the last stay, and the lowest and the highest to within the tolerance (the "swinging door").
    """
    if len(points) < 3:
        return points
    result = [points[0]]
    anchor_x, anchor_y = previous = points[0]
    least, most = _ANY
    for point in points[1:]:
        x, y = point
        run = x - anchor_x
        if run > 0.0 and not least <= (y - anchor_y) / run <= most:
            result.append(previous)
            anchor_x, anchor_y = previous
            least, most = _ANY
            run = x - anchor_x
        if run > 0.0:
            least = max(least, (y - tolerance - anchor_y) / run)
            most = min(most, (y + tolerance - anchor_y) / run)
        elif y != anchor_y:
            # A vertical step: nothing to the left says anything about its end.
            result.append(point)
            anchor_x, anchor_y = point
            least, most = _ANY
        previous = point
    if result[-1] != points[-1]:
        result.append(points[-1])
    return result
