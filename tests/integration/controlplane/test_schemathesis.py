"""Requests made of the control plane's own OpenAPI document, right and wrong ones; the answers are held against it.

Slow, since it takes minutes: ``FAIRLANE_SCHEMATHESIS_EXAMPLES`` of each operation and kind (20 each).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from django.core import signals
from django.core.handlers.wsgi import WSGIHandler
from django.db import close_old_connections, transaction
from hypothesis import HealthCheck, Phase, given, settings

from controlplane.accounts.actions import issue_token
from controlplane.accounts.models import User
from controlplane.common.actor import Actor
from controlplane.training.models import Promotion
from tests.support.control_plane import book, make_user, usage_event
from tests.support.world import make_world

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
MANY = int(os.environ.get("FAIRLANE_SCHEMATHESIS_EXAMPLES", "20"))
# What they look for is no fault here: a value of the right shape may fit no object that there is; values of a wrong one
# may be taken for a right one (a number for a text); and nobody signs in anew for each request.
LEFT_OUT = ("positive_data_acceptance", "negative_data_rejection", "ignored_auth", "missing_required_header",
            "unsupported_method", "use_after_free", "ensure_resource_availability")  # fmt: skip


@pytest.fixture
def _one_connection() -> Iterator[None]:
    """The WSGI application works in the test's transaction; it would close that connection after each request."""
    for signal in (signals.request_started, signals.request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (signals.request_started, signals.request_finished):
        signal.connect(close_old_connections)


@pytest.mark.usefixtures("_one_connection")
def test_answers_are_what_the_document_says(system: Actor, operator: User) -> None:
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS

    world = make_world(system, operator)
    event = usage_event(tenant=world.ids["tenants"], pool=world.ids["pools"])
    book(event)
    ids = {**world.ids, "requests": event.request, "promotions": str(Promotion.objects.get().pk), "revisions": "1"}
    scopes = ["admin.read", "admin.write", "admin.members"]
    _, token = issue_token(actor=system, user=make_user(role="owner"), name="x", scopes=scopes)
    schema = schemathesis.openapi.from_wsgi("/api/v1/openapi.json", WSGIHandler())
    left_out = [CHECKS.get_one(name) for name in LEFT_OUT]
    statuses: Counter[tuple[str, int]] = Counter()
    problems: dict[str, str] = {}
    operations = [found.ok() for found in schema.get_all_operations()]

    def ask(case: Any) -> None:
        kind = case.operation.path.removeprefix("/api/v1/").split("/")[0]
        parts = {"tenant_id": ids["tenants"], "key_id": ids["keys"], "id": ids.get(kind), "request_id": event.request}
        for name in case.path_parameters or ():
            if case.meta.generation.mode == GenerationMode.POSITIVE and parts.get(name):
                case.path_parameters[name] = parts[name]
        with transaction.atomic():
            answer = case.call(headers={"Authorization": f"Bearer {token}"})
            transaction.set_rollback(True)
        statuses[case.operation.label, answer.status_code] += 1
        assert answer.status_code < 500, f"{answer.status_code} to {case.as_curl_command()}"
        case.validate_response(answer, excluded_checks=left_out)

    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode == GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue
            kept = settings(
                max_examples=MANY, deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            try:
                kept(given(case=operation.as_strategy(generation_mode=mode))(ask))()
            except (AssertionError, Exception) as problem:  # all operations are told, not the first
                problems[f"{operation.label} ({mode.name})"] = str(problem)[:1_500]
    assert not problems, "\n\n".join(f"{label}: {problem}" for label, problem in problems.items())
    answered = {label for label, status in statuses if status < 300}
    reading = {operation.label for operation in operations if operation.method.upper() == "GET"}
    assert len(answered & reading) > 30
