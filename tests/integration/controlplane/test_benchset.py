"""The data set of ``fairlane bench usage``: as many rows as asked for, books that agree, and every page loaded."""

from __future__ import annotations

from datetime import timedelta

import pytest


@pytest.fixture
def filled(committed_db: None) -> object:
    from controlplane.accounts.actions import bootstrap_operator
    from controlplane.api.benchset.fill import fill
    from controlplane.common.actor import system_actor

    bootstrap_operator(email="owner@example.test", is_reset=False)
    return fill(actor=system_actor("test"), events=3_000, tenants=30, keys=100, days=1, sessions=2)


def test_a_small_set_has_what_was_asked_for_and_its_pages_load(filled: object) -> None:
    from django.db import connection
    from django.test import Client
    from django.urls import NoReverseMatch, reverse

    from controlplane.accounts.models import User
    from controlplane.api.benchset.fill import AUDITED, Filled
    from controlplane.api.benchset.pages import UNMEASURED, measure_pages, measure_reports
    from controlplane.audit.queries import verify
    from controlplane.common.actor import system_actor
    from controlplane.common.clock import utc_now
    from controlplane.common.errors import Conflict
    from controlplane.console.urls import urlpatterns
    from controlplane.keys.models import ApiKey
    from controlplane.usage.models import Reconciliation, UsageEvent, UsageExplanation, UsagePrediction
    from controlplane.usage.report import usage_question, usage_report

    assert isinstance(filled, Filled)
    # Twice sent ones are sent beside, not in place of others.
    assert UsageEvent.objects.count() == 3_000
    assert ApiKey.objects.count() == 100
    assert 0.03 < UsageExplanation.objects.count() / 3_000 < 0.07
    assert UsagePrediction.objects.count() == 60
    assert Reconciliation.objects.get().n_different == 0
    today = utc_now().date()
    question = usage_question(
        actor=system_actor("test"), from_day=today - timedelta(days=2), to_day=today, group_by=["pool"]
    )
    report = usage_report(question)
    with connection.cursor() as cursor:
        cursor.execute("SELECT sum(prompt_tokens), sum(output_tokens) FROM usage_event")
        sums = cursor.fetchone()
    assert (report.totals["prompt_tokens"], report.totals["output_tokens"]) == sums
    verdict = verify(actor=system_actor("test"))
    assert verdict.is_whole
    assert verdict.entries > 3_000 * AUDITED

    loads = measure_pages(loads=1)
    names = {str(pattern.name) for pattern in urlpatterns}
    assert set(UNMEASURED) <= names
    assert {"live", "tenants", "tenant", "key", "pool_fairness", "usage", "requests"} <= loads.keys()
    client = Client()
    client.force_login(User.objects.get(email="owner@example.test"))
    for name in names - loads.keys() - UNMEASURED.keys():
        # What is left only changes things.
        try:
            path = reverse(f"console:{name}")
        except NoReverseMatch:
            continue
        assert client.get(path).status_code == 405, name
    assert all(load.queries > 0 for name, load in loads.items() if name != "sign_in")
    reports = measure_reports(token=filled.configured.operator_token, loads=1, only=["day,tenant"])
    assert reports["day,tenant"].queries > 0

    # A page that is not shown is not measured as if it were.
    User.objects.update(is_active=False)
    with pytest.raises(Conflict, match=r"no owner|answered 302"):
        measure_pages(loads=1, only=["tenants"])
