"""Use cases of pools and backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict
from urllib.parse import urlsplit

from django.db.models import ProtectedError
from typing_extensions import Unpack

from controlplane.audit.actions import delete_change, record, save_change
from controlplane.common.actor import Actor
from controlplane.common.errors import Conflict, Invalid
from controlplane.common.use_case import mark_config_changed, use_case
from controlplane.common.validation import Checks, lock_version
from controlplane.fleet.models import Backend, ModelName, Pool
from controlplane.fleet.queries import aliases, find_pool, policy_pages
from router_ext.core.config import KNOBS, ConfigError

RESERVED_WORDS = ("tgi", "dummy")
"""What clients send when they mean no model in particular; a pool may carry neither as its name nor as an alias."""

VOCABULARY = 131_072
"""Tokens of a model of whom nothing is known; few have more (the largest in common use 262,144)."""


class PoolChanges(TypedDict, total=False):
    name: str
    aliases: Sequence[str]
    policy: str
    scheduling: Mapping[str, Any]
    tokenizer_path: str
    is_guarded: bool
    vocabulary: int
    takes_grammars: bool
    managed_by: str


class BackendChanges(TypedDict, total=False):
    name: str
    url: str
    kv_tokens: int | None
    block_size: int
    prefill_budget_tokens: int
    is_chunked: bool
    speculate: int
    is_cordoned: bool
    takes_grammars: bool
    api_key_name: str
    managed_by: str


_releasers: list[Callable[[Pool], None]] = []


def on_pool_deleted(releaser: Callable[[Pool], None]) -> None:
    """Register what lets go of a pool that is about to be deleted, inside that transaction."""
    if releaser not in _releasers:
        _releasers.append(releaser)


def pool_fields(pool: Pool) -> dict[str, Any]:
    return {
        "name": pool.name,
        "aliases": aliases(pool),
        "policy": pool.policy,
        "scheduling": pool.scheduling,
        "tokenizer_path": pool.tokenizer_path,
        "is_guarded": pool.is_guarded,
        "vocabulary": pool.vocabulary,
        "takes_grammars": pool.takes_grammars,
        "managed_by": pool.managed_by,
        "predictor_artifact": pool.predictor_artifact,
        "predictor_digest": pool.predictor_digest,
        "predictor_kind": pool.predictor_kind,
        "length_model_artifact": pool.length_model_artifact,
        "length_model_digest": pool.length_model_digest,
        "length_model_kind": pool.length_model_kind,
    }


def backend_fields(backend: Backend) -> dict[str, Any]:
    return {
        "pool": backend.pool_id,
        "name": backend.name,
        "url": backend.url,
        "kv_tokens": backend.kv_tokens,
        "block_size": backend.block_size,
        "prefill_budget_tokens": backend.prefill_budget_tokens,
        "is_chunked": backend.is_chunked,
        "speculate": backend.speculate,
        "is_cordoned": backend.is_cordoned,
        "is_drained": backend.is_drained,
        "takes_grammars": backend.takes_grammars,
        "api_key_name": backend.api_key_name,
        "managed_by": backend.managed_by,
    }


def _check_pool(pool: Pool, words: Sequence[str]) -> None:
    checks = Checks()
    pool.name = checks.text("name", pool.name, 200)
    for word in words:
        checks.text("aliases", word, 200)
    if len(set(words)) < len(words) or pool.name in words:
        checks.add("aliases", "contain a word twice, or the pool's own name")
    for field, word in [("name", pool.name), *(("aliases", w) for w in words)]:
        if word in RESERVED_WORDS:
            checks.add(field, f"{word!r} means the key's default pool and cannot name one")
    checks.number("vocabulary", pool.vocabulary, 1, 10_000_000)
    checks.manager(pool.managed_by)
    policies = policy_pages()
    if pool.policy not in policies:
        checks.add("policy", f"unknown policy {pool.policy!r} (one of {', '.join(policies)})")
    unknown = sorted(set(pool.scheduling) - set(KNOBS))
    if unknown:
        checks.add("scheduling", f"unknown: {', '.join(unknown)} (known: {', '.join(KNOBS)})")
    pool.scheduling = {name: value for name, value in pool.scheduling.items() if value is not None}
    for name in pool.scheduling.keys() & KNOBS.keys():
        try:
            KNOBS[name].check(pool.scheduling[name], f"pool {pool.name!r}")
        except ConfigError as error:
            checks.add(f"scheduling.{name}", str(error))
    checks.done()


def _set_words(pool: Pool, words: Sequence[str]) -> None:
    """Make the pool answer to its name and these aliases and nothing else."""
    taken = ModelName.objects.filter(word__in=[pool.name, *words]).exclude(pool=pool).order_by("word").first()
    if taken is not None:
        raise Conflict(f"{taken.word!r} already names another pool")
    ModelName.objects.filter(pool=pool).delete()
    ModelName.objects.bulk_create(
        [ModelName(word=pool.name, pool=pool, is_alias=False), *(ModelName(word=w, pool=pool) for w in words)]
    )
    # A prefetched list would show the words of before.
    getattr(pool, "_prefetched_objects_cache", {}).pop("model_names", None)


@use_case()
def create_pool(
    *,
    actor: Actor,
    name: str,
    aliases: Sequence[str] = (),
    policy: str = "slo-fair",
    scheduling: Mapping[str, Any] | None = None,
    tokenizer_path: str = "",
    is_guarded: bool = True,
    vocabulary: int = VOCABULARY,
    takes_grammars: bool = True,
    managed_by: str = "",
) -> Pool:
    """A pool of servers of one model.

    Args:
        name: what a request's ``model`` says. aliases: further words for it.
        scheduling: knobs (``core.config.KNOBS``) by name, where they differ from their defaults.
        is_guarded, vocabulary, takes_grammars: as of ``PoolRecord``. managed_by: as of ``Managed``.
    """
    pool = Pool(
        name=name,
        policy=policy,
        scheduling=dict(scheduling or {}),
        tokenizer_path=tokenizer_path.strip(),
        is_guarded=is_guarded,
        vocabulary=vocabulary,
        takes_grammars=takes_grammars,
        managed_by=managed_by,
    )
    words = [w.strip() for w in aliases]
    _check_pool(pool, words)
    if Pool.objects.filter(name=pool.name).exists():
        raise Conflict(f"a pool {pool.name!r} exists")
    pool.save(force_insert=True)
    _set_words(pool, words)
    record(actor=actor, action="pool.created", object_type="pool", object_id=pool.id, after=pool_fields(pool))
    mark_config_changed(f"pool {pool.name} created")
    return pool


@use_case()
def update_pool(
    *, actor: Actor, pool_id: str, expected_version: int | None = None, **changes: Unpack[PoolChanges]
) -> Pool:
    """Change some fields of a pool; queues, ledger and counters of the routers survive a change of policy."""
    pool = lock_version(Pool.objects.all(), "pool", pool_id, expected_version)
    before = pool_fields(pool)
    words = [w.strip() for w in changes.pop("aliases", before["aliases"])]
    for field, value in changes.items():
        setattr(pool, field, dict(value) if isinstance(value, Mapping) else value)
    _check_pool(pool, words)
    if [pool.name, *sorted(words)] != [before["name"], *before["aliases"]]:
        _set_words(pool, words)
    save_change(
        pool,
        actor=actor,
        action="pool.updated",
        before=before,
        after=pool_fields(pool),
        publish=f"pool {pool.name} updated",
    )
    return pool


@use_case()
def set_pool_predictor(*, actor: Actor, pool_id: str, artifact: str, digest: str, kind: str) -> Pool:
    """Name the predictor artifact that routers load for this pool; three empty strings name none."""
    pool = lock_version(Pool.objects.all(), "pool", pool_id, None)
    before = pool_fields(pool)
    pool.predictor_artifact, pool.predictor_digest, pool.predictor_kind = artifact, digest, kind
    save_change(
        pool,
        actor=actor,
        action="pool.predictor_set",
        before=before,
        after=pool_fields(pool),
        publish=f"predictor of pool {pool.name} set",
    )
    return pool


@use_case()
def set_pool_length_model(
    *, actor: Actor, pool_id: str, artifact: str, digest: str, kind: str, how: str, reason: str
) -> Pool:
    """Name the trained model of output lengths that routers load for this pool; three empty strings name none.

    Args:
        how: what was done, such as ``promoted``, for the audit log. reason: why, for it as well.
    """
    pool = lock_version(Pool.objects.all(), "pool", pool_id, None)
    before = pool_fields(pool)
    pool.length_model_artifact, pool.length_model_digest, pool.length_model_kind = artifact, digest, kind
    save_change(
        pool,
        actor=actor,
        action=f"pool.length_model_{how}",
        before=before,
        after={**pool_fields(pool), "reason": reason},
        publish=f"length model of pool {pool.name} {how.replace('_', ' ')}",
    )
    return pool


@use_case()
def delete_pool(*, actor: Actor, pool_id: str, expected_version: int | None = None) -> None:
    """Delete a pool that has no backends and is no live key's default."""
    pool = lock_version(Pool.objects.all(), "pool", pool_id, expected_version)
    before = pool_fields(pool)
    publish = f"pool {pool.name} deleted"
    for release in _releasers:
        release(pool)
    try:
        delete_change(pool, actor=actor, action="pool.deleted", before=before, publish=publish)
    except ProtectedError as error:
        raise Conflict(f"pool {pool.name!r} is in use by {len(error.protected_objects)} backends or keys") from error


def _check_backend(backend: Backend) -> None:
    checks = Checks()
    checks.slug("name", backend.name)
    backend.url = backend.url.strip().rstrip("/")
    try:
        parts = urlsplit(backend.url)
        is_wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        is_wrong = is_wrong or bool(parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        is_wrong = True
    if is_wrong or len(backend.url) > 500 or not backend.url.isprintable():
        checks.add("url", "must be http:// or https:// with a host, without credentials, query or fragment")
    checks.number("block_size", backend.block_size, 1, 1_024)
    checks.number("kv_tokens", backend.kv_tokens, 2 * backend.block_size, 1_000_000_000)
    checks.number("prefill_budget_tokens", backend.prefill_budget_tokens, 1, 10_000_000)
    checks.number("speculate", backend.speculate, 0, 64)
    if len(backend.api_key_name) > 100 or not backend.api_key_name.isprintable():
        checks.add("api_key_name", "at most 100 printable characters")
    checks.manager(backend.managed_by)
    checks.done()


def _refuse_taken_backend(backend: Backend) -> None:
    others = Backend.objects.exclude(pk=backend.pk)
    if others.filter(url=backend.url).exists():
        raise Conflict(f"a backend at {backend.url} exists")
    if others.filter(pool=backend.pool, name=backend.name).exists():
        raise Conflict(f"the pool has a backend {backend.name!r} already")


@use_case()
def create_backend(
    *,
    actor: Actor,
    pool: str,
    name: str,
    url: str,
    kv_tokens: int | None = None,
    block_size: int = 1,
    prefill_budget_tokens: int = 4_096,
    is_chunked: bool = True,
    speculate: int = 0,
    is_cordoned: bool = False,
    takes_grammars: bool = True,
    api_key_name: str = "",
    managed_by: str = "",
) -> Backend:
    """A TGI server of ``pool`` (id, name or alias), as its log and flags describe it."""
    row = find_pool(pool)
    if row is None:
        raise Invalid({"pool": f"no pool {pool!r}"})
    backend = Backend(
        pool=row,
        name=name,
        url=url,
        kv_tokens=kv_tokens,
        block_size=block_size,
        prefill_budget_tokens=prefill_budget_tokens,
        is_chunked=is_chunked,
        speculate=speculate,
        is_cordoned=is_cordoned,
        takes_grammars=takes_grammars,
        api_key_name=api_key_name,
        managed_by=managed_by,
    )
    _check_backend(backend)
    _refuse_taken_backend(backend)
    backend.save(force_insert=True)
    record(
        actor=actor,
        action="backend.created",
        object_type="backend",
        object_id=backend.id,
        after=backend_fields(backend),
    )
    mark_config_changed(f"backend {backend.name} created")
    return backend


@use_case()
def update_backend(
    *, actor: Actor, backend_id: str, expected_version: int | None = None, **changes: Unpack[BackendChanges]
) -> Backend:
    """Change some fields of a backend; one that is no longer cordoned is not drained either."""
    backend = lock_version(Backend.objects.select_related("pool"), "backend", backend_id, expected_version)
    before = backend_fields(backend)
    for field, value in changes.items():
        setattr(backend, field, value)
    backend.is_drained = backend.is_drained and backend.is_cordoned
    _check_backend(backend)
    _refuse_taken_backend(backend)
    save_change(
        backend,
        actor=actor,
        action="backend.updated",
        before=before,
        after=backend_fields(backend),
        publish=f"backend {backend.name} updated",
    )
    return backend


@use_case()
def delete_backend(*, actor: Actor, backend_id: str, expected_version: int | None = None) -> None:
    """Take a backend out of its pool; streams that run on it are resumed elsewhere by the router."""
    backend = lock_version(Backend.objects.all(), "backend", backend_id, expected_version)
    before = backend_fields(backend)
    publish = f"backend {backend.name} deleted"
    delete_change(backend, actor=actor, action="backend.deleted", before=before, publish=publish)
