from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest

from router_ext.errors import ArtifactRefused
from router_ext.predict import artifact
from router_ext.predict.baseline import (
    DEFAULT,
    LEVELS,
    Baseline,
    LengthSample,
    build_baseline,
    is_complete,
    kaplan_meier_quantiles,
)


def rows(key: str, tenant: str, pool: str, lengths: list[int], *, complete: bool = True) -> list[LengthSample]:
    return [LengthSample(key, tenant, pool, length, complete) for length in lengths]


def load(samples: list[LengthSample]) -> Baseline:
    return Baseline.from_bytes(build_baseline(samples, built_at_us=1_700_000_000_000_000))


def test_the_key_goes_before_tenant_and_pool_each_with_twenty_answers() -> None:
    baseline = load(
        rows("key_a", "ten_1", "pool", [10] * 20)
        + rows("key_b", "ten_1", "pool", [50] * 19)
        + rows("key_c", "ten_2", "pool", [400] * 19)
        + rows("key_d", "ten_3", "other", [9] * 19)
    )
    assert baseline.predict("key_a", "ten_1", "pool").source == "key"
    assert baseline.predict("key_a", "ten_1", "pool").median == 10
    # 19 answers of the key are too few; the tenant has 39 in this pool.
    by_tenant = baseline.predict("key_b", "ten_1", "pool")
    assert (by_tenant.source, by_tenant.n_samples, by_tenant.median, by_tenant.q95) == ("tenant", 39, 10, 50)
    by_pool = baseline.predict("key_c", "ten_2", "pool")
    assert (by_pool.source, by_pool.n_samples, by_pool.q95) == ("pool", 58, 400)
    assert baseline.predict("key_d", "ten_3", "other") == DEFAULT
    assert baseline.predict("key_x", "ten_1", "other") == DEFAULT
    assert baseline.n_entries == {"keys": 1, "tenants": 1, "pools": 1}


def test_without_an_artifact_everybody_gets_1024() -> None:
    prediction = Baseline().predict("key_a", "ten_1", "pool")
    assert (prediction.median, prediction.q95, prediction.source) == (1_024, 1_024, "default")


def test_without_cuts_quantiles_are_the_empirical_ones() -> None:
    rng = random.Random(11)
    lengths = [max(1, round(rng.lognormvariate(5, 1))) for _ in range(777)]
    prediction = load(rows("k", "t", "p", lengths)).predict("k", "t", "p")
    ordered = sorted(lengths)
    assert prediction.values == tuple(ordered[math.ceil(level * 777) - 1] for level in LEVELS)


def test_answers_cut_by_their_cap_do_not_shorten_the_prediction() -> None:
    """Exponential lengths, independent caps: the estimate stays with the true quantiles, leaving cuts out does not."""
    rng = random.Random(12)
    samples: list[LengthSample] = []
    natural: list[int] = []
    for _ in range(20_000):
        length = 1 + math.floor(rng.expovariate(1 / 200))
        cap = rng.choice([64, 128, 256, 1_000])
        samples.append(LengthSample("k", "t", "p", min(length, cap), length <= cap))
        if length <= cap:
            natural.append(length)
    prediction = load(samples).predict("k", "t", "p")
    for level, value in zip(LEVELS, prediction.values, strict=True):
        truth = -200 * math.log(1 - level)
        assert value == pytest.approx(truth, rel=0.08, abs=2)
    natural.sort()
    assert natural[len(natural) // 2] < 0.6 * prediction.median


def test_a_level_that_cuts_leave_open_is_1024_or_the_longest_seen() -> None:
    finished = rows("k", "t", "p", [30] * 20)
    prediction = load(finished + rows("k", "t", "p", [40] * 60, complete=False)).predict("k", "t", "p")
    assert prediction.values == (30, 30, 30, 1_024, 1_024, 1_024, 1_024)
    prediction = load(finished + rows("k", "t", "p", [5_000] * 60, complete=False)).predict("k", "t", "p")
    assert prediction.values == (30, 30, 30, 5_000, 5_000, 5_000, 5_000)


def test_only_natural_ends_count_toward_the_twenty() -> None:
    samples = rows("k", "t", "p", [30] * 19) + rows("k", "t", "p", [40] * 500, complete=False)
    assert load(samples).predict("k", "t", "p") == DEFAULT


@pytest.mark.parametrize(
    ("outcome", "reason", "expected"),
    [
        ("completed", "eos_token", True),
        ("completed", "stop_sequence", True),
        ("completed", "stop", True),
        ("completed", "length", False),
        ("completed", None, False),
        ("cancelled", "eos_token", False),
        ("aborted", None, False),
    ],
)
def test_what_counts_as_a_whole_answer(outcome: str, reason: str | None, expected: bool) -> None:
    assert is_complete(outcome, reason) is expected


def test_impossible_rows_are_left_out() -> None:
    samples = rows("k", "t", "p", [5] * 20) + rows("k", "t", "p", [0, -3, 10**12])
    baseline = load(samples)
    assert baseline.n_rows == 20
    assert baseline.predict("k", "t", "p").q95 == 5


def test_quantiles_between_levels_are_linear_and_monotone() -> None:
    prediction = load(rows("k", "t", "p", list(range(1, 1_001)))).predict("k", "t", "p")
    assert prediction.at(0.5) == prediction.median == 500
    assert prediction.at(0.95) == prediction.at(0.99) == prediction.q95 == 950
    assert prediction.at(0.0) == prediction.at(0.05) == 50
    assert prediction.at(0.6) == 600
    values = [prediction.at(n / 200) for n in range(201)]
    assert values == sorted(values)


def test_the_artifact_does_not_depend_on_the_order_of_rows() -> None:
    rng = random.Random(13)
    samples = [
        LengthSample(f"k{rng.randrange(9)}", f"t{rng.randrange(3)}", "p", rng.randint(1, 300), rng.random() < 0.7)
        for _ in range(2_000)
    ]
    first = build_baseline(samples, built_at_us=5)
    rng.shuffle(samples)
    assert build_baseline(iter(samples), built_at_us=5) == first
    assert Baseline.from_bytes(first).built_at_us == 5


def test_nothing_to_learn_from_still_makes_an_artifact() -> None:
    baseline = load([])
    assert baseline.predict("k", "t", "p") == DEFAULT
    assert kaplan_meier_quantiles({}, {}) == [1_024] * len(LEVELS)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.fixture
def good() -> bytes:
    return build_baseline(rows("k", "t", "p", list(range(1, 101))), built_at_us=5)


def test_any_changed_byte_is_refused_or_changes_nothing(good: bytes) -> None:
    expected = Baseline.from_bytes(good).predict("k", "t", "p")
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        try:
            prediction = Baseline.from_bytes(bytes(damaged)).predict("k", "t", "p")
        except ArtifactRefused:
            continue
        assert prediction == expected


def test_a_truncated_artifact_is_refused(good: bytes) -> None:
    for length in range(len(good)):
        with pytest.raises(ArtifactRefused):
            Baseline.from_bytes(good[:length])


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"\x80\x04K\x01.", b"PK\x03\x04", b'{"a":' * 5_000, b"\xff" * 99]
)
def test_a_foreign_file_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactRefused, match="not a predictor artifact"):
        Baseline.from_bytes(data)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("schema", "other.product", "schema"), ("version", 2, "version 2"), ("kind", "mixture", "kind 'mixture'")],
)
def test_another_schema_version_or_kind_is_refused(good: bytes, field: str, value: object, reason: str) -> None:
    plain = msgspec.json.decode(good)
    plain[field] = value
    with pytest.raises(ArtifactRefused, match=reason):
        Baseline.from_bytes(msgspec.json.encode(plain))


def test_an_artifact_over_the_limit_is_refused_before_it_is_parsed(good: bytes) -> None:
    with pytest.raises(ArtifactRefused, match="over the limit"):
        Baseline.from_bytes(good + b" " * artifact.MAX_BYTES)


def _set_quantiles(values: list[int]) -> Callable[[dict[str, object]], None]:
    def change(payload: dict[str, object]) -> None:
        payload["keys"] = {"k": [20, values]}

    return change


def _set_levels(payload: dict[str, object]) -> None:
    payload["levels"] = [0.5]


def _set_few(payload: dict[str, object]) -> None:
    payload["pools"] = {"p": [3, [1] * len(LEVELS)]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set_quantiles([5, 4, 6, 7, 8, 9, 10]), "rising"),
        (_set_quantiles([0, 4, 6, 7, 8, 9, 10]), "rising"),
        (_set_quantiles([1, 4, 6, 7, 8, 9, 10**9]), "rising"),
        (_set_quantiles([1, 2]), "2 quantiles"),
        (_set_levels, "levels"),
        (_set_few, "from 3 answers"),
        (lambda payload: payload.pop("keys"), "not a baseline"),
    ],
)
def test_absurd_numbers_are_refused_even_with_a_right_digest(
    good: bytes, change: Callable[[dict[str, object]], None], reason: str
) -> None:
    payload, _ = artifact.unpack(good, kind="baseline")
    change(payload)
    with pytest.raises(ArtifactRefused, match=reason):
        Baseline.from_bytes(artifact.pack(payload, kind="baseline", built_at_us=1))
