"""Monthly statements, which nothing changes once they are closed, and the results of reconciliations."""

import django.db.models.deletion
from django.db import migrations, models

import controlplane.usage.models

FORWARD = """
CREATE FUNCTION usage_statement_is_closed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a closed statement is not changed';
END $$;
CREATE TRIGGER usage_statement_closed BEFORE UPDATE OR DELETE ON usage_statement
    FOR EACH ROW EXECUTE FUNCTION usage_statement_is_closed();
CREATE TRIGGER usage_statement_line_closed BEFORE UPDATE OR DELETE ON usage_statement_line
    FOR EACH ROW EXECUTE FUNCTION usage_statement_is_closed();
"""
BACKWARD = """
DROP TRIGGER usage_statement_line_closed ON usage_statement_line;
DROP TRIGGER usage_statement_closed ON usage_statement;
DROP FUNCTION usage_statement_is_closed();
"""


class Migration(migrations.Migration):
    dependencies = [("usage", "0009_prices")]

    operations = [
        migrations.CreateModel(
            name="Statement",
            fields=[
                (
                    "id",
                    models.CharField(
                        default=controlplane.usage.models._statement_id,
                        editable=False,
                        max_length=40,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("tenant", models.CharField(max_length=40)),
                ("tenant_name", models.TextField()),
                ("month", models.DateField()),
                ("timezone", models.CharField(max_length=64)),
                ("from_at", models.DateTimeField()),
                ("to_at", models.DateTimeField()),
                ("currency", models.CharField(blank=True, max_length=3)),
                ("amount_micro", models.DecimalField(decimal_places=0, max_digits=38)),
                ("closed_at", models.DateTimeField()),
            ],
            options={
                "db_table": "usage_statement",
                "constraints": [models.UniqueConstraint(fields=("tenant", "month"), name="usage_statement_once")],
            },
        ),
        migrations.CreateModel(
            name="StatementLine",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.PositiveIntegerField()),
                ("kind", models.CharField(max_length=10)),
                ("month", models.DateField()),
                ("model", models.TextField()),
                ("valid_from", models.DateField(null=True)),
                ("prompt_micro", models.BigIntegerField(null=True)),
                ("output_micro", models.BigIntegerField(null=True)),
                ("requests", models.BigIntegerField()),
                ("prompt_tokens", models.BigIntegerField()),
                ("output_tokens", models.BigIntegerField()),
                ("amount_micro", models.DecimalField(decimal_places=0, max_digits=38, null=True)),
                (
                    "statement",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="lines", to="usage.statement"
                    ),
                ),
            ],
            options={
                "db_table": "usage_statement_line",
                "constraints": [
                    models.UniqueConstraint(fields=("statement", "number"), name="usage_statement_line_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="Reconciliation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("ran_at", models.DateTimeField(db_index=True)),
                ("from_day", models.DateField()),
                ("to_day", models.DateField()),
                ("n_events", models.BigIntegerField()),
                ("n_different", models.IntegerField()),
                ("differences", models.JSONField()),
            ],
            options={"db_table": "usage_reconciliation"},
        ),
        migrations.RunSQL(FORWARD, BACKWARD),
    ]
