"""Hourly figures of how well output lengths were predicted."""

import django.contrib.postgres.fields
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("usage", "0004_predictions"),
    ]

    operations = [
        migrations.CreateModel(
            name="AccuracyHour",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("hour", models.DateTimeField()),
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
            ],
            options={
                "db_table": "predictor_hour",
                "indexes": [models.Index(fields=["hour"], name="predictor_hour_by_hour")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("pool", "tenant", "hour", "length_model", "predictor"), name="predictor_hour_once"
                    )
                ],
            },
        ),
    ]
