"""Trained models: how they were judged, and which of them serves a pool since when."""

import django.db.models.deletion
from django.db import migrations, models

import controlplane.training.models


class Migration(migrations.Migration):
    dependencies = [
        ("training", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="dataset",
            name="counts",
            field=models.JSONField(default=dict),
        ),
        migrations.AddField(
            model_name="dataset",
            name="filters",
            field=models.JSONField(default=dict),
        ),
        migrations.AddField(
            model_name="dataset",
            name="heldout_from",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="job",
            name="from_at",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="job",
            name="pools",
            field=models.JSONField(default=list),
        ),
        migrations.AddField(
            model_name="job",
            name="to_at",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="job",
            name="trigger",
            field=models.CharField(
                choices=[("request", "Request"), ("schedule", "Schedule"), ("drift", "Drift")],
                default="request",
                max_length=16,
            ),
        ),
        migrations.AlterField(
            model_name="artifact",
            name="body",
            field=models.BinaryField(null=True),
        ),
        migrations.AlterField(
            model_name="job",
            name="kind",
            field=models.CharField(
                choices=[("baseline", "Baseline"), ("mixture", "Mixture")], default="baseline", max_length=40
            ),
        ),
        migrations.CreateModel(
            name="Evaluation",
            fields=[
                (
                    "id",
                    models.CharField(
                        default=controlplane.training.models._evaluation_id,
                        editable=False,
                        max_length=40,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("pool", models.CharField(max_length=40)),
                ("n_rows", models.PositiveIntegerField()),
                ("contenders", models.JSONField()),
                ("is_passed", models.BooleanField()),
                ("reason", models.TextField()),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "artifact",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="evaluations", to="training.artifact"
                    ),
                ),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="evaluations", to="training.job"
                    ),
                ),
            ],
            options={
                "indexes": [models.Index(fields=["artifact", "pool"], name="evaluation_by_artifact")],
                "constraints": [models.UniqueConstraint(fields=("job", "pool"), name="evaluation_once")],
            },
        ),
        migrations.CreateModel(
            name="Promotion",
            fields=[
                (
                    "id",
                    models.CharField(
                        default=controlplane.training.models._promotion_id,
                        editable=False,
                        max_length=40,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("pool", models.CharField(max_length=40)),
                (
                    "action",
                    models.CharField(
                        choices=[("promoted", "Promoted"), ("rolled_back", "Rolled Back"), ("demoted", "Demoted")],
                        max_length=16,
                    ),
                ),
                ("promoted_by", models.TextField()),
                ("reason", models.TextField()),
                ("is_forced", models.BooleanField(default=False)),
                ("metrics", models.JSONField(default=dict)),
                ("pinball", models.FloatField(null=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "artifact",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="promotions",
                        to="training.artifact",
                    ),
                ),
                (
                    "restores",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="training.promotion",
                    ),
                ),
            ],
            options={
                "indexes": [models.Index(fields=["pool", "-id"], name="promotion_of_pool")],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("action__in", ["promoted", "rolled_back", "demoted"])),
                        name="promotion_action_known",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("action", "promoted"), _negated=True),
                            ("artifact__isnull", False),
                            _connector="OR",
                        ),
                        name="promotion_of_something",
                    ),
                ],
            },
        ),
    ]
