"""What a new grammar may stall a backend."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("tiers", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="tier",
            name="grammar_stall_s",
            field=models.FloatField(blank=True, null=True),
        ),
        migrations.AddConstraint(
            model_name="tier",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("grammar_stall_s__isnull", True),
                    models.Q(("grammar_stall_s__gte", 0), ("grammar_stall_s__lte", 60)),
                    _connector="OR",
                ),
                name="tier_grammar_stall_range",
            ),
        ),
    ]
