"""Price lists, and by which of them tenants pay."""

import django.db.models.deletion
from django.db import migrations, models

import controlplane.usage.models


class Migration(migrations.Migration):
    dependencies = [("tenants", "0006_timezone"), ("usage", "0008_quarters")]

    operations = [
        migrations.CreateModel(
            name="PriceList",
            fields=[
                ("version", models.PositiveIntegerField(default=1)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "id",
                    models.CharField(
                        default=controlplane.usage.models._price_list_id,
                        editable=False,
                        max_length=40,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("name", models.SlugField(max_length=63, unique=True)),
                ("currency", models.CharField(max_length=3)),
                ("timezone", models.CharField(default="UTC", max_length=64)),
            ],
            options={"db_table": "usage_price_list"},
        ),
        migrations.CreateModel(
            name="Price",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("model", models.CharField(blank=True, max_length=200)),
                ("valid_from", models.DateField()),
                ("from_at", models.DateTimeField()),
                ("prompt_micro", models.BigIntegerField()),
                ("output_micro", models.BigIntegerField()),
                (
                    "price_list",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="prices", to="usage.pricelist"
                    ),
                ),
            ],
            options={
                "db_table": "usage_price",
                "constraints": [
                    models.UniqueConstraint(fields=("price_list", "model", "from_at"), name="usage_price_once"),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("prompt_micro__gte", 0),
                            ("prompt_micro__lte", 1000000000000),
                            ("output_micro__gte", 0),
                            ("output_micro__lte", 1000000000000),
                        ),
                        name="usage_price_range",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="TenantPrices",
            fields=[
                (
                    "tenant",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="+",
                        serialize=False,
                        to="tenants.tenant",
                    ),
                ),
                (
                    "price_list",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="assigned", to="usage.pricelist"
                    ),
                ),
            ],
            options={"db_table": "usage_tenant_prices"},
        ),
    ]
