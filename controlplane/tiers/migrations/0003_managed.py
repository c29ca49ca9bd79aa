from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("tiers", "0002_grammar_stall")]
    operations = [
        migrations.AddField(
            "tier", "managed_by", models.CharField(blank=True, db_index=True, default="", max_length=63)
        ),
    ]
