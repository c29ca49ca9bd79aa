"""Many changes by one request: one transaction, one revision, and an answer for each of them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

import msgspec
from django.core.handlers.wsgi import WSGIRequest
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase
from django.urls import resolve
from drf_spectacular.utils import OpenApiExample, extend_schema
from rest_framework import serializers
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.common.actor import Actor, Scope
from controlplane.common.rest import PROBLEMS, StrictSerializer
from controlplane.common.use_case import use_case

MAX_OPERATIONS = 1_000
PREFIX = "/api/v1"
_OWN = ("HTTP_IF_MATCH", "HTTP_IDEMPOTENCY_KEY", "CONTENT_TYPE", "CONTENT_LENGTH", "QUERY_STRING")


class OperationSerializer(StrictSerializer):
    method = serializers.ChoiceField(choices=["POST", "PUT", "PATCH", "DELETE"])
    path = serializers.RegexField(
        r"\A/(?!batch\Z)[^?#]+\Z", max_length=500, help_text="Below /api/v1, such as `/tenants/ten_1`"
    )
    body = serializers.DictField(required=False, allow_null=True, help_text="What the operation takes by itself")
    if_match = serializers.CharField(max_length=40, required=False, help_text="Its header `If-Match`")
    idempotency_key = serializers.CharField(max_length=200, required=False, help_text="Its header `Idempotency-Key`")


class BatchSerializer(StrictSerializer):
    operations = serializers.ListField(child=OperationSerializer(), min_length=1, max_length=MAX_OPERATIONS)


class ResultSerializer(serializers.Serializer[Any]):
    status = serializers.IntegerField()
    body = serializers.DictField(allow_null=True, help_text="What the operation answers by itself; null for 204")


class BatchResultSerializer(serializers.Serializer[Any]):
    results = ResultSerializer(many=True, help_text="In the order of the operations")


class BatchView(APIView):
    """Changes in their order, each as if it came by itself, under the same token.

    What one of them refuses undoes that one only; the others are done. Routers learn of all of them by one revision;
    where that cannot be, nothing is done and the answer is 422.
    """

    # Each operation asks for its own scope; these only turn away who may change nothing.
    scopes: ClassVar[dict[str, tuple[Scope, ...]]] = {"post": (Scope.TENANT_WRITE, Scope.MEMBERS)}

    @extend_schema(
        operation_id="batch",
        request=BatchSerializer,
        responses={200: BatchResultSerializer, **PROBLEMS},
        examples=[
            OpenApiExample(
                "Two weights",
                {
                    "operations": [
                        {"method": "PATCH", "path": "/tenants/ten_1", "body": {"weight": 2}, "if_match": '"3"'},
                        {"method": "PATCH", "path": "/groups/grp_1", "body": {"weight": 5}},
                    ]
                },
                request_only=True,
            )
        ],
    )
    def post(self, request: Any) -> Response:
        actor: Actor = request.actor
        body = BatchSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        return Response(
            {"results": _run(actor=actor, request=request._request, asked=body.validated_data["operations"])}
        )


@use_case(scope=None)
def _run(*, actor: Actor, request: HttpRequest, asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for operation in asked:
        # The savepoint takes back what an operation did before it was refused, such as its idempotency record.
        with transaction.atomic():
            part = _part(request, operation)
            match = resolve(part.path_info)
            answer = match.func(part, *match.args, **match.kwargs)
            if answer.status_code >= 400:
                transaction.set_rollback(True)
        results.append({"status": answer.status_code, "body": _body(answer)})
    return results


def _part(request: HttpRequest, operation: Mapping[str, Any]) -> WSGIRequest:
    """The operation as a request of the same caller, who has passed the middleware already."""
    content = b"" if operation.get("body") is None else msgspec.json.encode(operation["body"])
    environ = {name: value for name, value in request.META.items() if name not in _OWN}
    environ |= {
        "REQUEST_METHOD": operation["method"],
        "PATH_INFO": PREFIX + unquote(operation["path"]),
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(content)),
        "wsgi.input": io.BytesIO(content),
    }
    for header, name in (("HTTP_IF_MATCH", "if_match"), ("HTTP_IDEMPOTENCY_KEY", "idempotency_key")):
        if name in operation:
            environ[header] = operation[name]
    part = WSGIRequest(environ)
    for name in ("user", "session", "_dont_enforce_csrf_checks"):
        if hasattr(request, name):
            setattr(part, name, getattr(request, name))
    return part


def _body(answer: HttpResponseBase) -> Any:
    if isinstance(answer, Response):
        return answer.data
    return json.loads(getattr(answer, "content", b"null") or b"null")
