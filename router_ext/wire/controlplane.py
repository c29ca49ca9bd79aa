"""The contract between router and control plane: records, key format, endpoints.

    router                                   control plane
    ------ GET  /router/v1/snapshot  ------> revision, or 304 after a long poll   (config_client)
    ------ POST /router/v1/usage     ------> UsageBatch -> UsageAck               (usage_client)
    ------ POST /router/v1/heartbeat ------> Heartbeat                            (heartbeat)
    ------ GET  /router/v1/totals    ------> Totals: how much of their quotas tenants and keys have used
    ------ GET  /router/v1/artifacts/{digest} -> predictor artifact bytes

Every call carries ``Authorization: Bearer <router token>``. Bodies are JSON by msgspec. Unknown fields are
ignored on both sides and new fields carry defaults, so neighbours one version apart understand each other.

The long poll: ``GET /router/v1/snapshot?wait_s=25`` with ``If-None-Match: "<digest>"`` of the revision the router
holds (or refused). 200 with ``ETag: "<digest>"`` as soon as another revision is current (at once without the
header), 304 after ``wait_s`` seconds (0 to 25, default 0), 404 while nothing has been published. The body is
``msgspec.json.encode(snapshot, order="deterministic")``.

With ``base=<digest>`` in the query the router says that it has that revision in force and takes what has changed since:
the answer may then be 200 with ``X-Fairlane-Base: "<digest>"`` and ``SnapshotDeltas``, which lead from there to the
``ETag``, one per revision. Whoever does not know the parameter sends the whole, and so does a control plane that no
longer has the way, or for which it would be longer. Usage is answered 200 with ``UsageAck`` once durable, 400 or
422 if the batch itself is malformed (the router then halves it to find the event), 5xx or 429 to be sent again. A
heartbeat is answered 204.
Instants are integer microseconds since the Unix epoch (UTC), durations integer microseconds or seconds by suffix.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import zlib
from typing import Any

import msgspec

SNAPSHOT_PATH = "/router/v1/snapshot"
USAGE_PATH = "/router/v1/usage"
HEARTBEAT_PATH = "/router/v1/heartbeat"
TOTALS_PATH = "/router/v1/totals"
TENANT_USAGE_PATH = "/router/v1/tenant-usage"
KEY_HEADER = "x-fairlane-key"
"""Of ``TENANT_USAGE_PATH``: id of the key whose holder a router asks for."""
ARTIFACT_PATH = "/router/v1/artifacts/"
LONG_POLL_S = 25

# --- configuration -----------------------------------------------------------------------------------------------


class TierRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An SLO tier; fields as ``core.config.TierConfig``. ``grammar_stall_s``: seconds a new grammar of this tier may
    stall a backend; None: the router's default, 0: no grammars."""

    name: str
    rank: int
    ttft_target_s: float | None = None
    max_queue_wait_s: float | None = None
    grammar_stall_s: float | None = None


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A fairness group: its tenants compete in every pool as one of this weight; ``core.config.GroupConfig``."""

    group: str
    weight: float = 1.0


class LimitsRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tenant, or one of its keys, may take. None: no limit; 0: nothing. Tokens are prompt and output tokens.

    ``concurrent``: requests waiting or running at once. ``requests_per_minute``, ``tokens_per_minute``: over all pools
    and routers. ``tokens_per_day``, ``tokens_per_month``: hard quotas of the UTC day and month, beyond which requests
    are refused; from the ``soft_`` ones on they go to the lowest allowed tier.
    """

    concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    soft_tokens_per_day: int | None = None
    tokens_per_day: int | None = None
    soft_tokens_per_month: int | None = None
    tokens_per_month: int | None = None


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant. ``tiers`` are the allowed ones, ``default_tier`` one of them. ``state``: ``active``; ``suspended``:
    nothing new is taken and what waits ends; ``stopped``: what runs ends as well.

    ``group``: its fairness group, in which ``weight`` is its share; None: it competes for itself.
    """

    tenant: str
    name: str
    weight: float = 1.0
    state: str = "active"
    tiers: list[str] = []
    default_tier: str = ""
    max_queued: int = 2_000
    group: str | None = None
    limits: LimitsRecord = LimitsRecord()


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant key without its secret.

    ``digest``: hex HMAC-SHA-256 of the whole key under pepper ``pepper_version``. ``default_pool``: name of the pool
    when a request names no model. ``may_choose_tier``: the header ``x-fairlane-tier`` is honoured.
    Revoked keys are not in the snapshot. ``tiers`` empty means the tenant's.
    """

    key: str
    public_id: str
    digest: str
    pepper_version: int
    tenant: str
    default_pool: str
    tiers: list[str] = []
    default_tier: str | None = None
    may_choose_tier: bool = False
    expires_at_us: int | None = None
    limits: LimitsRecord = LimitsRecord()


class BackendRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One TGI server. ``kv_tokens`` None: use ``/info``'s max_total_tokens. ``api_key_name``: name of a secret
    of the router's own (never the secret itself). ``is_cordoned``: nothing new is sent there. ``is_drained``: besides,
    what runs there and can be resumed goes on elsewhere at once. ``takes_grammars``: it is given requests whose answer
    has a form forced on it."""

    backend: str
    name: str
    url: str
    kv_tokens: int | None = None
    block_size: int = 1
    prefill_budget_tokens: int = 4_096
    is_chunked: bool = True
    speculate: int = 0
    is_cordoned: bool = False
    is_drained: bool = False
    takes_grammars: bool = True
    api_key_name: str | None = None


class ArtifactRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The active predictor artifact of a pool; bytes at ``ARTIFACT_PATH + digest``, digest = sha256 hex."""

    artifact: str
    digest: str
    kind: str


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of one model. ``name`` and ``aliases`` are what a request's ``model`` may say.

    ``scheduling``: fields of ``core.config.PoolConfig`` (policy first of all). ``tokenizer_path``: optional
    ``tokenizer.json`` on the router's machine. ``is_guarded``: grammars are proven before a backend sees them.
    ``vocabulary``: tokens of the model, for what a grammar costs, where there is no tokenizer file.
    ``takes_grammars``: False ends what has a grammar, and refuses more.
    """

    pool: str
    name: str
    aliases: list[str] = []
    scheduling: dict[str, Any] = {}
    backends: list[BackendRecord] = []
    tokenizer_path: str | None = None
    is_guarded: bool = True
    vocabulary: int = 131_072
    takes_grammars: bool = True
    predictor: ArtifactRecord | None = None
    """Empirical quantiles: the fallback."""
    length_model: ArtifactRecord | None = None
    """The trained model of output lengths, if one was promoted for this pool."""


class OwnCancellation(msgspec.Struct, frozen=True, kw_only=True):
    """A request that its own tenant has ended: ids are chosen by clients, and another tenant's may be the same."""

    tenant: str
    request: str


class ConfigSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One published revision, complete. ``digest`` = sha256 hex of the JSON of everything but itself.

    ``cancelled``: ids of requests, or of their events, that an operator has ended lately; ``own_cancelled``: that
    their tenants have.
    """

    revision: int
    published_at_us: int
    pools: list[PoolRecord]
    tiers: list[TierRecord]
    tenants: list[TenantRecord]
    keys: list[KeyRecord]
    groups: list[GroupRecord] = []
    cancelled: list[str] = []
    own_cancelled: list[OwnCancellation] = []
    digest: str = ""


class SnapshotDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From one published revision to the next: records that were set, ids of those that are gone.

    ``base``, ``digest``: of the whole snapshots before and after. ``pools``, ``tiers``, ``cancelled``,
    ``own_cancelled``: whole, None where nothing has changed. ``num_tenants``, ``num_keys``, ``num_groups``: of the
    result. ``check``: sha256 hex of the JSON of everything but itself.

    Why the result is exact without hashing it again (100,000 keys are 30 MB): the first base was checked whole against
    its own digest, ``check`` covers every byte that leads on from it, ``base`` and ``digest`` included, and setting and
    removing records by id leaves no room for interpretation. A delta that fits nothing, or leads to other numbers of
    records, is refused, and the whole is fetched.
    """

    base: str
    digest: str
    revision: int
    published_at_us: int
    num_tenants: int
    num_keys: int
    num_groups: int = 0
    pools: list[PoolRecord] | None = None
    tiers: list[TierRecord] | None = None
    cancelled: list[str] | None = None
    own_cancelled: list[OwnCancellation] | None = None
    tenants: list[TenantRecord] = []
    tenants_gone: list[str] = []
    keys: list[KeyRecord] = []
    keys_gone: list[str] = []
    groups: list[GroupRecord] = []
    groups_gone: list[str] = []
    check: str = ""


class SnapshotDeltas(msgspec.Struct, frozen=True, kw_only=True):
    """Deltas of consecutive revisions, the oldest first."""

    deltas: list[SnapshotDelta]


BASE_HEADER = "X-Fairlane-Base"


def delta_check(delta: SnapshotDelta) -> str:
    """sha256 hex over the canonical JSON of the delta without its check."""
    blank = msgspec.structs.replace(delta, check="")
    return hashlib.sha256(msgspec.json.encode(blank, order="deterministic")).hexdigest()


def snapshot_digest(snapshot: ConfigSnapshot) -> str:
    """sha256 hex over the canonical JSON of the snapshot with an empty digest."""
    blank = msgspec.structs.replace(snapshot, digest="")
    return hashlib.sha256(msgspec.json.encode(blank, order="deterministic")).hexdigest()


# --- usage -------------------------------------------------------------------------------------------------------


class ReasonRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of a wait; fields as ``core.explain.Reason``."""

    cause: str
    text: str
    seconds: float | None = None
    counts: dict[str, int] = {}


class MomentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a request; fields as ``core.timeline.Moment``."""

    at_s: float
    step: str
    text: str
    backend: str | None = None
    tokens: int = 0


class PredictionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted of a request's output when it arrived, and what a model can learn from.

    quantiles: output tokens at ``predict.baseline.LEVELS``, as the scheduler was told them; None: nothing was known.
    source: whose prediction that is: ``model``, ``memory`` (a prompt that was answered before), ``key``, ``tenant``,
        ``pool`` (empirical quantiles) or ``default``.
    fallback: the empirical quantiles of the same instant, which any model has to beat; None: too few answers.
    fallback_reason: why a pool with a model used its fallback (``late``, ``down``, ``absurd``), else None.
    runaway: probability of more than 2,000 tokens; None without a model.
    length_model: digest of the model that was asked.
    features: hashed features of the prompt (never its text) in the packed form of ``feature_version``.
    """

    quantiles: list[int] | None = None
    source: str = "default"
    fallback: list[int] | None = None
    fallback_reason: str | None = None
    runaway: float | None = None
    length_model: str | None = None
    features: bytes | None = None
    feature_version: int | None = None


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The one line of the books for one request, in every outcome that used a backend.

    ``event`` is unique and ``arrived_at_us`` never changes when the event is sent again.
    outcome: ``completed``, ``cancelled`` (client went away), ``failed``, ``aborted`` (router killed), ``expired``.
    token_source: ``backend``, ``counted`` (by the router), ``estimated`` (the backend told none, and its text was not
    counted to the end by the pool's own tokenizer). Tokens are those handed to the client's connection, EOS included;
    ``recomputed_tokens`` were generated and dropped, or sent again because of a preemption, the prompt included;
    ``resumed_prefill_tokens`` were sent again at other continuations (slice ends, failures).
    """

    event: str
    request: str
    router: str
    tenant: str
    key: str
    pool: str
    model: str
    tier: str
    dialect: str
    outcome: str
    arrived_at_us: int
    ended_at_us: int
    first_dispatch_us: int | None = None
    first_token_us: int | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_source: str = "counted"
    segments: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    resumed_prefill_tokens: int = 0
    kv_token_seconds: float = 0.0
    max_new_tokens: int | None = None
    predicted_tokens: int | None = None
    predictor: str | None = None
    finish_reason: str | None = None
    resume_class: str | None = None
    backends: list[str] = []
    error_code: str | None = None
    explanation: list[str] = []
    reasons: list[ReasonRecord] = []
    timeline: list[MomentRecord] = []
    prediction: PredictionRecord | None = None


class UsageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one router; sent at least once, made exactly-once by ``(arrived_at_us, event)``."""

    router: str
    events: list[UsageEvent]


class UsageAck(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in the batch is durable: ``accepted`` rows were new, ``known`` were already there.

    ``booked_at_us``: the database's clock at the commit; ``Totals`` include the batch if and only if their ``as_of_us``
    is not earlier.
    """

    accepted: int
    known: int
    quarantined: int = 0
    booked_at_us: int = 0


# --- quotas ------------------------------------------------------------------------------------------------------


class TotalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a tenant or a key (``scope``: its id) was booked in the UTC day and month of ``Totals``."""

    scope: str
    day_tokens: int
    month_tokens: int


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /router/v1/totals?since_us=0``: what was booked for those that have a quota.

    as_of_us: the database's clock when the sums were read; what was booked before is in them, and nothing else.
    day: the UTC day they are of, ``2026-11-30``. live_routers: routers that sent a heartbeat lately.
    is_whole: True: who is not among ``totals`` has used nothing. False: only those that changed since ``since_us`` (the
        ``as_of_us`` of an earlier answer of the same day), or whose quota did.
    """

    as_of_us: int
    day: str
    live_routers: int = 1
    is_whole: bool = True
    totals: list[TotalRecord] = []


# --- heartbeat ---------------------------------------------------------------------------------------------------


class BackendState(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    state: str
    """up, down, warming, cordoned"""
    running: int = 0
    reserved_tokens: int = 0
    kv_tokens: int = 0
    detail: str = ""


class TenantState(msgspec.Struct, frozen=True, kw_only=True):
    """``counter``: service per weight above the floor of those it competes with: the pool's, or its group's members.

    ``recent_service``: prompt tokens and twice the output tokens of the last ``PoolState.recent_s`` seconds.
    ``entitled_service``: its part of the pool's by weight among those that waited, ran or were served meanwhile. Both
    are None from routers that do not tell.
    """

    tenant: str
    group: str | None = None
    queued: int = 0
    running: int = 0
    counter: float = 0.0
    output_tokens_total: int = 0
    prompt_tokens_total: int = 0
    recent_service: float | None = None
    entitled_service: float | None = None


class OtherTenants(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the tenants of a pool that a heartbeat does not name; fields as ``TenantState``."""

    tenants: int = 0
    queued: int = 0
    running: int = 0
    output_tokens_total: int = 0
    prompt_tokens_total: int = 0
    recent_service: float = 0.0
    entitled_service: float = 0.0


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """First tokens of one tier in a span of time: ``counts[i]`` of them fell into bucket ``buckets[i]`` of
    ``wire.log_histogram`` by their TTFT, ``in_time`` of them within the target that held then.

    ``ttft_target_s``: in force now; None: the tier has none, and ``in_time`` says nothing.
    """

    tier: str
    ttft_target_s: float | None = None
    buckets: list[int] = []
    counts: list[int] = []
    in_time: int = 0


SLOT_S = 10
"""Length of a slot in seconds."""


class SlotState(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in a pool in ``SLOT_S`` seconds that are over, from ``slot * SLOT_S`` seconds after 1970 on."""

    slot: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    tiers: list[TierState] = []


class BoundTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool's fairness bound is made of; fields as ``core.bounds.Terms``."""

    peak_service: float
    pool_tokens: int
    longest_prompt: int
    stall_service: float = 0.0
    passes: dict[str, float] = {}
    gamma: float = 0.0
    lightest_weight: float = 1.0
    heaviest_weight: float = 1.0


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """A fairness group in one pool; ``queued`` and ``running`` are sums over its tenants."""

    group: str
    queued: int = 0
    running: int = 0
    counter: float = 0.0


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits (``backend`` is None) or runs. ``request``, ``event``, ``key``: as in ``UsageEvent``."""

    request: str
    event: str
    tenant: str
    key: str
    tier: str
    arrived_at_us: int
    output_tokens: int = 0
    backend: str | None = None


MAX_LIVE_TENANTS = 200
"""Tenants that a heartbeat names, of all its pools."""


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    pool: str
    policy: str
    queued_by_tier: dict[str, int] = {}
    running: int = 0
    backends: list[BackendState] = []
    tenants: list[TenantState] = []
    groups: list[GroupState] = []
    predictor_digest: str | None = None
    length_model_digest: str | None = None
    """The trained model that answers; None: none loaded, the fallback predicts."""
    length_model_refused: str | None = None
    """Why the pool's model of the configuration is not the one that answers."""
    predictions_total: dict[str, int] = {}
    """Requests since the router's start by ``PredictionRecord.source``."""
    prediction_fallbacks_total: dict[str, int] = {}
    """Requests of pools with a model that used the fallback, by reason."""
    bound_service: float | None = None
    largest_gap_service: float | None = None
    bound_terms: BoundTerms | None = None
    service_per_gpu_s: float | None = None
    """Service one busy backend delivers per second while somebody waits; None before it was measured."""
    parked: int = 0
    preempted_total: dict[str, int] = {}
    """Requests told to stop for others since the router's start, by trigger."""
    recomputed_tokens_total: int = 0
    """Tokens that preempted requests sent again since then."""
    waste_tokens: float | None = None
    """Tokens that may be computed again for preemptions at present; negative after an overdraft."""
    oldest: list[LiveRequest] = []
    """Those that wait or run longest, the first to arrive first; at most 20."""
    other_tenants: OtherTenants | None = None
    """Those beyond the ``MAX_LIVE_TENANTS`` of the heartbeat that have the most work."""
    recent_s: int | None = None
    """How far back ``tiers``, ``recent_refused`` and the like reach; None from a router that does not tell them."""
    tiers: list[TierState] = []
    recent_refused: dict[str, int] = {}
    """Requests refused or expired in the last ``recent_s`` seconds, by code."""
    recent_preempted: dict[str, int] = {}
    recent_output_tokens: int = 0
    slots: list[SlotState] = []
    """The newest that are over, so that some lost heartbeats lose none."""


class HazardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request under which backends fell, and which is refused now. Told in several heartbeats; ``hazard`` is its id.

    ``kind``: ``death``, ``freeze`` or ``batch``. ``key``: the public id. ``digest``: of the request, refused until
    ``refused_until_us``.
    """

    hazard: str
    at_us: int
    kind: str
    backend: str
    tenant: str
    key: str
    request: str
    digest: str
    refused_until_us: int


class MovedKey(msgspec.Struct, frozen=True, kw_only=True):
    """The digest of a key under a newer pepper than it is known under: a router has been shown the key itself."""

    key: str
    pepper_version: int
    digest: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What a router is doing now; sent every two seconds and on every applied revision. Soft state."""

    router: str
    version: str
    address: str
    applied_revision: int
    applied_at_us: int
    refused_revision: int | None = None
    refused_reason: str | None = None
    hazards: list[HazardRecord] = []
    spool_events: int = 0
    spool_bytes: int = 0
    overflow_events: int = 0
    """Ended requests that the disk has not taken: not 0 is an alarm."""
    is_draining: bool = False
    pools: list[PoolState] = []
    moved_keys: list[MovedKey] = []
    """Not in every heartbeat: each that brings some is answered by a revision."""


# --- keys --------------------------------------------------------------------------------------------------------

KEY_PATTERN = re.compile(r"flk_([0-9a-z]{12})_([0-9A-Za-z]{40})([0-9a-f]{8})\Z")
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def generate_key() -> tuple[str, str]:
    """A new tenant key and its public id: ``flk_<public id>_<secret of 238 bits><crc32>``."""
    public_id = "".join(secrets.choice("0123456789abcdefghijklmnopqrstuvwxyz") for _ in range(12))
    secret = "".join(secrets.choice(_ALPHABET) for _ in range(40))
    body = f"flk_{public_id}_{secret}"
    return body + f"{zlib.crc32(body.encode()):08x}", public_id


def parse_key(text: str) -> str | None:
    """Public id of a well-formed key, None otherwise (checked by its checksum, before any look-up)."""
    match = KEY_PATTERN.match(text)
    if match is None or f"{zlib.crc32(text[:-8].encode()):08x}" != match[3]:
        return None
    return match[1]


def key_digest(text: str, pepper: bytes) -> str:
    """Hex HMAC-SHA-256 of the whole key. A fast hash is right for a random secret of this length."""
    return hmac.new(pepper, text.encode(), hashlib.sha256).hexdigest()


MIN_PEPPER_BYTES = 32
MAX_PEPPER_VERSION = 32_767


def parse_peppers(text: str) -> dict[int, bytes]:
    """Peppers by version from ``HEX`` (which is version 1) or ``1:HEX,2:HEX``; each of at least 32 bytes.

    Routers and the control plane read the same text, each from its own file.

    Raises:
        ValueError: saying what is wrong, never showing a pepper.
    """
    peppers: dict[int, bytes] = {}
    for part in text.split(","):
        version, _, digits = part.strip().rpartition(":")
        try:
            number, pepper = int(version or 1), bytes.fromhex(digits)
        except ValueError:
            raise ValueError("a pepper is hexadecimal, with an optional version: 1:HEX,2:HEX") from None
        if not 1 <= number <= MAX_PEPPER_VERSION:
            raise ValueError(f"versions of peppers go from 1 to {MAX_PEPPER_VERSION:,}")
        if number in peppers:
            raise ValueError(f"pepper version {number} is there twice")
        if len(pepper) < MIN_PEPPER_BYTES:
            raise ValueError(f"pepper version {number} has {len(pepper)} bytes, at least {MIN_PEPPER_BYTES} are needed")
        peppers[number] = pepper
    return peppers
