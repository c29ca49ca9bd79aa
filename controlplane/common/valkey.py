"""The shared runtime state. Nothing that must survive lives here; every caller works, slower, without it."""

from __future__ import annotations

import functools

import redis
from django.conf import settings

UNAVAILABLE = (redis.ConnectionError, redis.TimeoutError, redis.ResponseError)
"""What a missing, hung or still loading Valkey raises."""


@functools.cache
def valkey() -> redis.Redis:
    """Client of this process (thread-safe, with its own pool)."""
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=1.0, socket_connect_timeout=0.5, health_check_interval=30
    )
