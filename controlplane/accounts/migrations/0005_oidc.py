from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0004_second_factor"),
        ("tenants", "0008_deleted_without_tier"),
    ]

    operations = [
        migrations.AddField(
            model_name="user",
            name="is_role_by_group",
            field=models.BooleanField(default=False),
        ),
        migrations.AddField(
            model_name="user",
            name="oidc_issuer",
            field=models.TextField(blank=True, default=""),
        ),
        migrations.AddField(
            model_name="user",
            name="oidc_subject",
            field=models.TextField(blank=True, default=""),
        ),
        migrations.AddConstraint(
            model_name="user",
            constraint=models.UniqueConstraint(
                condition=models.Q(("oidc_subject", ""), _negated=True),
                fields=("oidc_issuer", "oidc_subject"),
                name="user_identity_once",
            ),
        ),
    ]
