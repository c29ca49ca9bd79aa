"""Migrations on a database that was in use before them: nothing is lost, and what is new works on what is old."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json
from datetime import timedelta
import django
django.setup()
from django.core.management import call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

def migrate(*words):
    call_command("migrate", *words, verbosity=0, interactive=False)

def models(*targets):
    state = MigrationExecutor(connection).loader.project_state(list(targets))
    return state.apps.get_model

# --- as it was before trained models: books, a pool, a baseline job and its artifact ---
for target in (("fleet", "0001"), ("training", "0001"), ("usage", "0003")):
    migrate(*target)
get = models(("fleet", "0001_initial"), ("training", "0001_initial"), ("usage", "0003_explanations"))
from controlplane.common.clock import to_us, utc_now
from controlplane.usage.partitions import EVENTS, ensure_days
now = utc_now().replace(minute=30, second=0, microsecond=0)
migrate("accounts", "0002")
people = models(("accounts", "0002_role_alone_decides"))("accounts", "User").objects
for name, role in (("a", "operator"), ("b", "viewer"), ("c", "operator"), ("d", "operator")):
    people.create(id=f"usr_{name}", email=f"{name}@example.test", role=role, is_active=name != "a")
pool = get("fleet", "Pool").objects.create(id="pol_old", name="old/model")
artifact = get("training", "Artifact").objects.create(id="art_old", kind="baseline", digest="d", body=b"old", n_bytes=3)
dataset = get("training", "Dataset").objects.create(from_at=now - timedelta(days=28), to_at=now, n_rows=1, digest="x")
for state in ("succeeded", "failed"):
    get("training", "Job").objects.create(
        id=f"job_{state}", state=state, requested_by="somebody", dataset=dataset, artifact=artifact
    )
ensure_days([now.date()], EVENTS)
with connection.cursor() as cursor:
    cursor.execute(
        "INSERT INTO usage_event (arrived_at, event, request, router, tenant, key, pool, model, tier, dialect, "
        "outcome, ended_at, prompt_tokens, output_tokens, token_source, segments, preemptions, recomputed_tokens, "
        "resumed_prefill_tokens, kv_token_seconds, backends, finish_reason) VALUES (%s, 'evt_old', 'r', 'rtr', 'ten', "
        "'key', 'pol_old', 'm', 't', 'native', 'completed', %s, 1, 5, 'backend', 1, 0, 0, 0, 0.0, '{}', 'eos_token')",
        [now, now],
    )
get("usage", "TouchedHour").objects.create(hour=now.replace(minute=0))

# --- as it was before the running hour was rolled up: predictions and samples, none of them counted ---
for target in (("fleet", "0002"), ("training", "0003"), ("usage", "0005")):
    migrate(*target)
from controlplane.usage.partitions import PREDICTIONS, SAMPLES
from router_ext.predict.versions import FEATURE_VERSION
ensure_days([now.date()], PREDICTIONS)
ensure_days([now.date()], SAMPLES)
with connection.cursor() as cursor:
    for i in range(3):
        key = [now + timedelta(seconds=i), f"evt_{i}"]
        cursor.execute(
            "INSERT INTO usage_prediction VALUES (%s, %s, now(), 'pol_old', 'ten', 'key', 50, true, "
            "'{10,20,30,40,50,60,70}', NULL, 'pool', NULL, NULL, '')", key,
        )
        cursor.execute(
            "INSERT INTO predictor_sample VALUES (%s, %s, 'pol_old', 'ten', %s, 'f', 'k', 'm', 1, NULL, 50, true)",
            [*key, FEATURE_VERSION],
        )

# --- as it was before quarters of an hour: rollups of hours, a recent one with its event and an old one without ---
migrate("usage", "0007")
old_hour = (now - timedelta(days=200)).replace(minute=0)
recent_hour = now.replace(minute=0)
Hour = models(("usage", "0007_totals"))("usage", "UsageHour")
for hour, n in ((old_hour, 7), (recent_hour, 1)):
    Hour.objects.create(
        hour=hour, tenant="ten", key="key", pool="pol_old", model="m", tier="t", requests=n, completed=n,
        prompt_tokens=n, output_tokens=5 * n, recomputed_tokens=0, ttft_buckets=[300], ttft_counts=[n],
    )
hours_before = sorted(Hour.objects.values_list("hour", "requests", "output_tokens", "ttft_buckets", "ttft_counts"))

migrate()
migrate("usage", "0007")
hours_back = sorted(Hour.objects.values_list("hour", "requests", "output_tokens", "ttft_buckets", "ttft_counts"))
migrate("usage", "0005")
migrate()
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
from controlplane.accounts.models import User
roles = dict(User.objects.order_by("id").values_list("id", "role"))
assert roles == {"usr_a": "operator", "usr_b": "viewer", "usr_c": "owner", "usr_d": "operator"}, roles

# --- the present code on what was there ---
from controlplane.common.actor import system_actor
from controlplane.training import jobs
from controlplane.training.actions import start_job
from controlplane.training.models import Artifact, Job
from controlplane.training.queries import sample_counts
from controlplane.usage.accuracy import accuracy
from controlplane.usage.ingest import decode_batch, ingest
from controlplane.usage.models import TouchedQuarter, UsageEvent, UsageQuarter, UsageTotal
from controlplane.usage.report import usage_question, usage_report
from controlplane.usage.rollup import roll_up_finished, roll_up_quarter, roll_up_running
from tests.support.control_plane import predicted_event, usage_body
actor = system_actor("test")

def reported(timezone="UTC"):
    question = usage_question(
        actor=actor, from_day=old_hour.date() - timedelta(days=1), to_day=now.date() + timedelta(days=1),
        timezone=timezone, group_by=("day",),
    )
    report = usage_report(question)
    days = [(row.sums["requests"], row.sums["output_tokens"]) for row in report.rows]
    return [days, report.totals["requests"], report.is_coarse]

wide = [list(row) for row in UsageQuarter.objects.order_by("at").values_list("minutes", "requests")]
reports = [reported(), reported("Asia/Kolkata")]
for quarter in TouchedQuarter.objects.values_list("quarter", flat=True).distinct():
    roll_up_quarter(quarter)
refined = [list(row) for row in UsageQuarter.objects.order_by("at").values_list("minutes", "requests")]
reports.append(reported())
roll_up_running(now=now)
span = {"actor": actor, "pool": "pol_old", "from_at": now - timedelta(hours=1), "to_at": now + timedelta(hours=1)}
running = accuracy(**span).total["served"].n
samples = {count.pool: count.usable for count in sample_counts(actor=actor)}
ack = ingest(decode_batch(usage_body(predicted_event(pool="pol_old", arrived_at_us=to_us(now) + 9_000_000))))
roll_up_running(now=now)
job = start_job(actor=actor)
print(json.dumps({
    "running": running,
    "hours": [[str(v) for v in row] for row in hours_before] == [[str(v) for v in row] for row in hours_back],
    "wide": wide, "refined": refined, "reports": reports,
    "samples": samples,
    "accepted": ack.accepted,
    "later": accuracy(**span).total["served"].n,
    "triggers": sorted(Job.objects.exclude(pk=job.id).values_list("trigger", flat=True)),
    "totals": sorted(UsageTotal.objects.values_list("span", "scope", "tokens")),
    "now": [f"{now:%Y-%m}", f"{now:%Y-%m-%d}"],
    "body": bytes(Artifact.objects.get(pk="art_old").body).decode(),
    "job": jobs.run(job.id),
    "events": UsageEvent.objects.count(),
    "rolled_up": roll_up_finished(now=now + timedelta(hours=2)),
    "hour": accuracy(**span).total["served"].n,
}))
"""


def test_a_database_in_use_is_brought_up_to_date(old_database: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=old_database | {"DJANGO_SETTINGS_MODULE": "controlplane.settings"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Predictions and samples of before are shown, without waiting for an event or a clean-up.
    assert (found["running"], found["samples"]) == (3, {"pol_old": 3})
    assert (found["accepted"], found["later"], found["events"]) == (1, 4, 2)
    assert (found["triggers"], found["body"], found["job"]) == (["request", "request"], "old", True)
    # The event of before is counted, for its tenant and its key; the one after waits to be folded.
    assert found["totals"] == [[span, scope, 6] for span in found["now"] for scope in ("key", "ten")]
    assert (found["rolled_up"] >= 1, found["hour"]) == (True, 4)
    # Sums of hours are kept, as hours where their events are gone, else as quarters; going back loses nothing either.
    assert found["hours"]
    assert found["wide"] == [[60, 7], [60, 1]]
    assert found["refined"] == [[60, 7], [15, 1]]
    days = [[7, 35], [1, 5]]
    assert found["reports"] == [[days, 8, False], [days, 8, True], [days, 8, False]]
