"""The exception tree of the router.

FairlaneError
|-- RequestRefused            the request was wrong (4xx): status by dialect
|   |-- NotAuthenticated      401
|   |-- NotAllowed            403
|   |-- ModelNotFound         404
|   |-- BodyTooLarge          413
|   |-- UnsupportedMediaType  415
|   |-- HazardousRequest      backends fell under it
|   `-- GrammarRefused        a grammar that cannot be compiled, or only at everybody's cost
|-- LimitExceeded             429, with a computed retry hint
|   `-- QuotaExceeded         429, and no retry will help before the day or month is over
|-- QueueRefused              429, capacity exists but you lost
|-- StoppedByOperator         403, an operator has ended it
|-- GuardUnavailable          503, a grammar could not be judged now
|-- NoBackend                 503, nobody can serve this
|-- UpstreamFailed            502 before the first byte, in-band error afterwards
|-- LedgerFull                503, the books cannot take another request
|-- SnapshotRefused           a configuration that may not be applied
|-- ArtifactRefused           a predictor artifact that may not be loaded
|-- FeaturesRefused           packed features that are damaged or of another version
|-- TrainingFailed            a length model that cannot be trained from what there is
|-- AnswersRefused            a folder of prompts and answers that cannot be read; the message names the place
|-- SettingsError             the process cannot start with these settings
`-- SimulationError           a trace or a suite that cannot be simulated
"""

from __future__ import annotations


class FairlaneError(Exception):
    """Base of everything raised on purpose.

    Attributes:
        status_openai: HTTP status on ``/v1/*``. status_native: on TGI's own paths.
        openai_type, code: fields of OpenAI's error body. native_type: TGI's ``error_type``.
        param: the offending parameter, if one can be named.
        retry_after_s: hint for ``Retry-After`` (1 to 120 s), None for no header.
        may_retry: False: clients are told not to send it again by themselves.
    """

    status_openai = 500
    status_native = 500
    openai_type = "server_error"
    code = "internal_error"
    native_type = "generation"
    may_retry = True

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class RequestRefused(FairlaneError):
    """The request cannot be served as written."""

    status_openai = 400
    status_native = 422
    openai_type = "invalid_request_error"
    code = "invalid_parameter"
    native_type = "validation"


class NotAuthenticated(RequestRefused):
    """Missing, malformed, unknown, revoked or expired key; one text for all of them."""

    status_openai = status_native = 401
    openai_type = "authentication_error"
    code = "invalid_api_key"
    native_type = "authentication"


class NotAllowed(RequestRefused):
    """The key is good, what it asks for is not its right."""

    status_openai = status_native = 403
    openai_type = "permission_error"
    code = "model_not_allowed"
    native_type = "forbidden"


class ModelNotFound(RequestRefused):
    """No pool carries this name or alias."""

    status_openai = status_native = 404
    code = "model_not_found"


class BodyTooLarge(RequestRefused):
    """More bytes than the router takes; refused before parsing."""

    status_openai = status_native = 413
    code = "request_too_large"


class UnsupportedMediaType(RequestRefused):
    """The body is not declared as JSON."""

    status_openai = status_native = 415
    code = "unsupported_media_type"


class GrammarRefused(RequestRefused):
    """A grammar, response format or set of tools that no backend may be given."""

    code = "grammar_invalid"


class LimitExceeded(FairlaneError):
    """Over a limit that resets."""

    status_openai = status_native = 429
    openai_type = "rate_limit_error"
    code = "rate_limit_exceeded"
    native_type = "overloaded"


class QuotaExceeded(LimitExceeded):
    """The tokens of the day or the month are used up."""

    openai_type = "insufficient_quota"
    code = "insufficient_quota"
    may_retry = False


class QueueRefused(LimitExceeded):
    """There is capacity and this request lost: queue full, deadline unreachable, waited too long."""

    code = "queue_full"


class StoppedByOperator(FairlaneError):
    """An operator has ended this request, or everything of its kind."""

    status_openai = status_native = 403
    openai_type = "permission_error"
    code = "stopped_by_operator"
    native_type = "forbidden"


class GuardUnavailable(FairlaneError):
    """A grammar that could not be judged: the guard has too much to do, or is away."""

    status_openai = status_native = 503
    code = "grammar_not_judged"
    native_type = "overloaded"


class NoBackend(FairlaneError):
    """No usable backend, or the router drains."""

    status_openai = status_native = 503
    code = "no_backend_available"
    native_type = "overloaded"


class UpstreamFailed(FairlaneError):
    """A backend failed this request and it could not be resumed.

    ``is_batch``: it said so itself, as TGI does to everybody in a batch that one request broke.
    """

    is_batch = False

    status_openai = status_native = 502
    code = "upstream_error"


class HazardousRequest(RequestRefused):
    """A request under which backends fell one after the other."""

    code = "request_hazardous"


class LedgerFull(FairlaneError):
    """The local books (disk or bounded memory) cannot take another request: none is served uncounted."""

    status_openai = status_native = 503
    code = "ledger_full"
    native_type = "overloaded"


class SnapshotRefused(FairlaneError):
    """A configuration that fails validation; the last good one keeps serving."""


class ArtifactRefused(FairlaneError):
    """A predictor artifact that is damaged, foreign or too large; the last good one (or none) stays."""


class FeaturesRefused(FairlaneError):
    """Packed features of a prompt that are damaged or of another version."""


class TrainingFailed(FairlaneError):
    """No length model can be trained from these samples, or here."""


class AnswersRefused(FairlaneError):
    """A folder of prompts and lengths of answers that cannot be read."""


class SettingsError(FairlaneError):
    """The process cannot start with these settings."""


class SimulationError(FairlaneError):
    """A trace or a suite that cannot be simulated; the message names the place."""
