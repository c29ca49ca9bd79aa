from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0006_version")]
    operations = [
        migrations.AddField(model, "managed_by", models.CharField(blank=True, db_index=True, default="", max_length=63))
        for model in ("user", "invitation")
    ]
