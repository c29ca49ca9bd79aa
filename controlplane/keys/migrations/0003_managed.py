from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("keys", "0002_limits")]
    operations = [
        migrations.AddField(
            "apikey", "managed_by", models.CharField(blank=True, db_index=True, default="", max_length=63)
        ),
    ]
