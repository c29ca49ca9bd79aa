"""What every operation of ``/api/v1`` owes, checked over all that the OpenAPI document names; none is listed here."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from django.db import transaction

from controlplane.accounts.models import Role, User
from controlplane.common.actor import Actor, Scope
from controlplane.training.actions import start_job
from controlplane.training.models import Promotion
from tests.integration.controlplane.test_rest import MUTATIONS, path_of
from tests.support.control_plane import (
    ApiClient,
    api_client,
    book,
    make_backend,
    make_hazard,
    make_key,
    make_length_model,
    make_pool,
    make_tenant,
    make_user,
    usage_event,
)
from tests.support.world import make_world

pytestmark = pytest.mark.django_db
WITHOUT_VERSION = {
    "/tokens/{id}": "only ever revoked",
    "/tokens/{id}/revoke": "only ever revoked",
    "/invitations/{id}/revoke": "only ever revoked or used",
    "/training-jobs/{id}/cancel": "its state decides: 409",
    "/jobs/{id}/cancel": "its state decides: 409",
    "/jobs/{id}/retry": "its state decides: 409",
    "/tenants/{tenant_id}/price-list": "puts a whole, twice is once",
}
"""What names one object and takes no ``If-Match``, and why it may."""


@dataclass(frozen=True)
class Operation:
    method: str
    route: str
    said: dict[str, Any]

    def parameters(self, where: str) -> dict[str, dict[str, Any]]:
        return {p["name"]: p for p in self.said.get("parameters", ()) if p["in"] == where}

    @property
    def has_body(self) -> bool:
        return "requestBody" in self.said

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and {"limit", "cursor"} <= self.parameters("query").keys()


@functools.cache
def document() -> dict[str, Any]:
    said: dict[str, Any] = ApiClient(None).send("GET", "/openapi.json").json()
    return said


class Everything:
    """A client that may do all, one row of each kind, and the operations of the document."""

    def __init__(self, system: Actor, operator: User) -> None:
        self.world = world = make_world(system, operator)
        self.api = api_client(make_user(role=Role.OWNER), "admin.write", "admin.members")
        self.document = document()
        event = usage_event(tenant=world.ids["tenants"], pool=world.ids["pools"])
        book(event)
        job = start_job(actor=system).id
        world.ids.update(
            {
                "training-jobs": job, "jobs": job, "promotions": str(Promotion.objects.get().pk),
                "requests": event.request, "revisions": "1",
            }
        )  # fmt: skip

    def operations(self) -> Iterator[Operation]:
        for path, operations in self.document["paths"].items():
            for method, said in operations.items():
                yield Operation(method.upper(), path.removeprefix("/api/v1"), said)

    def address(self, operation: Operation) -> str:
        kind = operation.route.split("/")[1]
        values = {"tenant_id": self.world.ids["tenants"], "key_id": self.world.ids["keys"]}
        found = re.sub(
            r"\{(\w+)\}", lambda m: values.get(m[1], self.world.ids.get(kind, "missing")), operation.route
        )  # fmt: skip
        needed = [f"{n}={self.value(n, p)}" for n, p in operation.parameters("query").items() if p.get("required")]
        return f"{found}?{'&'.join(needed)}" if needed else found

    def value(self, name: str, parameter: dict[str, Any]) -> str:
        """Something that a parameter takes."""
        schema = parameter["schema"]
        if "enum" in schema:
            return str(schema["enum"][0])
        by_name = {"limit": "1", "pool": self.world.ids["pools"], "tenant": self.world.ids["tenants"], "tz": "UTC",
                   "group_by": "tenant"}  # fmt: skip
        by_format = {"date": "2026-01-01", "date-time": "2026-01-01T00:00:00Z"}
        return by_name.get(name) or by_format.get(schema.get("format", ""), "x")


@pytest.fixture
def all_of_it(system: Actor, operator: User) -> Everything:
    return Everything(system, operator)


def assert_problem(answer: Any, status: int | None = None) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/problem+json", answer.content
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == answer.status_code
    assert {"type", "title", "status", "code", "detail"} <= problem.keys() <= {"errors", *problem}
    if status is not None:
        assert answer.status_code == status, answer.content
    if answer.status_code == 422:
        assert problem["errors"]
        assert all(isinstance(m, str) for ms in problem["errors"].values() for m in ms)
    return problem


def test_parameters_that_are_not_documented_are_refused_by_name_and_the_others_are_known(
    all_of_it: Everything,
) -> None:
    for operation in all_of_it.operations():
        address = all_of_it.address(operation)
        joined = "&" if "?" in address else "?"
        known = operation.parameters("query")
        if operation.method == "GET":
            for name, parameter in known.items():
                answer = all_of_it.api.send("GET", f"{address}{joined}{name}={all_of_it.value(name, parameter)}")
                assert b"unknown parameter" not in answer.getvalue(), (operation, name)
                refused = all_of_it.api.send("GET", f"{operation.route}?{name}=x%00")
                assert assert_problem(refused, 422)["errors"] == {name: ["must not hold NUL"]}, operation
        with transaction.atomic():
            answer = all_of_it.api.send(operation.method, f"{address}{joined}colour=red", {})
            transaction.set_rollback(True)
        (message,) = assert_problem(answer, 422)["errors"]["colour"]
        assert "'colour'" in message
        assert all(name in message for name in known), (operation, message)


def test_lists_are_paged_by_cursors_in_one_order(all_of_it: Everything, system: Actor) -> None:
    tenant, pool = make_tenant(system), make_pool(system)
    make_backend(system, pool)
    make_key(system, tenant, pool)
    make_length_model("another")
    make_hazard(tenant=tenant.id)
    n_paged = 0
    for operation in all_of_it.operations():
        if not operation.is_list:
            continue
        address = all_of_it.address(operation)
        joined = "&" if "?" in address else "?"
        rows = "rows" if operation.route == "/usage/report" else "results"
        whole = all_of_it.api.send("GET", f"{address}{joined}limit=1000").json()
        assert whole["next"] is None, operation
        seen: list[Any] = []
        cursor = ""
        while cursor is not None:
            page = all_of_it.api.send(
                "GET", f"{address}{joined}limit=1{f'&cursor={cursor}' if cursor else ''}"
            ).json()  # fmt: skip
            assert len(page[rows]) <= 1, operation
            seen += page[rows]
            cursor = page["next"]
        assert seen == whole[rows], operation
        n_paged += len(seen) > 1
        for bad in ("limit=0", "limit=1001", "limit=x", "cursor=!!"):
            answer = all_of_it.api.send("GET", f"{address}{joined}{bad}")
            assert bad.partition("=")[0] in assert_problem(answer, 422)["errors"], (operation, bad)
    assert n_paged >= 10


def test_creates_answer_once_under_an_idempotency_key(all_of_it: Everything) -> None:
    creating = [o for o in all_of_it.operations() if o.method == "POST" and "201" in o.said["responses"]]
    assert len(creating) >= 12
    for operation in creating:
        assert "Idempotency-Key" in operation.parameters("header"), operation.route
        make_body, _ = MUTATIONS["POST", operation.route]
        body = make_body(all_of_it.world)
        changed = {**(body or {}), "name": "other"}
        with transaction.atomic():
            if operation.route in ("/training-jobs", "/jobs"):
                all_of_it.api.send("POST", f"/training-jobs/{all_of_it.world.ids['training-jobs']}/cancel")
            path = path_of("POST", operation.route, all_of_it.world)
            first, second = [all_of_it.api.send("POST", path, body, idempotency_key="a key") for _ in range(2)]
            other = all_of_it.api.send("POST", path, changed, idempotency_key="a key")
            transaction.set_rollback(True)
        assert (first.status_code, second.status_code) == (201, 201), (operation.route, first.content)
        assert second.headers["idempotency-replayed"] == "true"
        secrets = {name for name, value in second.json().items() if value is None and first.json()[name] is not None}
        assert secrets <= {"key", "token", "link"}
        assert {**second.json(), **{name: first.json()[name] for name in secrets}} == first.json()
        assert_problem(other, 422)


def test_changes_of_one_object_honour_if_match(all_of_it: Everything) -> None:
    """Without ``If-Match`` a change holds whatever the version is, as ``test_rest`` shows by driving each so."""
    exceptions = set()
    for operation in all_of_it.operations():
        if operation.method == "GET" or "{" not in operation.route or operation.route.startswith("/requests"):
            continue
        if "If-Match" not in operation.parameters("header"):
            exceptions.add(operation.route)
            continue
        make_body, _ = MUTATIONS[operation.method, operation.route]
        for header, status in (('"987654"', 412), ("yesterday", 422)):
            with transaction.atomic():
                path = path_of(operation.method, operation.route, all_of_it.world)
                answer = all_of_it.api.send(operation.method, path, make_body(all_of_it.world), if_match=header)
                transaction.set_rollback(True)
            assert_problem(answer, status)
    assert exceptions <= set(WITHOUT_VERSION)


def test_refusals_are_problems_everywhere(all_of_it: Everything, system: Actor) -> None:
    key = make_key(system, make_tenant(system), make_pool(system))[1]
    strangers = [ApiClient(None), ApiClient("flt_wrong"), ApiClient(key)]
    methods: dict[str, set[str]] = {}
    for operation in all_of_it.operations():
        address = all_of_it.address(operation)
        methods.setdefault(operation.route, set()).add(operation.method)
        for stranger in strangers:
            answer = stranger.send(operation.method, address, {})
            assert_problem(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        for status in ("400", "401", "403", "404", "405", "409", "412", "415", "422"):
            assert "application/problem+json" in operation.said["responses"][status]["content"], operation
        if "{" in operation.route:
            lost = re.sub(r"\{\w+\}", "nobody_has_this_id", operation.route)
            with transaction.atomic():
                answer = all_of_it.api.send(operation.method, lost, {"reason": "x", "note": "x"})
                transaction.set_rollback(True)
            if answer.status_code >= 400:
                assert_problem(answer)
                assert answer.status_code in (404, 422), operation
            else:
                assert operation.route.endswith("/cancel"), operation  # of a request that no router tells of yet
        if not operation.has_body:
            continue
        full = f"/api/v1{address}"
        send = all_of_it.api.generic
        assert_problem(send(operation.method, full, b'{"a":', content_type="application/json"), 400)
        assert_problem(send(operation.method, full, b"a=b", content_type="application/x-www-form-urlencoded"), 415)
        assert_problem(send(operation.method, full, b"[]", content_type="application/json"), 422)
        unknown = all_of_it.api.send(operation.method, address, {"colour": "red"})
        assert assert_problem(unknown, 422)["errors"]["colour"] == ["unknown field"], operation
    for route, served in methods.items():
        address = all_of_it.address(Operation("", route, {}))
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - served:
            answer = all_of_it.api.send(method, address, {})
            assert_problem(answer, 405)
            assert set(answer.headers["allow"].split(", ")) >= served
    assert_problem(all_of_it.api.send("GET", "/nothing/here"), 404)
    reader = api_client(make_user(), "admin.read")
    assert_problem(reader.send("POST", "/tiers", {}), 403)


INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z\Z")


def texts(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for name, each in value.items():
                if name not in ("before", "after"):  # of audit entries: as their hashes were made of them
                    yield from texts(each)
        case list():
            for each in value:
                yield from texts(each)
        case str():
            yield value


def test_instants_are_utc_and_one_object_has_its_version_as_etag(all_of_it: Everything) -> None:
    n_instants = n_versions = 0
    for operation in all_of_it.operations():
        if operation.method != "GET":
            continue
        answer = all_of_it.api.send("GET", all_of_it.address(operation))
        if answer.status_code != 200 or answer.headers["content-type"] != "application/json":
            assert answer.status_code in (200, 404), (operation, answer.content)
            continue
        body = json.loads(answer.getvalue())
        for text in texts(body):
            if re.match(r"\d{4}-\d\d-\d\d[T ]", text) and operation.route not in ("/usage/report", "/usage/export"):
                assert INSTANT.match(text), (operation, text)  # hours of a report are in the zone that was asked for
                datetime.fromisoformat(text)
                n_instants += 1
        if "version" in body:
            assert answer.headers["etag"] == f'"{body["version"]}"', operation
            n_versions += 1
    assert n_instants > 30
    assert n_versions >= 9


def test_what_has_a_table_is_given_as_csv_and_as_json(all_of_it: Everything) -> None:
    n = 0
    for operation in all_of_it.operations():
        if "format" not in operation.parameters("query") or "missing" in all_of_it.address(operation):
            continue
        address = all_of_it.address(operation)
        joined = "&" if "?" in address else "?"
        told = all_of_it.api.send("GET", f"{address}{joined}format=csv")
        assert told.headers["content-type"].startswith("text/csv"), operation
        header = told.getvalue().decode("utf-8-sig").splitlines()[0]
        assert re.fullmatch(r"\w+(,\w+)+", header), (operation, header)
        assert all_of_it.api.send("GET", f"{address}{joined}format=json").headers["content-type"] == "application/json"
        assert "format" in assert_problem(all_of_it.api.send("GET", f"{address}{joined}format=xml"), 422)["errors"]
        n += 1
    assert n >= 3


def test_every_create_has_an_example_that_its_schema_takes(all_of_it: Everything) -> None:
    for operation in all_of_it.operations():
        if operation.method != "POST" or "201" not in operation.said["responses"]:
            continue
        if not operation.has_body:
            continue
        content = operation.said["requestBody"]["content"]["application/json"]
        assert content.get("examples"), operation.route
        for example in content["examples"].values():
            schema = {**content["schema"], "components": all_of_it.document["components"]}
            jsonschema.Draft202012Validator(schema).validate(example["value"])


def test_scopes_are_those_that_the_document_of_tokens_names() -> None:
    schemas = document()["components"]["schemas"]
    assert set(schemas["ScopesEnum"]["enum"]) == {scope.value for scope in Scope}
