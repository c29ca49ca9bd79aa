import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0001_initial"), ("keys", "0003_managed")]
    operations = [
        migrations.AlterField(
            "apikey",
            "default_pool",
            models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="+",
                to="fleet.pool",
            ),
        ),
        migrations.AddConstraint(
            "apikey",
            models.CheckConstraint(
                condition=models.Q(("default_pool__isnull", False), ("revoked_at__isnull", False), _connector="OR"),
                name="key_pool_until_revoked",
            ),
        ),
    ]
