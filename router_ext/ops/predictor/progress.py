"""A bar on stderr, with the newest line of what is being done."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class Bar:
    """``with Bar("training") as bar: ... bar.tell(0.5, "trees")``; lines stay only on a terminal's bar."""

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._title = title
        self._task = self._progress.add_task(title, total=1.0)
        self._lines = None if console.is_terminal else console
        self._last = ""

    def tell(self, share: float, line: str) -> None:
        """So much is done; an empty line keeps the one before."""
        description = f"{self._title}: {line}" if line else None
        self._progress.update(self._task, completed=share, description=description)
        if line and self._lines is not None and line != self._last:
            self._lines.print(f"{share:4.0%} {line}", highlight=False)
            self._last = line

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
