"""Limits and quotas of tenants."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("tenants", "0004_stopped"),
        ("tiers", "0002_grammar_stall"),
    ]

    operations = [
        migrations.AddField(
            model_name="tenant",
            name="concurrent",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="tenant",
            name="requests_per_minute",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="tenant",
            name="soft_tokens_per_day",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="tenant",
            name="soft_tokens_per_month",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="tenant",
            name="tokens_per_day",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="tenant",
            name="tokens_per_minute",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="tenant",
            name="tokens_per_month",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("concurrent__isnull", True),
                        models.Q(("concurrent__gte", 0), ("concurrent__lte", 1000000000000000)),
                        _connector="OR",
                    ),
                    models.Q(
                        ("requests_per_minute__isnull", True),
                        models.Q(("requests_per_minute__gte", 0), ("requests_per_minute__lte", 1000000000000000)),
                        _connector="OR",
                    ),
                    models.Q(
                        ("tokens_per_minute__isnull", True),
                        models.Q(("tokens_per_minute__gte", 0), ("tokens_per_minute__lte", 1000000000000000)),
                        _connector="OR",
                    ),
                    models.Q(
                        ("soft_tokens_per_day__isnull", True),
                        models.Q(("soft_tokens_per_day__gte", 0), ("soft_tokens_per_day__lte", 1000000000000000)),
                        _connector="OR",
                    ),
                    models.Q(
                        ("tokens_per_day__isnull", True),
                        models.Q(("tokens_per_day__gte", 0), ("tokens_per_day__lte", 1000000000000000)),
                        _connector="OR",
                    ),
                    models.Q(
                        ("soft_tokens_per_month__isnull", True),
                        models.Q(("soft_tokens_per_month__gte", 0), ("soft_tokens_per_month__lte", 1000000000000000)),
                        _connector="OR",
                    ),
                    models.Q(
                        ("tokens_per_month__isnull", True),
                        models.Q(("tokens_per_month__gte", 0), ("tokens_per_month__lte", 1000000000000000)),
                        _connector="OR",
                    ),
                ),
                name="tenant_limits_range",
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("soft_tokens_per_day__isnull", True),
                        ("tokens_per_day__isnull", True),
                        ("soft_tokens_per_day__lte", models.F("tokens_per_day")),
                        _connector="OR",
                    ),
                    models.Q(
                        ("soft_tokens_per_month__isnull", True),
                        ("tokens_per_month__isnull", True),
                        ("soft_tokens_per_month__lte", models.F("tokens_per_month")),
                        _connector="OR",
                    ),
                ),
                name="tenant_soft_below_hard",
            ),
        ),
    ]
