"""The Celery application: two queues, schedules in code, rows as the truth.

A task is only a wake-up call: what has to be done, by whom and until when is said by rows (``training.Job`` with its
lease, ``usage`` hours that were touched). A message lost or doubled by the broker therefore changes nothing but time.
Training takes minutes and much memory: the queue ``training`` is for a worker of its own.
"""

from __future__ import annotations

import os

from celery import Celery
from celery.schedules import crontab

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

from controlplane.environment import read_environment

_environment = read_environment()

app = Celery("fairlane", broker=_environment.redis_url)
app.conf.update(
    task_default_queue="default",
    task_queues={"default": {}, "training": {}},
    task_routes={"controlplane.training.tasks.run_job": {"queue": "training"}},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    # Messages of a killed worker come back within seconds of the timeout; a task that runs longer than it may be
    # started twice, which the lease of its row turns into a no-op.
    broker_transport_options={
        "visibility_timeout": 120,
        "unacked_restore_interval": 5,
        "unacked_restore_throttle": 1,
    },
    timezone="UTC",
    beat_schedule_filename=str(_environment.beat_schedule_file),
    beat_schedule={
        "usage-roll-up": {"task": "controlplane.usage.tasks.roll_up", "schedule": 60.0, "options": {"expires": 55}},
        "usage-roll-up-minutes": {
            "task": "controlplane.usage.tasks.roll_up_minutes",
            "schedule": 60.0,
            "options": {"expires": 55},
        },
        "usage-coarsen-old": {
            "task": "controlplane.usage.tasks.coarsen_old",
            "schedule": crontab(hour=3, minute=7),
        },
        "usage-close-statements": {
            "task": "controlplane.usage.tasks.close_statements",
            "schedule": crontab(minute=11),
        },
        "usage-reconcile-books": {
            "task": "controlplane.usage.tasks.reconcile_books",
            "schedule": crontab(hour=1, minute=41),
        },
        "usage-make-partitions": {"task": "controlplane.usage.tasks.make_partitions", "schedule": 3_600.0},
        "usage-forget-old-samples": {"task": "controlplane.usage.tasks.forget_old_samples", "schedule": 1_800.0},
        "wake-jobs": {
            "task": "controlplane.training.tasks.wake_jobs",
            "schedule": 15.0,
            "options": {"expires": 14},
        },
        "training-schedule-baseline": {"task": "controlplane.training.tasks.schedule_baseline", "schedule": 3_600.0},
        "training-schedule-mixture": {
            "task": "controlplane.training.tasks.schedule_mixture",
            "schedule": crontab(hour=2, minute=17),
        },
        "training-watch-drift": {
            "task": "controlplane.training.tasks.watch_drift",
            "schedule": 300.0,
            "options": {"expires": 290},
        },
        "training-trim-artifacts": {"task": "controlplane.training.tasks.trim_artifacts", "schedule": 3_600.0},
        "fleet-forget-cancelled": {
            "task": "controlplane.fleet.tasks.forget_cancelled",
            "schedule": 60.0,
            "options": {"expires": 55},
        },
        "fleet-forget-old-hazards": {"task": "controlplane.fleet.tasks.forget_old_hazards", "schedule": 3_600.0},
        "rollout-trim-revisions": {"task": "controlplane.rollout.tasks.trim_revisions", "schedule": 3_600.0},
        "accounts-forget-sessions": {"task": "controlplane.accounts.tasks.forget_sessions", "schedule": 3_600.0},
        "audit-log-head": {"task": "controlplane.audit.tasks.log_head", "schedule": crontab(hour=0, minute=3)},
        "common-forget-idempotency": {"task": "controlplane.common.tasks.forget_idempotency", "schedule": 3_600.0},
    },
)
app.autodiscover_tasks(
    [f"controlplane.{name}" for name in ("accounts", "audit", "common", "fleet", "rollout", "usage", "training")]
)
