"""The prediction worker's log: lines like those of ``obs.logs``, without the 15 MB its library takes of a process."""

from __future__ import annotations

import sys
import traceback
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Notes:
    """One JSON object per line: an event with fields. Never prompts, nor an exception's words, which may hold some.

    Args:
        level: least level that is written. router: whose worker this is. sink: None for standard output.
    """

    def __init__(self, *, level: str = "info", router: str = "", sink: TextIO | None = None) -> None:
        self._least = _LEVELS[level]
        self._router = router
        self._sink = sink

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Where the exception that is being handled came from."""
        kind, _, origin = sys.exc_info()
        frames = [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_tb(origin)]
        name = None if kind is None else kind.__name__
        self._write("error", event, {**fields, "exception": name, "frames": frames[-8:]})

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if _LEVELS[level] < self._least:
            return
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = {**fields, "event": event, "router": self._router, "level": level, "timestamp": now}
        print(orjson.dumps(line, default=str).decode(), file=self._sink or sys.stdout, flush=True)
