"""The hash chain: entries of before get their links, once; the triggers refuse that to everybody afterwards."""

import django.contrib.postgres.fields
import django.contrib.postgres.indexes
import django.db.models.functions.datetime
from django.db import migrations, models

from controlplane.audit.chain import COLUMNS, FIRST, next_hash

BATCH = 2_000

ROWS_OFF = "ALTER TABLE audit_auditentry DISABLE TRIGGER audit_append_only_rows"
ROWS_ON = "ALTER TABLE audit_auditentry ENABLE TRIGGER audit_append_only_rows"
HEADS = """
CREATE TRIGGER audit_heads_append_only_rows BEFORE UPDATE OR DELETE ON audit_audithead
    FOR EACH ROW EXECUTE FUNCTION audit_refuse_change();
CREATE TRIGGER audit_heads_append_only_table BEFORE TRUNCATE ON audit_audithead
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse_change();
"""
HEADS_BACKWARD = """
DROP TRIGGER audit_heads_append_only_table ON audit_audithead;
DROP TRIGGER audit_heads_append_only_rows ON audit_audithead;
"""


def link(apps, schema_editor):
    """Batch by batch, so that a long log takes little memory."""
    entries = apps.get_model("audit", "AuditEntry").objects.order_by("id")
    last, head = 0, FIRST
    while rows := list(entries.filter(id__gt=last).values_list(*COLUMNS)[:BATCH]):
        links = []
        for values in rows:
            head = next_hash(head, values)
            links.append((values[0], head))
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(
                "UPDATE audit_auditentry SET hash = link.hash"
                " FROM unnest(%s::bigint[], %s::text[]) AS link(id, hash) WHERE audit_auditentry.id = link.id",
                [[id for id, _ in links], [hash for _, hash in links]],
            )
        last = rows[-1][0]


class Migration(migrations.Migration):
    dependencies = [("audit", "0002_append_only")]
    operations = [
        migrations.AddField(
            "auditentry",
            "bulk",
            django.contrib.postgres.fields.ArrayField(
                base_field=models.TextField(), blank=True, default=list, size=None
            ),
        ),
        migrations.AddField("auditentry", "hash", models.CharField(default="", max_length=64), preserve_default=False),
        migrations.RunSQL(ROWS_OFF, ROWS_ON),
        migrations.RunPython(link, migrations.RunPython.noop),
        migrations.RunSQL(ROWS_ON, ROWS_OFF),
        migrations.AddIndex("auditentry", models.Index(fields=["actor_id", "-id"], name="audit_by_actor")),
        migrations.AddIndex(
            "auditentry", django.contrib.postgres.indexes.GinIndex(fields=["bulk"], name="audit_by_bulk")
        ),
        migrations.CreateModel(
            "AuditHead",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("entry", models.BigIntegerField()),
                ("hash", models.CharField(max_length=64)),
            ],
            {"ordering": ["-id"]},
        ),
        migrations.RunSQL(HEADS, HEADS_BACKWARD),
    ]
