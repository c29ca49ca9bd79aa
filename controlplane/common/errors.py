"""What a use case raises on purpose; REST and console turn each kind into one status.

ControlPlaneError
|-- NotAllowed         403  the actor lacks the scope
|-- NotFound           404  nothing of that id
|-- Conflict           409  the state forbids it
|-- VersionMismatch    412  somebody else changed it first
|-- Invalid            422  map of messages by field
|   `-- ConfigRefused  422  the configuration that would result is invalid
`-- TooManyAttempts    429  with the seconds to wait
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ControlPlaneError(Exception):
    status = 500
    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotAllowed(ControlPlaneError):
    status = 403
    code = "not_allowed"


class NotFound(ControlPlaneError):
    status = 404
    code = "not_found"


class Conflict(ControlPlaneError):
    status = 409
    code = "conflict"


class VersionMismatch(ControlPlaneError):
    status = 412
    code = "version_mismatch"


class Invalid(ControlPlaneError):
    """``fields``: messages by field; the key ``""`` holds those of no single field."""

    status = 422
    code = "invalid"

    def __init__(self, fields: Mapping[str, Sequence[str] | str]) -> None:
        self.fields = {k: [v] if isinstance(v, str) else list(v) for k, v in fields.items()}
        super().__init__("; ".join(f"{k}: {m}" if k else m for k, ms in self.fields.items() for m in ms))


class ConfigRefused(Invalid):
    code = "config_refused"

    def __init__(self, reason: str) -> None:
        super().__init__({"": reason})


class TooManyAttempts(ControlPlaneError):
    status = 429
    code = "too_many_attempts"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
