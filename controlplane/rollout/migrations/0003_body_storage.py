"""Bodies are written and read whole, once each: compressing 30 MB of JSON costs the database more than the disk."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("rollout", "0002_revision_delta")]

    operations = [
        migrations.RunSQL(
            "ALTER TABLE rollout_revision ALTER COLUMN body SET STORAGE EXTERNAL",
            "ALTER TABLE rollout_revision ALTER COLUMN body SET STORAGE EXTENDED",
        )
    ]
