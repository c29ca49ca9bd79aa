"""Fairness groups, and the group of a tenant."""

import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenants.models


class Migration(migrations.Migration):
    dependencies = [
        ("tenants", "0002_default_tier_allowed"),
    ]

    operations = [
        migrations.CreateModel(
            name="Group",
            fields=[
                ("version", models.PositiveIntegerField(default=1)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "id",
                    models.CharField(
                        default=controlplane.tenants.models._group_id,
                        editable=False,
                        max_length=40,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("name", models.SlugField(max_length=63, unique=True)),
                ("weight", models.FloatField(default=1.0)),
            ],
            options={
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("weight__gte", 0.001), ("weight__lte", 10000)), name="group_weight_range"
                    )
                ],
            },
        ),
        migrations.AddField(
            model_name="tenant",
            name="group",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="tenants",
                to="tenants.group",
            ),
        ),
    ]
