"""Predictor artifacts and the jobs that build them.

    start_job -> row (queued) -> wake-up call -> take_lease -> books read -> artifact -> pools -> revision -> routers

The row is the truth. A worker holds it by a lease that its heartbeats extend; a job whose worker fell silent is
called again by schedule, and at most one of a kind is queued or running.
"""
