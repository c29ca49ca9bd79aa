"""The books: one row per request, exactly once.

POST /router/v1/usage -> ingest (COPY, ON CONFLICT DO NOTHING) -> usage_event, one partition per UTC day
                                `-> what cannot be booked -> usage_quarantine
every minute: rollup of touched, finished quarters of an hour -> usage_quarter, one partition per UTC month
report = rollups of untouched quarters + events of touched ones, in one statement; page, JSON and CSV read its rows
"""
