from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("rollout", "0001_initial")]

    operations = [migrations.AddField("revision", "delta", models.BinaryField(null=True))]
