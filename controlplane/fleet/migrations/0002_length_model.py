"""The trained model of output lengths that was promoted for a pool."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="pool",
            name="length_model_artifact",
            field=models.CharField(blank=True, default="", max_length=40),
        ),
        migrations.AddField(
            model_name="pool",
            name="length_model_digest",
            field=models.CharField(blank=True, default="", max_length=64),
        ),
        migrations.AddField(
            model_name="pool",
            name="length_model_kind",
            field=models.CharField(blank=True, default="", max_length=40),
        ),
        migrations.AddConstraint(
            model_name="pool",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("length_model_artifact", ""), ("length_model_digest", ""), ("length_model_kind", "")),
                    models.Q(
                        models.Q(("length_model_artifact", ""), _negated=True),
                        models.Q(("length_model_digest", ""), _negated=True),
                        models.Q(("length_model_kind", ""), _negated=True),
                    ),
                    _connector="OR",
                ),
                name="pool_length_model_whole",
            ),
        ),
    ]
