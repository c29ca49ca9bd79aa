"""What a process has used of the machine, and the arithmetic of the benches."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], q: float) -> float:
    """Nearest-rank percentile; NaN where there is nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def gaps(instants: Iterable[Sequence[float]]) -> list[float]:
    """Times between the neighbours of each series, all together."""
    return [after - before for series in instants for before, after in pairwise(series)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of y over x; 0 where x does not vary."""
    if not points:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def descendants(pid: int) -> list[int]:
    """A process and all that it and its children have started. Cost: one read per process of the machine."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, ())
    return found


def tree_cpu_seconds(pid: int) -> float:
    """User and system time of a process and all that lives below it."""
    total = 0.0
    for each in descendants(pid):
        try:
            total += cpu_seconds(each)
        except OSError:
            continue
    return total


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
