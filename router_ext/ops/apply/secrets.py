"""Keys and links of invitations that ``apply`` made: told once, kept nowhere else, never in the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from router_ext.errors import SettingsError
from router_ext.ops.apply.plan import Step


class Secrets:
    """One JSON object a line, added to a file that its owner alone may read, or kept to be shown at the end."""

    def __init__(self, path: Path | None) -> None:
        """
        Raises:
            SettingsError: the file cannot be written; found out before anything is made.
        """
        self.shown: list[dict[str, str]] = []
        self._file: TextIO | None = None
        if path is not None:
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
                os.fchmod(descriptor, 0o600)
            except OSError as error:
                raise SettingsError(f"--keys-out: cannot write {path}: {error}") from None
            self._file = os.fdopen(descriptor, "a", encoding="utf-8")

    def take(self, step: Step, answer: dict[str, Any]) -> None:
        """Keep the secret of what a step created, if it has one."""
        name = step.kind.secret
        if name is None or not answer.get(name):
            return
        told = dict(zip(step.kind.key, step.key, strict=True)) | {name: str(answer[name])}
        if self._file is None:
            self.shown.append({"kind": step.kind.name, **told})
            return
        self._file.write(json.dumps({"kind": step.kind.name, **told}, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
