"""Tenants whose running requests end as well."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("tenants", "0003_fairness_groups"),
        ("tiers", "0002_grammar_stall"),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name="tenant",
            name="tenant_state_known",
        ),
        migrations.AlterField(
            model_name="tenant",
            name="state",
            field=models.CharField(
                choices=[("active", "Active"), ("suspended", "Suspended"), ("stopped", "Stopped")],
                default="active",
                max_length=16,
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["active", "suspended", "stopped"])), name="tenant_state_known"
            ),
        ),
    ]
