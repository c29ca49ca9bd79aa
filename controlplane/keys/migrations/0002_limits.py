"""Limits and quotas of keys."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0003_guard_and_brakes"),
        ("keys", "0001_initial"),
        ("tenants", "0004_stopped"),
        ("tiers", "0002_grammar_stall"),
    ]

    operations = [
        migrations.AddField(
            model_name="apikey",
            name="concurrent",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="apikey",
            name="requests_per_minute",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="apikey",
            name="soft_tokens_per_day",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="apikey",
            name="soft_tokens_per_month",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="apikey",
            name="tokens_per_day",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="apikey",
            name="tokens_per_minute",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="apikey",
            name="tokens_per_month",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddConstraint(
            model_name="apikey",
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
                name="apikey_limits_range",
            ),
        ),
        migrations.AddConstraint(
            model_name="apikey",
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
                name="apikey_soft_below_hard",
            ),
        ),
    ]
