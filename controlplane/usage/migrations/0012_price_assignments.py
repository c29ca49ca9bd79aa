"""By which list a tenant pays from which day on. What was assigned until now holds for everything, as it did."""

import django.db.models.deletion
from django.db import migrations, models

import controlplane.usage.models

COPY = """
INSERT INTO usage_price_assignment
    (id, tenant_id, price_list_id, valid_from, from_at, managed_by, version, created_at, updated_at)
SELECT 'pas_' || substr(tenant_id, 5), tenant_id, price_list_id, '2000-01-01', '2000-01-01T00:00Z', '', 1, now(), now()
FROM usage_tenant_prices
"""
BACK = """
INSERT INTO usage_tenant_prices (tenant_id, price_list_id)
SELECT DISTINCT ON (tenant_id) tenant_id, price_list_id FROM usage_price_assignment
WHERE price_list_id IS NOT NULL ORDER BY tenant_id, from_at DESC
"""


class Migration(migrations.Migration):
    dependencies = [("tenants", "0006_timezone"), ("usage", "0011_weights")]

    operations = [
        migrations.AddField(
            "pricelist", "managed_by", models.CharField(blank=True, db_index=True, default="", max_length=63)
        ),
        migrations.CreateModel(
            name="PriceAssignment",
            fields=[
                ("managed_by", models.CharField(blank=True, db_index=True, default="", max_length=63)),
                ("version", models.PositiveIntegerField(default=1)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "id",
                    models.CharField(
                        default=controlplane.usage.models._assignment_id,
                        editable=False,
                        max_length=40,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("valid_from", models.DateField()),
                ("from_at", models.DateTimeField()),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="+", to="tenants.tenant"
                    ),
                ),
                (
                    "price_list",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="assigned",
                        to="usage.pricelist",
                    ),
                ),
            ],
            options={
                "db_table": "usage_price_assignment",
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "valid_from"), name="usage_price_assignment_once")
                ],
            },
        ),
        migrations.RunSQL(COPY, BACK),
        migrations.DeleteModel("TenantPrices"),
    ]
