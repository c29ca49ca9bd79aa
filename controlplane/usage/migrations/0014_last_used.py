from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("usage", "0013_sums")]

    operations = [
        migrations.AddField(model_name="usageadded", name="last_at", field=models.DateTimeField(null=True)),
    ]
