"""People who operate the platform, and the API tokens they hold."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Lower

from controlplane.common.actor import Actor, Scope
from controlplane.common.ids import new_id
from controlplane.common.models import Credential, Managed, Versioned


def _user_id() -> str:
    return new_id("usr")


def _token_id() -> str:
    return new_id("tok")


def _invitation_id() -> str:
    return new_id("inv")


class Role(models.TextChoices):
    OWNER = "owner", "owner"
    OPERATOR = "operator", "operator"
    VIEWER = "viewer", "viewer"
    TENANT_ADMIN = "tenant_admin", "tenant admin"
    TENANT_MEMBER = "tenant_member", "tenant member"


TENANT_ROLES = (Role.TENANT_ADMIN.value, Role.TENANT_MEMBER.value)
ROLE_SCOPES: dict[str, frozenset[Scope]] = {
    Role.OWNER: frozenset({Scope.READ, Scope.WRITE, Scope.MEMBERS}),
    Role.OPERATOR: frozenset({Scope.READ, Scope.WRITE}),
    Role.VIEWER: frozenset({Scope.READ}),
    Role.TENANT_ADMIN: frozenset({Scope.TENANT_READ, Scope.TENANT_WRITE}),
    Role.TENANT_MEMBER: frozenset({Scope.TENANT_READ}),
}


def _role_fits_tenant(name: str) -> models.CheckConstraint:
    """Roles of a tenant have one, all others none."""
    of_tenant = models.Q(role__in=TENANT_ROLES)
    return models.CheckConstraint(
        condition=(of_tenant & models.Q(tenant__isnull=False)) | (~of_tenant & models.Q(tenant__isnull=True)), name=name
    )


class UserManager(BaseUserManager["User"]):
    def create_user(self, email: str, password: str | None = None, **fields: Any) -> User:
        user = self.model(email=email.strip().lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user


class User(Managed, AbstractBaseUser, Versioned):
    """A person; the email signs in. ``must_change_password`` follows a one-time password."""

    id = models.CharField(primary_key=True, max_length=40, default=_user_id, editable=False)
    email = models.EmailField(unique=True)
    name = models.TextField(blank=True, default="")
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.VIEWER)
    tenant = models.ForeignKey(
        "tenants.Tenant", null=True, blank=True, on_delete=models.CASCADE, related_name="members"
    )
    is_active = models.BooleanField(default=True)
    must_change_password = models.BooleanField(default=False)
    # The second factor: its secret as ``totp.sealed``, the step of the last code that was taken, what is left of the
    # recovery codes as digests.
    totp_secret = models.BinaryField(null=True, blank=True)
    totp_step = models.BigIntegerField(default=0)
    recovery_digests = ArrayField(models.TextField(), default=list, blank=True)
    # Who signs in elsewhere: issuer and subject there; whether the role follows the groups there.
    oidc_issuer = models.TextField(blank=True, default="")
    oidc_subject = models.TextField(blank=True, default="")
    is_role_by_group = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)

    objects: ClassVar[UserManager] = UserManager()

    USERNAME_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    class Meta:
        constraints = [
            models.UniqueConstraint(Lower("email"), name="user_email_once"),
            models.UniqueConstraint(
                fields=["oidc_issuer", "oidc_subject"], condition=~models.Q(oidc_subject=""), name="user_identity_once"
            ),
            models.CheckConstraint(condition=models.Q(role__in=Role.values), name="user_role_known"),
            _role_fits_tenant("user_role_fits_tenant"),
        ]

    @property
    def has_second_factor(self) -> bool:
        return self.totp_secret is not None

    @property
    def actor(self) -> Actor:
        return Actor(kind="user", id=self.id, label=self.email, scopes=ROLE_SCOPES[self.role], tenant=self.tenant_id)


class Invitation(Managed, Credential):
    """Opens one account for one email, once: by the link, or by signing in elsewhere under that verified email.

    The account carries on its ``managed_by``.
    """

    id = models.CharField(primary_key=True, max_length=40, default=_invitation_id, editable=False)
    email = models.EmailField()
    role = models.CharField(max_length=16, choices=Role.choices)
    tenant = models.ForeignKey(
        "tenants.Tenant", null=True, blank=True, on_delete=models.CASCADE, related_name="invitations"
    )
    invited_by = models.TextField()
    digest = models.CharField(max_length=64, unique=True)
    expires_at = models.DateTimeField()
    accepted_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=models.Q(role__in=Role.values), name="invitation_role_known"),
            _role_fits_tenant("invitation_role_fits_tenant"),
            # Of two invitations the second would be a surprise: the first is revoked before another is made.
            models.UniqueConstraint(
                Lower("email"),
                condition=models.Q(accepted_at__isnull=True, revoked_at__isnull=True),
                name="invitation_open_once",
            ),
        ]


class OperatorToken(Credential):
    """An API token of a person. It never gives more than its holder's role and tenant, and falls with the holder."""

    id = models.CharField(primary_key=True, max_length=40, default=_token_id, editable=False)
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="tokens")
    name = models.TextField()
    public_id = models.CharField(max_length=12, unique=True)
    digest = models.CharField(max_length=64, unique=True)
    scopes = ArrayField(models.TextField())
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=models.Q(scopes__contained_by=[s.value for s in Scope]) & ~models.Q(scopes=[]),
                name="token_scopes_known",
            )
        ]

    @property
    def actor(self) -> Actor:
        return Actor(
            kind="token",
            id=self.id,
            label=f"{self.user.email} by token {self.name}",
            scopes=frozenset(self.scopes) & ROLE_SCOPES[self.user.role],
            tenant=self.user.tenant_id,
        )
