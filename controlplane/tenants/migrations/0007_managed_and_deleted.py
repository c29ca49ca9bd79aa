from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("tenants", "0006_timezone")]
    operations = [
        migrations.AddField(
            "group", "managed_by", models.CharField(blank=True, db_index=True, default="", max_length=63)
        ),
        migrations.AddField(
            "tenant", "managed_by", models.CharField(blank=True, db_index=True, default="", max_length=63)
        ),
        migrations.AddField("tenant", "deleted_at", models.DateTimeField(blank=True, null=True)),
    ]
