"""Tokens by tenant, key, day and month. What was booked of this month and the one before is counted here.

Nothing may book meanwhile, nor afterwards by the program of before: it would add to no total.
"""

from django.db import migrations, models

FORWARD = """
ALTER TABLE usage_total SET (fillfactor = 70);
-- Filled and emptied all the time: its size says nothing of what there is to clean.
ALTER TABLE usage_added SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);
LOCK TABLE usage_event IN SHARE MODE;
WITH by_day AS (
    SELECT (arrived_at AT TIME ZONE 'UTC')::date AS day, tenant, key,
           sum(prompt_tokens::numeric + output_tokens) AS tokens
    FROM usage_event
    WHERE arrived_at >= date_trunc('month', date_trunc('month', now(), 'UTC') - interval '1 day', 'UTC')
    GROUP BY day, tenant, key
), by_scope AS (
    SELECT day, tenant AS scope, tokens FROM by_day
    UNION ALL
    SELECT day, key, tokens FROM by_day
), by_span AS (
    SELECT to_char(day, 'YYYY-MM-DD') AS span, scope, tokens FROM by_scope
    UNION ALL
    SELECT to_char(day, 'YYYY-MM'), scope, tokens FROM by_scope
)
INSERT INTO usage_total (span, scope, tokens, changed_at_us)
SELECT span, scope, least(sum(tokens), 4000000000000000000)::int8,
       (extract(epoch FROM clock_timestamp()) * 1000000)::int8
FROM by_span WHERE length(scope) BETWEEN 1 AND 40 GROUP BY span, scope;
"""


class Migration(migrations.Migration):
    dependencies = [
        ("usage", "0006_running_hour"),
    ]

    operations = [
        migrations.CreateModel(
            name="UsageTotal",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "span", "scope", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("span", models.TextField()),
                ("scope", models.TextField()),
                ("tokens", models.BigIntegerField()),
                ("changed_at_us", models.BigIntegerField()),
            ],
            options={
                "db_table": "usage_total",
            },
        ),
        migrations.CreateModel(
            name="UsageAdded",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("day", models.DateField()),
                ("scope", models.TextField()),
                ("tokens", models.BigIntegerField()),
            ],
            options={
                "db_table": "usage_added",
            },
        ),
        migrations.RunSQL(FORWARD, migrations.RunSQL.noop),
    ]
