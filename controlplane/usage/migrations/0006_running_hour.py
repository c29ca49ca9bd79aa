"""Figures of the hours that still run, by minute, and how many samples there are, by day.

What was booked before is marked and counted, so that an upgraded console shows it at once.
"""

import django.contrib.postgres.fields
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("usage", "0005_accuracy"),
    ]

    operations = [
        migrations.CreateModel(
            name="RolledUp",
            fields=[
                ("what", models.CharField(max_length=20, primary_key=True, serialize=False)),
                ("at", models.DateTimeField()),
            ],
            options={
                "db_table": "predictor_rolled_up",
            },
        ),
        migrations.CreateModel(
            name="TouchedMinute",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("minute", models.DateTimeField(db_index=True)),
            ],
            options={
                "db_table": "predictor_touched_minute",
            },
        ),
        migrations.CreateModel(
            name="AccuracyMinute",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("pool", models.TextField()),
                ("tenant", models.TextField()),
                ("length_model", models.TextField()),
                ("predictor", models.TextField()),
                ("n", models.BigIntegerField()),
                ("n_cut", models.BigIntegerField()),
                ("n_model", models.BigIntegerField()),
                ("n_memory", models.BigIntegerField()),
                ("n_fallen_back", models.BigIntegerField()),
                ("tokens", models.BigIntegerField()),
                ("abs_error", models.FloatField()),
                ("pinball", models.FloatField()),
                ("covered_80", models.BigIntegerField()),
                ("covered_90", models.BigIntegerField()),
                ("pit", django.contrib.postgres.fields.ArrayField(base_field=models.FloatField(), size=None)),
                (
                    "ratio_buckets",
                    django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None),
                ),
                (
                    "ratio_counts",
                    django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), size=None),
                ),
                ("minute", models.DateTimeField()),
            ],
            options={
                "db_table": "predictor_minute",
                "indexes": [models.Index(fields=["minute"], name="predictor_minute_by_minute")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("pool", "tenant", "minute", "length_model", "predictor"), name="predictor_minute_once"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="PoolMedian",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("hour", models.DateTimeField()),
                ("pool", models.TextField()),
                ("median", models.BigIntegerField()),
            ],
            options={
                "db_table": "predictor_median",
                "constraints": [models.UniqueConstraint(fields=("hour", "pool"), name="predictor_median_once")],
            },
        ),
        migrations.CreateModel(
            name="SampleDay",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("day", models.DateField()),
                ("pool", models.TextField()),
                ("feature_version", models.IntegerField()),
                ("n", models.BigIntegerField()),
            ],
            options={
                "db_table": "predictor_sample_day",
                "constraints": [
                    models.UniqueConstraint(fields=("day", "pool", "feature_version"), name="predictor_sample_day_once")
                ],
            },
        ),
        migrations.RunSQL(
            """
            INSERT INTO predictor_touched_minute (minute)
                SELECT DISTINCT date_trunc('minute', arrived_at, 'UTC') FROM usage_prediction
                WHERE arrived_at >= now() - interval '3 hours';
            INSERT INTO predictor_sample_day (day, pool, feature_version, n)
                SELECT (arrived_at AT TIME ZONE 'UTC')::date AS day, pool, feature_version, count(*)
                FROM predictor_sample GROUP BY day, pool, feature_version;
            """,
            migrations.RunSQL.noop,
        ),
    ]
