import django.contrib.postgres.fields
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0003_roles"),
    ]

    operations = [
        migrations.AddField(
            model_name="user",
            name="recovery_digests",
            field=django.contrib.postgres.fields.ArrayField(
                base_field=models.TextField(), blank=True, default=list, size=None
            ),
        ),
        migrations.AddField(
            model_name="user",
            name="totp_secret",
            field=models.BinaryField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="user",
            name="totp_step",
            field=models.BigIntegerField(default=0),
        ),
    ]
