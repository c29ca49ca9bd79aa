"""Predictions and training samples beside the books, partitioned like them (``usage.partitions``)."""

import django.contrib.postgres.fields
from django.db import migrations, models

FORWARD = """
CREATE TABLE usage_prediction (
    arrived_at timestamptz NOT NULL,
    event text NOT NULL,
    ended_at timestamptz NOT NULL,
    pool text NOT NULL,
    tenant text NOT NULL,
    key text NOT NULL,
    output_tokens bigint NOT NULL CHECK (output_tokens >= 1),
    is_complete boolean NOT NULL,
    quantiles integer[],
    fallback integer[],
    source text NOT NULL,
    fallback_reason text,
    runaway double precision,
    length_model text NOT NULL,
    PRIMARY KEY (arrived_at, event)
) PARTITION BY RANGE (arrived_at);
CREATE INDEX usage_prediction_finished ON usage_prediction (pool, tenant, ended_at) WHERE is_complete;
CREATE INDEX usage_prediction_by_model ON usage_prediction (pool, length_model, arrived_at) WHERE length_model <> '';
CREATE TABLE predictor_sample (
    arrived_at timestamptz NOT NULL,
    event text NOT NULL,
    pool text NOT NULL,
    tenant text NOT NULL,
    feature_version integer NOT NULL,
    features bytea NOT NULL,
    key text NOT NULL,
    model text NOT NULL,
    prompt_tokens bigint NOT NULL,
    max_new_tokens bigint,
    output_tokens bigint NOT NULL CHECK (output_tokens >= 1),
    is_complete boolean NOT NULL,
    -- Counting and choosing read the index alone; the features would be forty times as much.
    PRIMARY KEY (arrived_at, event) INCLUDE (pool, tenant, feature_version)
) PARTITION BY RANGE (arrived_at);
ALTER TABLE predictor_sample ALTER COLUMN features SET STORAGE EXTERNAL;
"""
BACKWARD = "DROP TABLE usage_prediction; DROP TABLE predictor_sample;"


class Migration(migrations.Migration):
    dependencies = [("usage", "0003_explanations")]

    operations = [
        migrations.RunSQL(
            FORWARD,
            BACKWARD,
            state_operations=[
                migrations.CreateModel(
                    name="UsagePrediction",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "arrived_at", "event", blank=True, editable=False, primary_key=True, serialize=False
                            ),
                        ),
                        ("arrived_at", models.DateTimeField()),
                        ("event", models.TextField()),
                        ("ended_at", models.DateTimeField()),
                        ("pool", models.TextField()),
                        ("tenant", models.TextField()),
                        ("key", models.TextField()),
                        ("output_tokens", models.BigIntegerField()),
                        ("is_complete", models.BooleanField()),
                        (
                            "quantiles",
                            django.contrib.postgres.fields.ArrayField(
                                base_field=models.IntegerField(), null=True, size=None
                            ),
                        ),
                        (
                            "fallback",
                            django.contrib.postgres.fields.ArrayField(
                                base_field=models.IntegerField(), null=True, size=None
                            ),
                        ),
                        ("source", models.TextField()),
                        ("fallback_reason", models.TextField(null=True)),
                        ("runaway", models.FloatField(null=True)),
                        ("length_model", models.TextField()),
                    ],
                    options={"db_table": "usage_prediction", "managed": False},
                ),
                migrations.CreateModel(
                    name="PredictorSample",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "arrived_at", "event", blank=True, editable=False, primary_key=True, serialize=False
                            ),
                        ),
                        ("arrived_at", models.DateTimeField()),
                        ("event", models.TextField()),
                        ("pool", models.TextField()),
                        ("tenant", models.TextField()),
                        ("feature_version", models.IntegerField()),
                        ("features", models.BinaryField()),
                        ("key", models.TextField()),
                        ("model", models.TextField()),
                        ("prompt_tokens", models.BigIntegerField()),
                        ("max_new_tokens", models.BigIntegerField(null=True)),
                        ("output_tokens", models.BigIntegerField()),
                        ("is_complete", models.BooleanField()),
                    ],
                    options={"db_table": "predictor_sample", "managed": False},
                ),
            ],
        ),
        migrations.CreateModel(
            name="DroppedSample",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("at", models.DateTimeField(db_index=True)),
                ("router", models.TextField()),
                ("pool", models.TextField()),
                ("reason", models.TextField()),
                ("n", models.PositiveIntegerField()),
            ],
            options={"db_table": "predictor_dropped"},
        ),
    ]
