"""Which weights held when: kept by triggers, so that no way to change one is missed."""

from django.db import migrations, models

FORWARD = """
CREATE FUNCTION usage_note_weight() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO usage_weight (tenant, at, weight, "group", group_weight)
    SELECT NEW.id, clock_timestamp(), NEW.weight, joined.name, joined.weight
    FROM (SELECT 1) AS one LEFT JOIN tenants_group AS joined ON joined.id = NEW.group_id;
    RETURN NULL;
END $$;
CREATE FUNCTION usage_note_group_weight() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO usage_weight (tenant, at, weight, "group", group_weight)
    SELECT id, clock_timestamp(), weight, NEW.name, NEW.weight FROM tenants_tenant WHERE group_id = NEW.id;
    RETURN NULL;
END $$;
CREATE TRIGGER usage_tenant_made AFTER INSERT ON tenants_tenant
    FOR EACH ROW EXECUTE FUNCTION usage_note_weight();
CREATE TRIGGER usage_tenant_weighed AFTER UPDATE ON tenants_tenant FOR EACH ROW
    WHEN ((OLD.weight, OLD.group_id) IS DISTINCT FROM (NEW.weight, NEW.group_id))
    EXECUTE FUNCTION usage_note_weight();
CREATE TRIGGER usage_group_weighed AFTER UPDATE ON tenants_group FOR EACH ROW
    WHEN (OLD.weight IS DISTINCT FROM NEW.weight) EXECUTE FUNCTION usage_note_group_weight();
INSERT INTO usage_weight (tenant, at, weight, "group", group_weight)
    SELECT tenant.id, tenant.created_at, tenant.weight, joined.name, joined.weight
    FROM tenants_tenant AS tenant LEFT JOIN tenants_group AS joined ON joined.id = tenant.group_id;
"""
BACKWARD = """
DROP TRIGGER usage_group_weighed ON tenants_group;
DROP TRIGGER usage_tenant_weighed ON tenants_tenant;
DROP TRIGGER usage_tenant_made ON tenants_tenant;
DROP FUNCTION usage_note_group_weight();
DROP FUNCTION usage_note_weight();
"""


class Migration(migrations.Migration):
    dependencies = [("tenants", "0006_timezone"), ("usage", "0010_statements")]

    operations = [
        migrations.CreateModel(
            name="WeightChange",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant", models.CharField(max_length=40)),
                ("at", models.DateTimeField()),
                ("weight", models.FloatField()),
                ("group", models.TextField(null=True)),
                ("group_weight", models.FloatField(null=True)),
            ],
            options={
                "db_table": "usage_weight",
                "indexes": [models.Index(fields=["tenant", "at"], name="usage_weight_by_tenant")],
            },
        ),
        migrations.RunSQL(FORWARD, BACKWARD),
    ]
