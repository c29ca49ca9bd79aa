"""What every app of the control plane stands on.

A use case is a keyword-only function under ``use_case``: one transaction, a permission check, an audit entry, effects
on commit. What routers must learn of calls ``mark_config_changed``; ``rollout`` subscribes and publishes a revision
inside the same transaction, so that a change which would give an invalid configuration is never committed.
"""
