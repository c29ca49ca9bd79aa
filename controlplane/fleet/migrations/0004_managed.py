from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0003_guard_and_brakes")]
    operations = [
        migrations.AddField(
            "pool", "managed_by", models.CharField(blank=True, db_index=True, default="", max_length=63)
        ),
    ]
