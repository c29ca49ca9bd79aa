"""REST of the peppers' versions."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.common.actor import Actor, Scope
from controlplane.common.rest import PROBLEMS
from controlplane.keys import peppers


class PepperSerializer(serializers.Serializer[Any]):
    version = serializers.IntegerField()
    is_here = serializers.BooleanField(help_text="The control plane has it; false: what is under it opens nothing")
    is_newest = serializers.BooleanField(help_text="New digests are made under it")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        counts = {kind: serializers.IntegerField(help_text="That hang on it") for kind in peppers.KINDS}
        return {**super().get_fields(), **counts}


class PeppersSerializer(serializers.Serializer[Any]):
    versions = PepperSerializer(many=True)


class PeppersView(APIView):
    """Versions of the pepper, and how much hangs on each: one on which nothing does can be taken out of the files."""

    @extend_schema(operation_id="peppers", responses={200: PeppersSerializer, **PROBLEMS})
    def get(self, request: Any) -> Response:
        actor: Actor = request.actor
        actor.require(Scope.READ)
        newest = settings.KEY_PEPPER_VERSION
        rows = [
            {"version": v, "is_here": v in settings.KEY_PEPPERS, "is_newest": v == newest, **counts}
            for v, counts in peppers.in_use().items()
        ]
        return Response(PeppersSerializer({"versions": rows}).data)
