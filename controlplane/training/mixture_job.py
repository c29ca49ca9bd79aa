"""The work of a mixture job: samples in, a judged artifact out.

    select rows -> train -> judge per pool on the rows held out

torch is imported here, inside the run, by the process that trains and by no other of the control plane.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean, median_low
from typing import Any, NamedTuple

import structlog
from django.db.models import Max
from django.db.models.functions import Coalesce

from controlplane.common.clock import utc_now
from controlplane.common.keeper import Keeper
from controlplane.common.leases import NotPossible
from controlplane.fleet.models import Pool
from controlplane.training.actions import SPAN, min_samples
from controlplane.training.dataset import Filters, Row, Selection, select
from controlplane.training.models import Artifact, Dataset, Job
from controlplane.training.outcome import ACTIVE, CANDIDATE, Built, Verdict, not_judged
from router_ext.errors import ArtifactRefused
from router_ext.predict.baseline import DEFAULT_TOKENS, LEVELS
from router_ext.predict.versions import FEATURE_VERSION

logger = structlog.get_logger(__name__)

MAX_ARTIFACT_BYTES = 64 << 20
_READ, _TRAINED = 0.1, 0.9
"""Progress after reading and after training."""


def build(job: Job, keeper: Keeper, *, now: datetime) -> Built:
    """A model of the job's rows, and how it was judged.

    Raises:
        NotPossible: there are too few samples.
    """
    to_at = job.to_at or now
    filters = Filters(
        from_at=job.from_at or to_at - SPAN, to_at=to_at, pools=job.pools, feature_version=FEATURE_VERSION
    )
    selection = _select(filters, keeper)
    body, metrics = _train(selection, keeper)
    return Built(
        body=body, metrics=metrics, dataset=_dataset(filters, selection), verdicts=_judge(selection, body, keeper)
    )


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
        raise NotPossible(f"only {found}{other} from {span}; at least {min_samples():,} are needed")
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
    """The gate's verdict by pool that has rows held out: on those that the active model has not learnt from either.

    A job may have been asked for a span of the past, whose newest rows are among those that the active model knows.
    """
    from controlplane.training import length_model
    from controlplane.training.gate import judge

    keeper.tell(_TRAINED, "judging it on the rows held out")
    by_pool: dict[str, list[length_model.Example]] = defaultdict(list)
    for example in length_model.readable(selection.heldout):
        by_pool[example[0].pool].append(example)
    active = _active_models(list(by_pool))
    means = _means_of_five([*selection.train, *selection.heldout])
    medians = _medians(selection.train)
    verdicts = {}
    for pool, examples in sorted(by_pool.items()):
        keeper.check()
        serves = active.get(pool)
        is_contender = serves is not None and serves.body != body and _is_loadable(serves.body)
        if serves is not None and is_contender:
            if serves.learnt_until is None:
                verdicts[pool] = not_judged("nobody knows which answers the active model learnt from", 0)
                continue
            examples = [each for each in examples if each[0].arrived_at >= serves.learnt_until]
        rows = [row for row, _ in examples]
        told: dict[str, Sequence[Sequence[float]]] = {
            CANDIDATE: length_model.replay(body, examples),
            "fallback": [row.fallback or [DEFAULT_TOKENS] * len(LEVELS) for row in rows],
            "tenant_mean5": [[means[row.event]] * len(LEVELS) for row in rows],
            "pool_median": [[medians.get(pool, DEFAULT_TOKENS)] * len(LEVELS) for row in rows],
        }
        if serves is not None and is_contender:
            told[ACTIVE] = length_model.replay(serves.body, examples)
        # The history has seen those that were cut; judged are those whose length is known.
        whole = [i for i, row in enumerate(rows) if row.is_complete]
        judged = {name: [quantiles[i] for i in whole] for name, quantiles in told.items()}
        verdicts[pool] = judge(judged, [rows[i].output_tokens for i in whole])
    keeper.tell(0.98)
    return verdicts


class _Active(NamedTuple):
    """The trained model that serves a pool. ``learnt_until``: it has learnt from no row that arrived since; None if
    nobody knows."""

    body: bytes
    learnt_until: datetime | None


def _is_loadable(body: bytes) -> bool:
    """Whether a router could load it; a model that no router can load serves nobody."""
    from router_ext.predict.predictor import Predictor

    try:
        Predictor.load(body)
    except ArtifactRefused as refusal:
        logger.warning("job.active_model_refused", reason=str(refusal))
        return False
    return True


def _active_models(pools: Sequence[str]) -> dict[str, _Active]:
    """Of each of these pools that a trained model serves."""
    digests = dict(
        Pool.objects.filter(pk__in=pools).exclude(length_model_digest="").values_list("id", "length_model_digest")
    )
    learnt = Max(Coalesce("job__dataset__heldout_from", "job__dataset__to_at"))
    found = Artifact.objects.filter(digest__in=digests.values(), body__isnull=False).annotate(learnt_until=learnt)
    models = {
        digest: _Active(bytes(body), learnt_until)
        for digest, body, learnt_until in found.values_list("digest", "body", "learnt_until")
        if body is not None
    }
    return {pool: models[digest] for pool, digest in digests.items() if digest in models}


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
