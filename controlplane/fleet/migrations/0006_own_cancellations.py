from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0005_managed_backends")]
    operations = [
        migrations.AddField("cancellation", "tenant", models.CharField(blank=True, default="", max_length=40)),
    ]
