"""Publishing: every change of the configuration becomes a numbered, complete, immutable revision.

use case -> mark_config_changed -> (same transaction) publish: lock, build, validate, insert
         -> commit -> announcement -> waiting long polls wake -> routers apply -> heartbeat says so
"""
