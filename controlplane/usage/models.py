"""The books: one row per request, rollups by quarter of an hour, and what could not be booked.

``usage_event``, ``usage_prediction`` and ``predictor_sample`` are partitioned by day of arrival and written by COPY
alone (``usage.ingest``), ``usage_quarter`` by month (``usage.rollup``): their tables are made in migrations.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models

from controlplane.common.ids import new_id
from controlplane.common.models import Managed, Record

MAX_PRICE = 10**12
"""Micro-currency for 1,000,000 tokens: a unit of currency for each token."""


class UsageEvent(models.Model):
    """One request that used a backend. The key is (``arrived_at``, ``event``)."""

    pk = models.CompositePrimaryKey("arrived_at", "event")
    arrived_at = models.DateTimeField()
    event = models.TextField()
    request = models.TextField()
    router = models.TextField()
    tenant = models.TextField()
    key = models.TextField()
    pool = models.TextField()
    model = models.TextField()
    tier = models.TextField()
    dialect = models.TextField()
    outcome = models.TextField()
    ended_at = models.DateTimeField()
    first_dispatch_at = models.DateTimeField(null=True)
    first_token_at = models.DateTimeField(null=True)
    prompt_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    token_source = models.TextField()
    segments = models.IntegerField()
    preemptions = models.IntegerField()
    recomputed_tokens = models.BigIntegerField()
    resumed_prefill_tokens = models.BigIntegerField()
    kv_token_seconds = models.FloatField()
    max_new_tokens = models.BigIntegerField(null=True)
    predicted_tokens = models.BigIntegerField(null=True)
    predictor = models.TextField(null=True)
    finish_reason = models.TextField(null=True)
    resume_class = models.TextField(null=True)
    backends = ArrayField(models.TextField())
    error_code = models.TextField(null=True)
    ingested_at = models.DateTimeField()

    class Meta:
        managed = False
        db_table = "usage_event"


class UsageExplanation(models.Model):
    """Why a request waited, failed or was preempted; kept beside the narrow event row, for those only.

    ``lines``: sentences. ``reasons``, ``timeline``: ``ReasonRecord`` and ``MomentRecord`` of the wire contract.
    """

    arrived_at = models.DateTimeField()
    event = models.TextField()
    tenant = models.TextField()
    lines = models.JSONField()
    reasons = models.JSONField(default=list)
    timeline = models.JSONField(default=list)

    class Meta:
        db_table = "usage_explanation"
        constraints = [models.UniqueConstraint(fields=["arrived_at", "event"], name="usage_explanation_once")]


class QuarantinedEvent(models.Model):
    """An event that cannot be booked: too old, from the future, or unreadable. Never dropped, always shown."""

    digest = models.CharField(primary_key=True, max_length=64)
    router = models.TextField()
    event = models.TextField(blank=True, default="")
    tenant = models.TextField(blank=True, default="")
    arrived_at_us = models.DecimalField(max_digits=40, decimal_places=0, null=True)
    reason = models.TextField()
    body = models.BinaryField()
    received_at = models.DateTimeField(db_index=True)

    class Meta:
        db_table = "usage_quarantine"


class RollupSums(models.Model):
    """Sums over the requests that arrived within ``minutes`` (15 or 60) from ``at``, a full quarter of an hour UTC.

    Partitioned by month. 60: of a whole hour, all in the row of its first quarter; only where nothing finer was kept.
    ``kv_token_ms``: token-seconds of KV in thousandths, each request's rounded. ``ttft_buckets`` and ``ttft_counts``:
    a sparse histogram (``usage.histogram``).
    """

    at = models.DateTimeField()
    minutes = models.SmallIntegerField()
    pool = models.TextField()
    model = models.TextField()
    tier = models.TextField()
    requests = models.BigIntegerField()
    completed = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    recomputed_tokens = models.BigIntegerField()
    resumed_tokens = models.BigIntegerField()
    kv_token_ms = models.BigIntegerField()
    ttft_buckets = ArrayField(models.IntegerField())
    ttft_counts = ArrayField(models.BigIntegerField())

    class Meta:
        abstract = True


class UsageQuarter(RollupSums):
    """Rollups of one tenant's key."""

    pk = models.CompositePrimaryKey("at", "tenant", "key", "pool", "model", "tier")
    tenant = models.TextField()
    key = models.TextField()

    class Meta:
        managed = False
        db_table = "usage_quarter"


class UsageSum(RollupSums):
    """Rollups of one quarter of an hour over all tenants and keys, by the price list they pay by; "" for none.

    What reports by neither tenant nor key read: few rows, however many tenants there are. Made of ``UsageQuarter``
    alone; ``minutes``: the longest of them. The histogram of all price lists together stands in the row of the first.
    """

    pk = models.CompositePrimaryKey("at", "price_list", "pool", "model", "tier")
    price_list = models.TextField()

    class Meta:
        managed = False
        db_table = "usage_sum"


class StaleSum(models.Model):
    """A mark that ``UsageSum`` does not hold what the rollups of ``quarter`` say; a report sums them itself then.

    Appended, by triggers too, wherever somebody's price list changes; as ``TouchedQuarter`` otherwise.
    """

    quarter = models.DateTimeField(db_index=True)

    class Meta:
        db_table = "usage_stale_sum"


class UsageTotal(models.Model):
    """Prompt and output tokens of a tenant or key (``scope``: its id) that arrived in one UTC day or month.

    ``span``: ``2026-11-30`` or ``2026-11``. ``changed_at_us``: the database's clock when something was added last
    (``usage.totals``).
    """

    pk = models.CompositePrimaryKey("span", "scope")
    span = models.TextField()
    scope = models.TextField()
    tokens = models.BigIntegerField()
    changed_at_us = models.BigIntegerField()

    class Meta:
        db_table = "usage_total"


class UsageAdded(models.Model):
    """What one batch adds to the totals of one day and scope; gone once it is part of ``UsageTotal``.

    ``last_at``: of a key, when the last of these requests arrived.
    """

    day = models.DateField()
    scope = models.TextField()
    tokens = models.BigIntegerField()
    last_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "usage_added"


class AccuracySums(models.Model):
    """Figures of one stretch of time of arrival, one predictor and one length model (``usage.accuracy``).

    ``tenant`` empty: the pool as a whole. Sums run over ``n`` answers; the others were cut (``n_cut``). ``pit``: a
    histogram of 8 bins. ``ratio_buckets`` and ``ratio_counts``: a sparse one of ln(median / actual).
    """

    pool = models.TextField()
    tenant = models.TextField()
    length_model = models.TextField()
    predictor = models.TextField()
    n = models.BigIntegerField()
    n_cut = models.BigIntegerField()
    n_model = models.BigIntegerField()
    n_memory = models.BigIntegerField()
    n_fallen_back = models.BigIntegerField()
    tokens = models.BigIntegerField()
    abs_error = models.FloatField()
    pinball = models.FloatField()
    covered_80 = models.BigIntegerField()
    covered_90 = models.BigIntegerField()
    pit = ArrayField(models.FloatField())
    ratio_buckets = ArrayField(models.IntegerField())
    ratio_counts = ArrayField(models.BigIntegerField())

    class Meta:
        abstract = True


class AccuracyHour(AccuracySums):
    """Of one UTC hour that has ended."""

    hour = models.DateTimeField()

    class Meta:
        db_table = "predictor_hour"
        constraints = [
            models.UniqueConstraint(
                fields=["pool", "tenant", "hour", "length_model", "predictor"], name="predictor_hour_once"
            )
        ]
        indexes = [models.Index(fields=["hour"], name="predictor_hour_by_hour")]


class AccuracyMinute(AccuracySums):
    """Of one minute of an hour that is not rolled up yet; gone once it is."""

    minute = models.DateTimeField()

    class Meta:
        db_table = "predictor_minute"
        constraints = [
            models.UniqueConstraint(
                fields=["pool", "tenant", "minute", "length_model", "predictor"], name="predictor_minute_once"
            )
        ]
        indexes = [models.Index(fields=["minute"], name="predictor_minute_by_minute")]


class TouchedMinute(models.Model):
    """A mark that predictions of ``minute`` were booked after it was rolled up; as ``TouchedHour``."""

    minute = models.DateTimeField(db_index=True)

    class Meta:
        db_table = "predictor_touched_minute"


class PoolMedian(models.Model):
    """The median of a pool's answers of the 24 hours before ``hour``, kept while that hour is not rolled up."""

    hour = models.DateTimeField()
    pool = models.TextField()
    median = models.BigIntegerField()

    class Meta:
        db_table = "predictor_median"
        constraints = [models.UniqueConstraint(fields=["hour", "pool"], name="predictor_median_once")]


class SampleDay(models.Model):
    """How many samples of one UTC day, pool and feature version there were when they were counted last."""

    day = models.DateField()
    pool = models.TextField()
    feature_version = models.IntegerField()
    n = models.BigIntegerField()

    class Meta:
        db_table = "predictor_sample_day"
        constraints = [
            models.UniqueConstraint(fields=["day", "pool", "feature_version"], name="predictor_sample_day_once")
        ]


class RolledUp(models.Model):
    """As of when what is shown was computed: ``accuracy`` of the running hour, ``samples`` of today."""

    what = models.CharField(primary_key=True, max_length=20)
    at = models.DateTimeField()

    class Meta:
        db_table = "predictor_rolled_up"


class TouchedQuarter(models.Model):
    """A mark that events of ``quarter`` were booked after its rollup. One row per batch and quarter, never updated.

    Appending needs no lock, a rollup deletes the marks it can see before it reads, and a mark committed later stays:
    so a quarter without marks equals its events, and the report computes all others from the events themselves. Where a
    row covers a whole hour, all four quarters are marked together.
    """

    quarter = models.DateTimeField(db_index=True)

    class Meta:
        db_table = "usage_touched_quarter"


class TouchedHour(models.Model):
    """As ``TouchedQuarter``, of the hours of ``usage.accuracy``."""

    hour = models.DateTimeField(db_index=True)

    class Meta:
        db_table = "usage_touched_hour"


class UsagePrediction(models.Model):
    """What was predicted of one booked request, and how long its answer became. Kept ``partitions.KEPT_DAYS``.

    ``is_complete``: the answer came to its natural end; otherwise its length is only known to be larger. ``quantiles``
    and ``fallback``: output tokens at ``predict.baseline.LEVELS``. ``length_model``: digest, empty for none.
    """

    pk = models.CompositePrimaryKey("arrived_at", "event")
    arrived_at = models.DateTimeField()
    event = models.TextField()
    ended_at = models.DateTimeField()
    pool = models.TextField()
    tenant = models.TextField()
    key = models.TextField()
    output_tokens = models.BigIntegerField()
    is_complete = models.BooleanField()
    quantiles = ArrayField(models.IntegerField(), null=True)
    fallback = ArrayField(models.IntegerField(), null=True)
    source = models.TextField()
    fallback_reason = models.TextField(null=True)
    runaway = models.FloatField(null=True)
    length_model = models.TextField()

    class Meta:
        managed = False
        db_table = "usage_prediction"


class PredictorSample(models.Model):
    """Features of one booked request, for training; a bounded choice of them is kept (``usage.samples``)."""

    pk = models.CompositePrimaryKey("arrived_at", "event")
    arrived_at = models.DateTimeField()
    event = models.TextField()
    pool = models.TextField()
    tenant = models.TextField()
    feature_version = models.IntegerField()
    features = models.BinaryField()
    key = models.TextField()
    model = models.TextField()
    prompt_tokens = models.BigIntegerField()
    max_new_tokens = models.BigIntegerField(null=True)
    output_tokens = models.BigIntegerField()
    is_complete = models.BooleanField()

    class Meta:
        managed = False
        db_table = "predictor_sample"


class DroppedSample(models.Model):
    """How many predictions or features of one batch could not be kept, and why; their events were booked."""

    at = models.DateTimeField(db_index=True)
    router = models.TextField()
    pool = models.TextField()
    reason = models.TextField()
    n = models.PositiveIntegerField()

    class Meta:
        db_table = "predictor_dropped"


def _price_list_id() -> str:
    return new_id("prl")


class PriceList(Managed, Record):
    """Prices in one currency. Their days begin at midnight of ``timezone``."""

    id = models.CharField(primary_key=True, max_length=40, default=_price_list_id, editable=False)
    name = models.SlugField(max_length=63, unique=True)
    currency = models.CharField(max_length=3)
    timezone = models.CharField(max_length=64, default="UTC")

    class Meta:
        db_table = "usage_price_list"

    def __str__(self) -> str:
        return self.name


class Price(models.Model):
    """What 1,000,000 tokens of a model cost from ``valid_from`` on, in micro-currency; ``model`` "": of all others.

    ``from_at``: the instant at which that day begins, a full quarter of an hour, so that a rollup has one price.
    """

    price_list = models.ForeignKey(PriceList, on_delete=models.CASCADE, related_name="prices")
    model = models.CharField(max_length=200, blank=True)
    valid_from = models.DateField()
    from_at = models.DateTimeField()
    prompt_micro = models.BigIntegerField()
    output_micro = models.BigIntegerField()

    class Meta:
        db_table = "usage_price"
        constraints = [
            models.UniqueConstraint(fields=["price_list", "model", "from_at"], name="usage_price_once"),
            models.CheckConstraint(
                condition=models.Q(prompt_micro__gte=0, prompt_micro__lte=MAX_PRICE)
                & models.Q(output_micro__gte=0, output_micro__lte=MAX_PRICE),
                name="usage_price_range",
            ),
        ]


def _assignment_id() -> str:
    return new_id("pas")


class PriceAssignment(Managed, Record):
    """By which list a tenant pays from a day on, until its next assignment; ``price_list`` None: by none.

    ``from_at``: the instant at which that day began in the tenant's time zone when it was assigned, a full quarter of
    an hour.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_assignment_id, editable=False)
    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, related_name="+")
    price_list = models.ForeignKey(PriceList, null=True, on_delete=models.PROTECT, related_name="assigned")
    valid_from = models.DateField()
    from_at = models.DateTimeField()

    class Meta:
        db_table = "usage_price_assignment"
        constraints = [
            models.UniqueConstraint(fields=["tenant", "valid_from"], name="usage_price_assignment_once"),
        ]


def _statement_id() -> str:
    return new_id("stm")


class Statement(models.Model):
    """What a tenant used and owes for the time from ``from_at`` to ``to_at``, a month of its time zone. Never changes.

    ``amount_micro``: sum of its lines; ``currency`` "": nothing had a price.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_statement_id, editable=False)
    tenant = models.CharField(max_length=40)
    tenant_name = models.TextField()
    month = models.DateField()
    timezone = models.CharField(max_length=64)
    from_at = models.DateTimeField()
    to_at = models.DateTimeField()
    currency = models.CharField(max_length=3, blank=True)
    amount_micro = models.DecimalField(max_digits=38, decimal_places=0)
    closed_at = models.DateTimeField()

    class Meta:
        db_table = "usage_statement"
        constraints = [models.UniqueConstraint(fields=["tenant", "month"], name="usage_statement_once")]


class StatementLine(models.Model):
    """Usage of one model at one price; ``kind`` correction: of events that came after ``month`` was closed.

    ``valid_from``: since when the price held; None, and no amount, without a price.
    """

    statement = models.ForeignKey(Statement, on_delete=models.PROTECT, related_name="lines")
    number = models.PositiveIntegerField()
    kind = models.CharField(max_length=10)
    month = models.DateField()
    model = models.TextField()
    valid_from = models.DateField(null=True)
    prompt_micro = models.BigIntegerField(null=True)
    output_micro = models.BigIntegerField(null=True)
    requests = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    amount_micro = models.DecimalField(max_digits=38, decimal_places=0, null=True)

    class Meta:
        db_table = "usage_statement_line"
        constraints = [models.UniqueConstraint(fields=["statement", "number"], name="usage_statement_line_once")]


class Reconciliation(models.Model):
    """One comparison of rollups with the events of some UTC days.

    ``differences``: the first of ``n_different``, each with ``day``, ``key``, ``model``, ``books`` and ``events``.
    """

    ran_at = models.DateTimeField(db_index=True)
    from_day = models.DateField()
    to_day = models.DateField()
    n_events = models.BigIntegerField()
    n_different = models.IntegerField()
    differences = models.JSONField()

    class Meta:
        db_table = "usage_reconciliation"

    @property
    def differences_text(self) -> str:
        """What a line says of it."""
        if not self.n_different:
            return "rollups and events agree"
        return f"{self.n_different:,} difference{'' if self.n_different == 1 else 's'} between rollups and events"


class WeightChange(models.Model):
    """The weight of a tenant from ``at`` on, and its fairness group with that one's; written by triggers alone."""

    tenant = models.CharField(max_length=40)
    at = models.DateTimeField()
    weight = models.FloatField()
    group = models.TextField(null=True)
    group_weight = models.FloatField(null=True)

    class Meta:
        db_table = "usage_weight"
        indexes = [models.Index(fields=["tenant", "at"], name="usage_weight_by_tenant")]
