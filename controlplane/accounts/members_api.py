"""REST of members and invitations: of the platform for owners, of the own tenant for its admins."""

from __future__ import annotations

from typing import Any, ClassVar

from django.urls import reverse
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from controlplane.accounts import actions, invitations, queries, second_factor
from controlplane.accounts.models import Invitation, Role, User
from controlplane.common.actor import Scope
from controlplane.common.rest import (
    IDEMPOTENCY_KEY,
    IF_MATCH,
    PROBLEMS,
    ReadViewSet,
    StrictSerializer,
    example,
    managed_by_field,
)

READS = (Scope.TENANT_READ, Scope.MEMBERS)
_TENANT_HELP = "The tenant of a tenant admin or member; null for roles of the platform"
_NAMED_HELP = f"Id or short name. {_TENANT_HELP}"


class MemberChangesSerializer(StrictSerializer):
    role = serializers.ChoiceField(choices=Role.choices, required=False)
    tenant = serializers.CharField(max_length=63, required=False, allow_null=True, help_text=_NAMED_HELP)
    name = serializers.CharField(max_length=200, required=False, allow_blank=True)
    is_active = serializers.BooleanField(required=False, help_text="false: signed out, and refused until it is true")
    managed_by = managed_by_field()


class MemberSerializer(serializers.ModelSerializer[User]):
    tenant = serializers.CharField(source="tenant_id", allow_null=True, help_text=_TENANT_HELP)
    tenant_slug = serializers.CharField(source="tenant.slug", allow_null=True, default=None)
    has_second_factor = serializers.BooleanField(read_only=True)

    class Meta:
        model = User
        fields = [
            "id", "email", "name", "role", "tenant", "tenant_slug", "is_active", "has_second_factor", "last_login",
            "managed_by", "version", "created_at",
        ]  # fmt: skip


class NewPasswordSerializer(MemberSerializer):
    password = serializers.CharField(help_text="Shown this once; the next sign-in replaces it")

    class Meta(MemberSerializer.Meta):
        fields = [*MemberSerializer.Meta.fields, "password"]


@extend_schema_view(
    list=extend_schema(
        responses={200: MemberSerializer(many=True), **PROBLEMS},
        parameters=[
            OpenApiParameter("q", str, description="A part of the email or name, or a tenant's short name"),
        ],
    ),
    retrieve=extend_schema(responses={200: MemberSerializer, **PROBLEMS}),
    partial_update=extend_schema(
        request=MemberChangesSerializer, responses={200: MemberSerializer, **PROBLEMS}, parameters=[IF_MATCH]
    ),
    destroy=extend_schema(responses={204: None, **PROBLEMS}, parameters=[IF_MATCH]),
)
class MemberViewSet(ReadViewSet):
    what = "member"
    scopes: ClassVar[dict[str, Scope | tuple[Scope, ...]]] = {
        "list": READS,
        "retrieve": READS,
        "partial_update": Scope.MEMBERS,
        "destroy": Scope.MEMBERS,
        "reset_password": Scope.MEMBERS,
        "reset_second_factor": Scope.MEMBERS,
    }
    queryset = User.objects.none()
    serializer_class = MemberSerializer
    sorted_by = queries.SORTED_BY

    def get_queryset(self) -> Any:
        return queries.members(actor=self.actor, search=self.request.query_params.get("q", "").strip())

    def partial_update(self, request: Any, pk: str) -> Response:
        changes: Any = self.checked(MemberChangesSerializer, is_partial=True)
        actions.update_user(actor=self.actor, user_id=pk, expected_version=self.expected_version(), **changes)
        return self.shown(self.found(pk))

    def destroy(self, request: Any, pk: str) -> Response:
        """Remove the account with its tokens and sessions; the audit log keeps what was done under it."""
        actions.remove_user(actor=self.actor, user_id=pk, expected_version=self.expected_version())
        return Response(status=204)

    @extend_schema(request=None, responses={200: NewPasswordSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"], url_path="reset-password")
    def reset_password(self, request: Any, pk: str) -> Response:
        """A one-time password in place of the present one."""
        password = actions.reset_password(actor=self.actor, user_id=pk, expected_version=self.expected_version())
        return self.shown(self.found(pk), password=password)

    @extend_schema(request=None, responses={200: MemberSerializer, **PROBLEMS}, parameters=[IF_MATCH])
    @action(detail=True, methods=["post"], url_path="reset-second-factor")
    def reset_second_factor(self, request: Any, pk: str) -> Response:
        """For a lost device: the password alone signs in until another one is enrolled."""
        second_factor.reset_second_factor(actor=self.actor, user_id=pk, expected_version=self.expected_version())
        return self.shown(self.found(pk))


class NewInvitationSerializer(StrictSerializer):
    email = serializers.CharField(max_length=254)
    role = serializers.ChoiceField(choices=Role.choices)
    tenant = serializers.CharField(max_length=63, required=False, allow_null=True, help_text=_NAMED_HELP)
    managed_by = managed_by_field()


class InvitationSerializer(serializers.ModelSerializer[Invitation]):
    tenant = serializers.CharField(source="tenant_id", allow_null=True, help_text=_TENANT_HELP)
    tenant_slug = serializers.CharField(source="tenant.slug", allow_null=True, default=None)

    class Meta:
        model = Invitation
        fields = [
            "id", "email", "role", "tenant", "tenant_slug", "invited_by", "expires_at", "accepted_at", "revoked_at",
            "managed_by", "created_at",
        ]  # fmt: skip


class SentInvitationSerializer(InvitationSerializer):
    """An invitation with its link. A repeated create shows null there."""

    link = serializers.CharField(allow_null=True, help_text="Opens the account once; shown this once, kept nowhere")

    class Meta(InvitationSerializer.Meta):
        fields = [*InvitationSerializer.Meta.fields, "link"]


@extend_schema_view(
    list=extend_schema(responses={200: InvitationSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: InvitationSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewInvitationSerializer,
        responses={201: SentInvitationSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("A team's admin", email="ann@example.com", role="tenant_admin", tenant="chatbot")],
    ),
)
class InvitationViewSet(ReadViewSet):
    what = "invitation"
    scopes: ClassVar[dict[str, Scope | tuple[Scope, ...]]] = {
        "list": READS,
        "retrieve": READS,
        "create": Scope.MEMBERS,
        "revoke": Scope.MEMBERS,
    }
    queryset = Invitation.objects.none()
    serializer_class = InvitationSerializer

    def get_queryset(self) -> Any:
        return queries.invitations(actor=self.actor)

    def create(self, request: Any) -> Response:
        """Nothing is sent: hand the link to whom it is for."""
        body = self.checked(NewInvitationSerializer)

        def send() -> tuple[Invitation, dict[str, Any]]:
            invitation, text = invitations.invite(actor=self.actor, **body)
            return invitation, {"link": request.build_absolute_uri(reverse("console:invitation", args=[text]))}

        return self.created(send, secret_fields=("link",))

    @extend_schema(request=None, responses={200: InvitationSerializer, **PROBLEMS})
    @action(detail=True, methods=["post"])
    def revoke(self, request: Any, pk: str) -> Response:
        """Close it; whoever has the link is refused."""
        invitations.revoke_invitation(actor=self.actor, invitation_id=pk)
        return self.shown(self.found(pk))
