from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0004_managed")]
    operations = [
        migrations.AddField(
            "backend", "managed_by", models.CharField(blank=True, db_index=True, default="", max_length=63)
        ),
    ]
