"""What guards a pool, drained backends, cancelled requests and hazards."""

from django.db import migrations, models

import controlplane.fleet.models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0002_length_model"),
    ]

    operations = [
        migrations.CreateModel(
            name="Cancellation",
            fields=[
                ("version", models.PositiveIntegerField(default=1)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "id",
                    models.CharField(
                        default=controlplane.fleet.models._cancellation_id,
                        editable=False,
                        max_length=40,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("request", models.TextField()),
                ("reason", models.TextField()),
                ("cancelled_by", models.TextField()),
            ],
            options={
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="Hazard",
            fields=[
                ("version", models.PositiveIntegerField(default=1)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                ("id", models.TextField(primary_key=True, serialize=False)),
                ("at", models.DateTimeField()),
                ("kind", models.TextField()),
                ("router", models.TextField()),
                ("pool", models.TextField()),
                ("backend", models.TextField()),
                ("tenant", models.TextField()),
                ("key", models.TextField()),
                ("request", models.TextField()),
                ("digest", models.TextField()),
                ("refused_until", models.DateTimeField()),
                ("resolved_at", models.DateTimeField(null=True)),
                ("resolved_by", models.TextField(blank=True, default="")),
                ("note", models.TextField(blank=True, default="")),
            ],
        ),
        migrations.AddField(
            model_name="backend",
            name="is_drained",
            field=models.BooleanField(default=False),
        ),
        migrations.AddField(
            model_name="backend",
            name="takes_grammars",
            field=models.BooleanField(default=True),
        ),
        migrations.AddField(
            model_name="pool",
            name="is_guarded",
            field=models.BooleanField(default=True),
        ),
        migrations.AddField(
            model_name="pool",
            name="takes_grammars",
            field=models.BooleanField(default=True),
        ),
        migrations.AddField(
            model_name="pool",
            name="vocabulary",
            field=models.PositiveIntegerField(default=131072),
        ),
        migrations.AddConstraint(
            model_name="backend",
            constraint=models.CheckConstraint(
                condition=models.Q(("is_drained", False), ("is_cordoned", True), _connector="OR"),
                name="backend_drained_cordoned",
            ),
        ),
        migrations.AddConstraint(
            model_name="pool",
            constraint=models.CheckConstraint(
                condition=models.Q(("vocabulary__gte", 1), ("vocabulary__lte", 10000000)), name="pool_vocabulary_range"
            ),
        ),
        migrations.AddIndex(
            model_name="hazard",
            index=models.Index(condition=models.Q(("resolved_at__isnull", True)), fields=["id"], name="hazard_open"),
        ),
        migrations.AddIndex(
            model_name="hazard",
            index=models.Index(fields=["at"], name="hazard_by_time"),
        ),
        migrations.AddConstraint(
            model_name="hazard",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("resolved_at__isnull", True), ("resolved_by", "")),
                    models.Q(("resolved_at__isnull", False), models.Q(("resolved_by", ""), _negated=True)),
                    _connector="OR",
                ),
                name="hazard_resolved_whole",
            ),
        ),
    ]
