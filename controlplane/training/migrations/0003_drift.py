"""What the drift monitor saw last, by pool."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("training", "0002_promotions"),
    ]

    operations = [
        migrations.CreateModel(
            name="DriftState",
            fields=[
                ("pool", models.CharField(max_length=40, primary_key=True, serialize=False)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("no_model", "No Model"),
                            ("too_few", "Too Few"),
                            ("ok", "Ok"),
                            ("watching", "Watching"),
                            ("drifting", "Drifting"),
                        ],
                        max_length=16,
                    ),
                ),
                ("since", models.DateTimeField()),
                ("looked_at", models.DateTimeField()),
                ("length_model", models.CharField(blank=True, default="", max_length=64)),
                ("n", models.PositiveIntegerField(default=0)),
                ("loss", models.FloatField(null=True)),
                ("reference", models.FloatField(null=True)),
                ("ratio", models.FloatField(null=True)),
                ("miscalibration", models.FloatField(null=True)),
                ("reason", models.TextField()),
            ],
        ),
    ]
