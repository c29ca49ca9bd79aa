import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("tenants", "0007_managed_and_deleted")]
    operations = [
        migrations.AlterField(
            "tenant",
            "default_tier",
            models.ForeignKey(
                null=True, on_delete=django.db.models.deletion.PROTECT, related_name="+", to="tiers.tier"
            ),
        ),
        migrations.AddConstraint(
            "tenant",
            models.CheckConstraint(
                condition=models.Q(("default_tier__isnull", False), ("deleted_at__isnull", False), _connector="OR"),
                name="tenant_default_tier_given",
            ),
        ),
    ]
