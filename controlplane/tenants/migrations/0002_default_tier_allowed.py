"""The default tier is one of the tenant's tiers, checked at commit."""

from django.db import migrations

FORWARD = """
ALTER TABLE tenants_tenant ADD CONSTRAINT tenant_default_tier_allowed
    FOREIGN KEY (id, default_tier_id) REFERENCES tenants_tenanttier (tenant_id, tier_id)
    DEFERRABLE INITIALLY DEFERRED;
"""
BACKWARD = "ALTER TABLE tenants_tenant DROP CONSTRAINT tenant_default_tier_allowed;"


class Migration(migrations.Migration):
    dependencies = [("tenants", "0001_initial")]
    operations = [migrations.RunSQL(FORWARD, BACKWARD)]
