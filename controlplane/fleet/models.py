"""What serves: pools of TGI servers, the routers in front of them, and what those tell of requests that did harm."""

from __future__ import annotations

from django.db import models

from controlplane.common.ids import new_id
from controlplane.common.models import Credential, Managed, Record


def _pool_id() -> str:
    return new_id("pool")


def _backend_id() -> str:
    return new_id("bkd")


def _router_id() -> str:
    return new_id("rtr")


def _cancellation_id() -> str:
    return new_id("cnl")


class Pool(Managed, Record):
    """The servers of one model; fairness is kept per pool.

    ``scheduling``: knobs (``core.config.KNOBS``) by name, where the operator has set them.
    ``predictor_*``: the artifact of empirical quantiles, all empty for the built-in fallback. ``length_model_*``: the
    trained model promoted for this pool, all empty for none. ``is_guarded``, ``vocabulary``, ``takes_grammars``: as of
    ``PoolRecord``.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_pool_id, editable=False)
    name = models.CharField(max_length=200, unique=True)
    policy = models.CharField(max_length=40, default="slo-fair")
    scheduling = models.JSONField(default=dict, blank=True)
    tokenizer_path = models.TextField(blank=True, default="")
    is_guarded = models.BooleanField(default=True)
    vocabulary = models.PositiveIntegerField(default=131_072)
    takes_grammars = models.BooleanField(default=True)
    predictor_artifact = models.CharField(max_length=40, blank=True, default="")
    predictor_digest = models.CharField(max_length=64, blank=True, default="")
    predictor_kind = models.CharField(max_length=40, blank=True, default="")
    length_model_artifact = models.CharField(max_length=40, blank=True, default="")
    length_model_digest = models.CharField(max_length=64, blank=True, default="")
    length_model_kind = models.CharField(max_length=40, blank=True, default="")

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=models.Q(predictor_artifact="", predictor_digest="", predictor_kind="")
                | (~models.Q(predictor_artifact="") & ~models.Q(predictor_digest="") & ~models.Q(predictor_kind="")),
                name="pool_predictor_whole",
            ),
            models.CheckConstraint(
                condition=models.Q(length_model_artifact="", length_model_digest="", length_model_kind="")
                | (
                    ~models.Q(length_model_artifact="")
                    & ~models.Q(length_model_digest="")
                    & ~models.Q(length_model_kind="")
                ),
                name="pool_length_model_whole",
            ),
            models.CheckConstraint(condition=~models.Q(name=""), name="pool_name_given"),
            models.CheckConstraint(
                condition=models.Q(vocabulary__gte=1, vocabulary__lte=10_000_000), name="pool_vocabulary_range"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class ModelName(models.Model):
    """A word that a request's ``model`` may say: the pool's name or an alias. Each word means one pool."""

    word = models.CharField(primary_key=True, max_length=200)
    pool = models.ForeignKey(Pool, on_delete=models.CASCADE, related_name="model_names")
    is_alias = models.BooleanField(default=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["pool"], condition=models.Q(is_alias=False), name="model_name_one_primary"),
            models.CheckConstraint(condition=~models.Q(word=""), name="model_name_given"),
        ]


class Backend(Managed, Record):
    """One TGI server, as the operator states it. ``kv_tokens`` empty: the router uses ``/info``'s limit.

    ``is_drained``: besides being cordoned, what runs there goes on elsewhere where it can.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_backend_id, editable=False)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="backends")
    name = models.SlugField(max_length=63)
    url = models.URLField(max_length=500, unique=True)
    kv_tokens = models.PositiveIntegerField(null=True, blank=True)
    block_size = models.PositiveIntegerField(default=1)
    prefill_budget_tokens = models.PositiveIntegerField(default=4_096)
    is_chunked = models.BooleanField(default=True)
    speculate = models.PositiveIntegerField(default=0)
    is_cordoned = models.BooleanField(default=False)
    is_drained = models.BooleanField(default=False)
    takes_grammars = models.BooleanField(default=True)
    api_key_name = models.CharField(max_length=100, blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["pool", "name"], name="backend_name_once"),
            models.CheckConstraint(
                condition=models.Q(kv_tokens__isnull=True)
                | models.Q(kv_tokens__gte=2 * models.F("block_size"), kv_tokens__lte=1_000_000_000),
                name="backend_kv_tokens_range",
            ),
            models.CheckConstraint(
                condition=models.Q(block_size__gte=1, block_size__lte=1_024), name="backend_block_size_range"
            ),
            models.CheckConstraint(
                condition=models.Q(prefill_budget_tokens__gte=1, prefill_budget_tokens__lte=10_000_000),
                name="backend_prefill_budget_range",
            ),
            models.CheckConstraint(condition=models.Q(speculate__lte=64), name="backend_speculate_range"),
            models.CheckConstraint(
                condition=models.Q(is_drained=False) | models.Q(is_cordoned=True), name="backend_drained_cordoned"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Router(Credential, Record):
    """A router's credential; several instances may share one."""

    id = models.CharField(primary_key=True, max_length=40, default=_router_id, editable=False)
    name = models.CharField(max_length=100, unique=True)
    token_digest = models.CharField(max_length=64, unique=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return self.name


class RouterStatus(models.Model):
    """Summary of the last heartbeat of one router instance; the live picture is in Valkey."""

    instance = models.CharField(primary_key=True, max_length=100)
    router = models.ForeignKey(Router, on_delete=models.CASCADE, related_name="instances")
    program_version = models.TextField()
    address = models.TextField()
    applied_revision = models.BigIntegerField()
    applied_at = models.DateTimeField()
    refused_revision = models.BigIntegerField(null=True)
    refused_reason = models.TextField(blank=True, default="")
    spool_events = models.BigIntegerField(default=0)
    spool_bytes = models.BigIntegerField(default=0)
    is_draining = models.BooleanField(default=False)
    seen_at = models.DateTimeField()


class AppliedRevision(models.Model):
    """When an instance applied, or refused, a revision."""

    instance = models.ForeignKey(RouterStatus, on_delete=models.CASCADE, related_name="applied")
    revision = models.BigIntegerField()
    at = models.DateTimeField()
    refused_reason = models.TextField(blank=True, default="")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["instance", "revision"], name="applied_once")]


class Cancellation(Record):
    """Somebody's word that a running request ends: ``request`` is its id, or that of its event in the books.

    ``tenant``: whose requests alone are meant, where its own people said so; "" for an operator's word.

    One row for every time it was said, since clients may use an id again. In the snapshot for ``brakes.CANCELLED_FOR``.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_cancellation_id, editable=False)
    request = models.TextField()
    tenant = models.CharField(max_length=40, blank=True, default="")
    reason = models.TextField()
    cancelled_by = models.TextField()


class Hazard(Record):
    """A request under which backends fell, as its router tells of it; fields as of ``HazardRecord``.

    ``key``: the public id. ``created_at``: first heard of. ``resolved_by``: who has seen to it, empty while it is open.
    """

    id = models.TextField(primary_key=True)
    at = models.DateTimeField()
    kind = models.TextField()
    router = models.TextField()
    pool = models.TextField()
    backend = models.TextField()
    tenant = models.TextField()
    key = models.TextField()
    request = models.TextField()
    digest = models.TextField()
    refused_until = models.DateTimeField()
    resolved_at = models.DateTimeField(null=True)
    resolved_by = models.TextField(blank=True, default="")
    note = models.TextField(blank=True, default="")

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=models.Q(resolved_at__isnull=True, resolved_by="")
                | (models.Q(resolved_at__isnull=False) & ~models.Q(resolved_by="")),
                name="hazard_resolved_whole",
            )
        ]
        indexes = [
            models.Index(fields=["id"], name="hazard_open", condition=models.Q(resolved_at__isnull=True)),
            models.Index(fields=["at"], name="hazard_by_time"),
        ]
