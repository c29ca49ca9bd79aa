from django.db import migrations, models


class Migration(migrations.Migration):
    """What was kept without saying under which pepper was so under the first."""

    dependencies = [
        ("accounts", "0007_managed"),
    ]

    operations = [
        migrations.AddField(
            model_name="invitation",
            name="pepper_version",
            field=models.PositiveSmallIntegerField(default=1),
        ),
        migrations.RunSQL(
            r"UPDATE accounts_user SET totp_secret = '\x0001'::bytea || totp_secret WHERE totp_secret IS NOT NULL",
            "UPDATE accounts_user SET totp_secret = substring(totp_secret FROM 3) WHERE totp_secret IS NOT NULL",
        ),
        migrations.RunSQL(
            "UPDATE accounts_user SET recovery_digests = ARRAY(SELECT '1:' || unnest(recovery_digests))"
            " WHERE recovery_digests <> '{}'",
            "UPDATE accounts_user SET recovery_digests = ARRAY(SELECT split_part(unnest(recovery_digests), ':', 2))"
            " WHERE recovery_digests <> '{}'",
        ),
    ]
