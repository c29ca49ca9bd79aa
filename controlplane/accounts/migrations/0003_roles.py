from __future__ import annotations

from typing import Any

import django.db.models.deletion
import django.db.models.functions.text
from django.conf import settings
from django.db import migrations, models

import controlplane.accounts.models


def first_operator_becomes_owner(apps: Any, schema_editor: Any) -> None:
    """Members need somebody who may invite them: of those who could do everything so far, the longest-standing."""
    operators = apps.get_model("accounts", "User").objects.filter(role="operator").order_by("-is_active", "id")
    if (first := operators.first()) is not None:
        first.role = "owner"
        first.save(update_fields=["role"])


def owners_become_operators(apps: Any, schema_editor: Any) -> None:
    users = apps.get_model("accounts", "User").objects
    users.filter(role__startswith="tenant_").delete()
    users.filter(role="owner").update(role="operator")


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0002_role_alone_decides"),
        ("tenants", "0005_limits"),
    ]

    operations = [
        migrations.CreateModel(
            name="Invitation",
            fields=[
                (
                    "id",
                    models.CharField(
                        default=controlplane.accounts.models._invitation_id,
                        editable=False,
                        max_length=40,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("email", models.EmailField(max_length=254)),
                (
                    "role",
                    models.CharField(
                        choices=[
                            ("owner", "owner"),
                            ("operator", "operator"),
                            ("viewer", "viewer"),
                            ("tenant_admin", "tenant admin"),
                            ("tenant_member", "tenant member"),
                        ],
                        max_length=16,
                    ),
                ),
                ("invited_by", models.TextField()),
                ("digest", models.CharField(max_length=64, unique=True)),
                ("expires_at", models.DateTimeField()),
                ("accepted_at", models.DateTimeField(blank=True, null=True)),
                ("revoked_at", models.DateTimeField(blank=True, null=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.RemoveConstraint(
            model_name="operatortoken",
            name="token_scopes_known",
        ),
        migrations.RemoveConstraint(
            model_name="user",
            name="user_role_known",
        ),
        migrations.AddField(
            model_name="user",
            name="tenant",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="members",
                to="tenants.tenant",
            ),
        ),
        migrations.AlterField(
            model_name="operatortoken",
            name="user",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE, related_name="tokens", to=settings.AUTH_USER_MODEL
            ),
        ),
        migrations.AlterField(
            model_name="user",
            name="role",
            field=models.CharField(
                choices=[
                    ("owner", "owner"),
                    ("operator", "operator"),
                    ("viewer", "viewer"),
                    ("tenant_admin", "tenant admin"),
                    ("tenant_member", "tenant member"),
                ],
                default="viewer",
                max_length=16,
            ),
        ),
        migrations.RunPython(first_operator_becomes_owner, owners_become_operators),
        migrations.AddConstraint(
            model_name="operatortoken",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    (
                        "scopes__contained_by",
                        ["admin.read", "admin.write", "admin.members", "tenant.read", "tenant.write"],
                    ),
                    models.Q(("scopes", []), _negated=True),
                ),
                name="token_scopes_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="user",
            constraint=models.CheckConstraint(
                condition=models.Q(("role__in", ["owner", "operator", "viewer", "tenant_admin", "tenant_member"])),
                name="user_role_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="user",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("role__in", ("tenant_admin", "tenant_member")), ("tenant__isnull", False)),
                    models.Q(
                        models.Q(("role__in", ("tenant_admin", "tenant_member")), _negated=True),
                        ("tenant__isnull", True),
                    ),
                    _connector="OR",
                ),
                name="user_role_fits_tenant",
            ),
        ),
        migrations.AddField(
            model_name="invitation",
            name="tenant",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="invitations",
                to="tenants.tenant",
            ),
        ),
        migrations.AddConstraint(
            model_name="invitation",
            constraint=models.CheckConstraint(
                condition=models.Q(("role__in", ["owner", "operator", "viewer", "tenant_admin", "tenant_member"])),
                name="invitation_role_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="invitation",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("role__in", ("tenant_admin", "tenant_member")), ("tenant__isnull", False)),
                    models.Q(
                        models.Q(("role__in", ("tenant_admin", "tenant_member")), _negated=True),
                        ("tenant__isnull", True),
                    ),
                    _connector="OR",
                ),
                name="invitation_role_fits_tenant",
            ),
        ),
        migrations.AddConstraint(
            model_name="invitation",
            constraint=models.UniqueConstraint(
                django.db.models.functions.text.Lower("email"),
                condition=models.Q(("accepted_at__isnull", True), ("revoked_at__isnull", True)),
                name="invitation_open_once",
            ),
        ),
    ]
