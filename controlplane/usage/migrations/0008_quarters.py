"""Rollups by quarter of an hour, partitioned by month, in place of hours.

A row of an hour becomes the row of its first quarter and covers the hour (``minutes``). Hours of the last 90 days, whose
events are there, are marked to be computed again by quarters; older rows stay as they are, and say 0 of what hours did
not hold. Days of events from 91 days ago on are dropped by the next clean-up.
"""

from datetime import date, timedelta

import django.contrib.postgres.fields
from django.db import migrations, models

FORWARD = """
CREATE TABLE usage_quarter (
    at timestamptz NOT NULL,
    minutes smallint NOT NULL CHECK (minutes IN (15, 60)),
    tenant text NOT NULL,
    key text NOT NULL,
    pool text NOT NULL,
    model text NOT NULL,
    tier text NOT NULL,
    requests bigint NOT NULL,
    completed bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    output_tokens bigint NOT NULL,
    recomputed_tokens bigint NOT NULL,
    resumed_tokens bigint NOT NULL,
    kv_token_ms bigint NOT NULL,
    ttft_buckets integer[] NOT NULL,
    ttft_counts bigint[] NOT NULL,
    PRIMARY KEY (at, tenant, key, pool, model, tier)
) PARTITION BY RANGE (at);
CREATE INDEX usage_quarter_by_tenant ON usage_quarter (tenant, at);
CREATE INDEX usage_quarter_wide ON usage_quarter (at) WHERE minutes = 60;
"""
BACKWARD = "DROP TABLE usage_quarter;"
MOVE = """
INSERT INTO usage_quarter
    SELECT hour, 60, tenant, key, pool, model, tier, requests, completed, prompt_tokens, output_tokens,
           recomputed_tokens, 0, 0, ttft_buckets, ttft_counts FROM usage_hour;
INSERT INTO usage_touched_quarter (quarter)
    SELECT hour + n * interval '15 minutes'
    FROM (SELECT hour FROM usage_hour WHERE hour > now() - interval '90 days'
          UNION SELECT hour FROM usage_touched_hour) AS hours CROSS JOIN generate_series(0, 3) AS n;
"""
MOVE_BACK = """
INSERT INTO usage_touched_hour (hour)
    SELECT DISTINCT date_trunc('hour', quarter, 'UTC') FROM usage_touched_quarter;
INSERT INTO usage_hour (hour, tenant, key, pool, model, tier, requests, completed, prompt_tokens, output_tokens,
                        recomputed_tokens, ttft_buckets, ttft_counts)
    SELECT sums.*, coalesce(buckets, '{}'), coalesce(counts, '{}') FROM (
        SELECT date_trunc('hour', at, 'UTC') AS hour, tenant, key, pool, model, tier, sum(requests)::bigint,
               sum(completed)::bigint, sum(prompt_tokens)::bigint, sum(output_tokens)::bigint,
               sum(recomputed_tokens)::bigint
        FROM usage_quarter GROUP BY 1, 2, 3, 4, 5, 6
    ) AS sums LEFT JOIN (
        SELECT hour, tenant, key, pool, model, tier, array_agg(bucket) AS buckets, array_agg(n) AS counts FROM (
            SELECT date_trunc('hour', at, 'UTC') AS hour, tenant, key, pool, model, tier, bucket, sum(n)::bigint AS n
            FROM usage_quarter, unnest(ttft_buckets, ttft_counts) AS pair(bucket, n) GROUP BY 1, 2, 3, 4, 5, 6, 7
        ) AS each GROUP BY 1, 2, 3, 4, 5, 6
    ) AS histograms USING (hour, tenant, key, pool, model, tier);
"""


def make_months(apps, schema_editor):
    """A partition of every month that hours have rows of."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT DISTINCT date_trunc('month', hour, 'UTC')::timestamptz FROM usage_hour")
        months = {date(at.year, at.month, 1) for (at,) in cursor.fetchall()}
        for month in sorted(months):
            after = (month + timedelta(days=32)).replace(day=1)
            cursor.execute(
                f"CREATE TABLE usage_quarter_{month:%Y%m} PARTITION OF usage_quarter "
                f"FOR VALUES FROM ('{month} 00:00+00') TO ('{after} 00:00+00')"
            )


class Migration(migrations.Migration):
    dependencies = [("usage", "0007_totals")]

    operations = [
        migrations.RunSQL(
            FORWARD,
            BACKWARD,
            state_operations=[
                migrations.CreateModel(
                    name="UsageQuarter",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "at",
                                "tenant",
                                "key",
                                "pool",
                                "model",
                                "tier",
                                blank=True,
                                editable=False,
                                primary_key=True,
                                serialize=False,
                            ),
                        ),
                        ("at", models.DateTimeField()),
                        ("minutes", models.SmallIntegerField()),
                        ("tenant", models.TextField()),
                        ("key", models.TextField()),
                        ("pool", models.TextField()),
                        ("model", models.TextField()),
                        ("tier", models.TextField()),
                        ("requests", models.BigIntegerField()),
                        ("completed", models.BigIntegerField()),
                        ("prompt_tokens", models.BigIntegerField()),
                        ("output_tokens", models.BigIntegerField()),
                        ("recomputed_tokens", models.BigIntegerField()),
                        ("resumed_tokens", models.BigIntegerField()),
                        ("kv_token_ms", models.BigIntegerField()),
                        (
                            "ttft_buckets",
                            django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None),
                        ),
                        (
                            "ttft_counts",
                            django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), size=None),
                        ),
                    ],
                    options={"db_table": "usage_quarter", "managed": False},
                )
            ],
        ),
        migrations.CreateModel(
            name="TouchedQuarter",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("quarter", models.DateTimeField(db_index=True)),
            ],
            options={"db_table": "usage_touched_quarter"},
        ),
        migrations.RunPython(make_months, migrations.RunPython.noop),
        migrations.RunSQL(MOVE, MOVE_BACK),
        migrations.DeleteModel(name="UsageHour"),
    ]
