"""Logs: one JSON object per line on stdout, an event with fields. Never prompts, keys or text of users."""

from __future__ import annotations

import contextlib
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson
import structlog
from structlog.tracebacks import ExceptionDictTransformer

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _dump(value: Any, **_options: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


_requests: _RequestLines | None = None


def configure(*, level: str, router: str, has_requests: bool = False) -> None:
    """Route structlog and the standard library's logging (uvicorn, asyncio) to stdout as JSON.

    Args:
        has_requests: a line per ended request, if ``level`` lets info pass.
    """
    global _requests  # noqa: PLW0603 - a process has one log, as structlog's own
    _requests = _RequestLines(router) if has_requests and _LEVELS[level] <= logging.INFO else None
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                # Without locals: they hold prompts and keys.
                structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
                structlog.processors.JSONRenderer(serializer=_dump),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    for name in ("uvicorn.error", "uvicorn.access", "asyncio", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(router=router)


class _RequestLines:
    """Writes lines of the same form past the processors, which would take ten times as long."""

    def __init__(self, router: str) -> None:
        self._same = {"event": "request.ended", "level": "info", "router": router}

    def write(self, fields: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        line = orjson.dumps({**self._same, "timestamp": now, **fields}, option=orjson.OPT_APPEND_NEWLINE)
        with contextlib.suppress(OSError, ValueError):  # a log that cannot be written stops no request
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def has_request_lines() -> bool:
    """Whether ``request_ended`` writes anything."""
    return _requests is not None


def request_ended(fields: dict[str, Any]) -> None:
    """Log the end of a request: ids, counts, times; never text of users. Cost: some 6 us."""
    if _requests is not None:
        _requests.write(fields)


def get_logger(name: str) -> Any:
    """A structured logger; ``name`` is the module."""
    return structlog.get_logger(name)
