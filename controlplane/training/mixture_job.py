"""The run of a mixture job: samples in, a judged artifact out, promoted where it passed.

    take_lease -> select rows -> train -> judge per pool on the rows held out -> complete_mixture -> revision -> routers

torch is imported here, inside the run, by the process that trains and by no other of the control plane.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean, median_low
from typing import Any

import structlog
from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings

from controlplane.common.actor import system_actor
from controlplane.common.clock import utc_now
from controlplane.fleet.models import Pool
from controlplane.training.actions import SPAN, complete_mixture, fail_job, min_samples
from controlplane.training.dataset import Filters, Row, Selection, select
from controlplane.training.gate import ACTIVE, CANDIDATE, Verdict, judge
from controlplane.training.keeper import Keeper
from controlplane.training.lease import LeaseLost, take_lease
from controlplane.training.models import Artifact, Dataset, Job
from router_ext.errors import ArtifactRefused
from router_ext.predict.baseline import DEFAULT_TOKENS, LEVELS
from router_ext.predict.versions import FEATURE_VERSION

logger = structlog.get_logger(__name__)

MAX_ARTIFACT_BYTES = 64 << 20
_READ, _TRAINED = 0.1, 0.9
"""Progress after reading and after training."""


class TooFewSamples(Exception):
    """There is not enough to learn from; the message names the number and the minimum."""


def run(job_id: str, *, now: datetime | None = None) -> bool:
    """Run the job if its lease can be taken; returns whether an artifact was stored."""
    lease = take_lease(job_id)
    if lease is None:
        logger.info("job.not_taken", job=job_id)
        return False
    actor = system_actor("training")
    try:
        job = Job.objects.get(pk=job_id)
        with Keeper(job_id, lease) as keeper:
            to_at = job.to_at or now or utc_now()
            filters = Filters(
                from_at=job.from_at or to_at - SPAN, to_at=to_at, pools=job.pools, feature_version=FEATURE_VERSION
            )
            selection = _select(filters, keeper)
            body, metrics = _train(selection, keeper)
            verdicts = _judge(selection, body, keeper)
        complete_mixture(
            actor=actor,
            job_id=job_id,
            lease=lease,
            body=body,
            metrics=metrics,
            dataset=_dataset(filters, selection),
            verdicts=verdicts,
        )
    except LeaseLost:
        logger.warning("job.lease_lost", job=job_id)
        return False
    except TooFewSamples as problem:
        fail_job(actor=actor, job_id=job_id, lease=lease, error=str(problem))
        return False
    except SoftTimeLimitExceeded:
        limit = settings.ENVIRONMENT.training_limit_s
        fail_job(actor=actor, job_id=job_id, lease=lease, error=f"not done within {limit:,} s; it was ended")
        return False
    except MemoryError:
        limit = settings.ENVIRONMENT.training_memory_mb
        fail_job(actor=actor, job_id=job_id, lease=lease, error=f"needed more memory than the {limit:,} MB it may have")
        raise
    except Exception as error:
        fail_job(actor=actor, job_id=job_id, lease=lease, error=f"{type(error).__name__}: {error}"[:2_000])
        raise
    logger.info("job.succeeded", job=job_id, rows=selection.n_rows)
    return True


def _dataset(filters: Filters, selection: Selection) -> Dataset:
    return Dataset(
        from_at=filters.from_at,
        to_at=filters.to_at,
        n_rows=selection.n_rows,
        digest=selection.digest,
        filters=filters.as_json(),
        counts=selection.counts(),
        heldout_from=selection.heldout_from,
    )


def _select(filters: Filters, keeper: Keeper) -> Selection:
    span = f"{filters.from_at:%Y-%m-%d %H:%M} to {filters.to_at:%Y-%m-%d %H:%M}"
    keeper.tell(0.0, f"reading samples from {span}")

    def on_rows(done: int, whole: int) -> None:
        keeper.check()
        keeper.tell(_READ * done / whole)

    selection = select(filters, on_rows=on_rows)
    found = f"{selection.n_found:,} samples of feature version {filters.feature_version}"
    if selection.n_found < min_samples():
        other = f" ({selection.n_other_version:,} of other versions)" if selection.n_other_version else ""
        raise TooFewSamples(f"only {found}{other} from {span}; at least {min_samples():,} are needed")
    keeper.tell(
        _READ,
        f"{found}, {selection.n_rows:,} taken (at most {selection.cap:,} of a tenant), "
        f"{len(selection.heldout):,} held out",
    )
    return selection


def _train(selection: Selection, keeper: Keeper) -> tuple[bytes, dict[str, Any]]:
    """The artifact and its figures.

    Raises:
        LeaseLost: training stopped because the job is no longer ours.
    """
    from controlplane.training import length_model

    def on_progress(share: float, line: str) -> None:
        keeper.tell(_READ + (_TRAINED - _READ) * share, line)

    examples = length_model.readable(selection.train)
    damaged = len(selection.train) - len(examples)
    if damaged:
        keeper.tell(_READ, f"{damaged:,} samples are damaged and left out")
    seed = int(selection.digest[:8], 16)
    trained = length_model.train(
        examples, seed=seed, built_at=utc_now(), on_progress=on_progress, should_stop=keeper.is_lost
    )
    keeper.check()
    if trained is None:
        raise RuntimeError("training stopped though nobody asked for it")
    body, metrics = trained
    if len(body) > MAX_ARTIFACT_BYTES:
        raise ValueError(f"the artifact has {len(body):,} bytes; at most {MAX_ARTIFACT_BYTES:,} can be served")
    return body, {**metrics, "damaged": damaged}


def _judge(selection: Selection, body: bytes, keeper: Keeper) -> dict[str, Verdict]:
    """The gate's verdict by pool that has rows held out."""
    from controlplane.training import length_model

    keeper.tell(_TRAINED, "judging it on the rows held out")
    by_pool: dict[str, list[length_model.Example]] = defaultdict(list)
    for example in length_model.readable(selection.heldout):
        by_pool[example[0].pool].append(example)
    active = _active_bodies(list(by_pool))
    means = _means_of_five([*selection.train, *selection.heldout])
    medians = _medians(selection.train)
    verdicts = {}
    for pool, examples in sorted(by_pool.items()):
        keeper.check()
        rows = [row for row, _ in examples]
        told: dict[str, Sequence[Sequence[float]]] = {
            CANDIDATE: length_model.replay(body, examples),
            "fallback": [row.fallback or [DEFAULT_TOKENS] * len(LEVELS) for row in rows],
            "tenant_mean5": [[means[row.event]] * len(LEVELS) for row in rows],
            "pool_median": [[medians.get(pool, DEFAULT_TOKENS)] * len(LEVELS) for row in rows],
        }
        if pool in active:
            served = _by_active(active[pool], examples)
            if served is not None:
                told[ACTIVE] = served
        # The history has seen those that were cut; judged are those whose length is known.
        whole = [i for i, row in enumerate(rows) if row.is_complete]
        judged = {name: [quantiles[i] for i in whole] for name, quantiles in told.items()}
        verdicts[pool] = judge(judged, [rows[i].output_tokens for i in whole])
    keeper.tell(0.98)
    return verdicts


def _by_active(body: bytes, examples: Sequence[tuple[Row, Any]]) -> Sequence[Sequence[float]] | None:
    """What the active model says of the same rows; None where it cannot be loaded any more: then it serves nobody."""
    from controlplane.training import length_model

    try:
        return length_model.replay(body, examples)
    except ArtifactRefused as refusal:
        logger.warning("job.active_model_refused", reason=str(refusal))
        return None


def _active_bodies(pools: Sequence[str]) -> dict[str, bytes]:
    """The trained model that serves each of these pools, where one does."""
    digests = dict(
        Pool.objects.filter(pk__in=pools).exclude(length_model_digest="").values_list("id", "length_model_digest")
    )
    found = Artifact.objects.filter(digest__in=digests.values(), body__isnull=False).values_list("digest", "body")
    bodies = {digest: bytes(body) for digest, body in found if body is not None}
    return {pool: bodies[digest] for pool, digest in digests.items() if digest in bodies}


def _means_of_five(rows: Sequence[Row]) -> dict[str, float]:
    """By event: the mean of the last five answers of its tenant in its pool that had ended when it arrived."""
    ends = deque(sorted((row for row in rows if row.is_complete), key=lambda row: (row.ended_at, row.event)))
    last: dict[tuple[str, str], deque[int]] = defaultdict(lambda: deque(maxlen=5))
    means: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: (row.arrived_at, row.event)):
        while ends and ends[0].ended_at <= row.arrived_at:
            ended = ends.popleft()
            last[ended.pool, ended.tenant].append(ended.output_tokens)
        mine = last[row.pool, row.tenant]
        means[row.event] = fmean(mine) if mine else DEFAULT_TOKENS
    return means


def _medians(rows: Sequence[Row]) -> Mapping[str, int]:
    """Median of each pool's answers."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row.is_complete:
            lengths[row.pool].append(row.output_tokens)
    return {pool: median_low(values) for pool, values in lengths.items()}
