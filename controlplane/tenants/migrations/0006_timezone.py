"""Tenants have a time zone, whose months their statements cover."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("tenants", "0005_limits")]

    operations = [
        migrations.AddField(model_name="tenant", name="timezone", field=models.CharField(default="UTC", max_length=64)),
    ]
