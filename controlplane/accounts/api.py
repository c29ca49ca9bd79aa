"""REST of operators' API tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from controlplane.accounts import actions, queries
from controlplane.accounts.models import OperatorToken
from controlplane.common.actor import Scope
from controlplane.common.rest import IDEMPOTENCY_KEY, PROBLEMS, ReadViewSet, StrictSerializer, example


class NewTokenSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200)
    scopes = serializers.ListField(
        child=serializers.ChoiceField(choices=[s.value for s in Scope]), min_length=1, max_length=len(Scope)
    )
    expires_at = serializers.DateTimeField(required=False, allow_null=True)


class TokenSerializer(serializers.ModelSerializer[OperatorToken]):
    user = serializers.CharField(source="user_id")
    user_email = serializers.CharField(source="user.email")
    scopes = serializers.ListField(child=serializers.CharField())

    class Meta:
        model = OperatorToken
        fields = [
            "id", "user", "user_email", "name", "public_id", "scopes", "expires_at", "revoked_at", "last_used_at",
            "created_at",
        ]  # fmt: skip


class IssuedTokenSerializer(TokenSerializer):
    """A token with its text. A repeated create shows null there."""

    token = serializers.CharField(allow_null=True, help_text="Shown this once and kept nowhere")

    class Meta(TokenSerializer.Meta):
        fields = [*TokenSerializer.Meta.fields, "token"]


@extend_schema_view(
    list=extend_schema(responses={200: TokenSerializer(many=True), **PROBLEMS}),
    retrieve=extend_schema(responses={200: TokenSerializer, **PROBLEMS}),
    create=extend_schema(
        request=NewTokenSerializer,
        responses={201: IssuedTokenSerializer, **PROBLEMS},
        parameters=[IDEMPOTENCY_KEY],
        examples=[example("Reads all of it", name="dashboard", scopes=["admin.read"])],
    ),
)
class TokenViewSet(ReadViewSet):
    what = "token"
    scopes: ClassVar[dict[str, Scope]] = {
        "list": Scope.TENANT_READ,
        "retrieve": Scope.TENANT_READ,
        "create": Scope.TENANT_WRITE,
        "revoke": Scope.TENANT_WRITE,
    }
    queryset = OperatorToken.objects.none()
    serializer_class = TokenSerializer

    def get_queryset(self) -> Any:
        return queries.tokens(actor=self.actor)

    def create(self, request: Any) -> Response:
        body = self.checked(NewTokenSerializer)

        def issue() -> tuple[OperatorToken, dict[str, Any]]:
            token, text = actions.issue_token(actor=self.actor, user=request.user, **body)
            return token, {"token": text}

        return self.created(issue, secret_fields=("token",))

    @extend_schema(request=None, responses={200: TokenSerializer, **PROBLEMS})
    @action(detail=True, methods=["post"])
    def revoke(self, request: Any, pk: str) -> Response:
        """Revoke at once."""
        actions.revoke_token(actor=self.actor, token_id=pk)
        return self.shown(self.found(pk))
