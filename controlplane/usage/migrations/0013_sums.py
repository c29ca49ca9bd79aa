"""Sums of each quarter over all tenants and keys, by price list, kept beside its rollups; made of them by the next job.

Whatever changes who pays by which list marks the quarters its tenants have rollups of; it waits for a rollup under way,
whose rows its statement could not see.
"""

from datetime import date, timedelta

import django.contrib.postgres.fields
from django.db import migrations, models

FORWARD = """
CREATE TABLE usage_sum (
    at timestamptz NOT NULL,
    minutes smallint NOT NULL,
    price_list text NOT NULL,
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
    PRIMARY KEY (at, price_list, pool, model, tier)
) PARTITION BY RANGE (at);
CREATE INDEX usage_quarter_by_key ON usage_quarter (key, at);
INSERT INTO usage_stale_sum (quarter) SELECT DISTINCT at FROM usage_quarter;
CREATE FUNCTION usage_mark_sums() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(6712323); -- that of rollups
    INSERT INTO usage_stale_sum (quarter)
    SELECT DISTINCT at FROM usage_quarter WHERE tenant IN (SELECT tenant_id FROM changed);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_payer_made AFTER INSERT ON usage_price_assignment
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION usage_mark_sums();
CREATE TRIGGER usage_payer_changed AFTER UPDATE ON usage_price_assignment
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION usage_mark_sums();
CREATE TRIGGER usage_payer_gone AFTER DELETE ON usage_price_assignment
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION usage_mark_sums();
"""
BACKWARD = """
DROP TRIGGER usage_payer_gone ON usage_price_assignment;
DROP TRIGGER usage_payer_changed ON usage_price_assignment;
DROP TRIGGER usage_payer_made ON usage_price_assignment;
DROP FUNCTION usage_mark_sums();
DROP INDEX usage_quarter_by_key;
DROP TABLE usage_sum;
"""


def make_months(apps, schema_editor):
    """A partition of every month that rollups have."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT relid::text FROM pg_partition_tree('usage_quarter') WHERE isleaf AND level > 0")
        for (name,) in cursor.fetchall():
            year, month = divmod(int(name.rpartition("_")[2]), 100)
            first = date(year, month, 1)
            after = (first + timedelta(days=32)).replace(day=1)
            cursor.execute(
                f"CREATE TABLE usage_sum_{first:%Y%m} PARTITION OF usage_sum "
                f"FOR VALUES FROM ('{first} 00:00+00') TO ('{after} 00:00+00')"
            )


_GROUP = ("at", "price_list", "pool", "model", "tier")
_SUMS = (
    "requests", "completed", "prompt_tokens", "output_tokens", "recomputed_tokens", "resumed_tokens", "kv_token_ms",
)  # fmt: skip
_MODEL = migrations.CreateModel(
    name="UsageSum",
    fields=[
        (
            "pk",
            models.CompositePrimaryKey(*_GROUP, blank=True, editable=False, primary_key=True, serialize=False),
        ),
        ("at", models.DateTimeField()),
        ("minutes", models.SmallIntegerField()),
        *((name, models.TextField()) for name in _GROUP[1:]),
        *((name, models.BigIntegerField()) for name in _SUMS),
        (
            "ttft_buckets",
            django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None),
        ),
        (
            "ttft_counts",
            django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), size=None),
        ),
    ],
    options={"db_table": "usage_sum", "managed": False},
)


class Migration(migrations.Migration):
    dependencies = [("usage", "0012_price_assignments")]

    operations = [
        migrations.CreateModel(
            name="StaleSum",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("quarter", models.DateTimeField(db_index=True)),
            ],
            options={"db_table": "usage_stale_sum"},
        ),
        migrations.RunSQL(FORWARD, BACKWARD, state_operations=[_MODEL]),
        migrations.RunPython(make_months, migrations.RunPython.noop),
    ]
