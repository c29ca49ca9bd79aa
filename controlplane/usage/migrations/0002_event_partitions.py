"""The partitioned table of usage events. Days are made on demand (``usage.partitions``); there is no default one,
because a day could not be cut out of it later."""

from django.db import migrations

FORWARD = """
CREATE TABLE usage_event (
    arrived_at timestamptz NOT NULL,
    event text NOT NULL,
    request text NOT NULL,
    router text NOT NULL,
    tenant text NOT NULL,
    key text NOT NULL,
    pool text NOT NULL,
    model text NOT NULL,
    tier text NOT NULL,
    dialect text NOT NULL,
    outcome text NOT NULL,
    ended_at timestamptz NOT NULL,
    first_dispatch_at timestamptz,
    first_token_at timestamptz,
    prompt_tokens bigint NOT NULL CHECK (prompt_tokens >= 0),
    output_tokens bigint NOT NULL CHECK (output_tokens >= 0),
    token_source text NOT NULL,
    segments integer NOT NULL,
    preemptions integer NOT NULL,
    recomputed_tokens bigint NOT NULL,
    resumed_prefill_tokens bigint NOT NULL,
    kv_token_seconds double precision NOT NULL,
    max_new_tokens bigint,
    predicted_tokens bigint,
    predictor text,
    finish_reason text,
    resume_class text,
    backends text[] NOT NULL,
    error_code text,
    ingested_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (arrived_at, event)
) PARTITION BY RANGE (arrived_at);
CREATE INDEX usage_event_by_tenant ON usage_event (tenant, arrived_at);
"""
BACKWARD = "DROP TABLE usage_event;"


class Migration(migrations.Migration):
    dependencies = [("usage", "0001_initial")]
    operations = [migrations.RunSQL(FORWARD, BACKWARD)]
