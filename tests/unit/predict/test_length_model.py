"""What training makes of samples, and what a predictor makes of the file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.lengths import ASKS, MODELS, QUICK, prompt, samples, trained

from router_ext.errors import ArtifactRefused, TrainingFailed
from router_ext.predict import conformal, kernel, model_file, probes, seen, training, trees
from router_ext.predict.baseline import LEVELS, MAX_TOKENS
from router_ext.predict.features import DENSE, Features, RequestFacts, extract
from router_ext.predict.forward import forward
from router_ext.predict.grouping import groups
from router_ext.predict.mixture import Mixture, Rows, fit_mixture, tensors
from router_ext.predict.predictor import MAX_CORRECTION, Prediction, Predictor, Request
from router_ext.predict.training import Cancelled, Options, Sample, train

FACTS = RequestFacts(max_new_tokens=4_096, temperature=0.7)


@cache
def predictor() -> Predictor:
    return Predictor.load(trained().artifact)


def predict(found: list[Sample], **changes: Any) -> list[Prediction]:
    return predictor().predict_batch([Request(features=one.features, model=one.model, **changes) for one in found])


def test_lengths_of_prompts_that_were_not_seen_are_predicted() -> None:
    fresh = samples(80, seed=99)
    rest = [
        math.log1p(prediction.median) - math.log1p(one.output_tokens)
        for prediction, one in zip(predict(fresh), fresh, strict=True)
    ]
    spread = np.std([math.log1p(one.output_tokens) for one in fresh])
    assert np.std(rest) < 0.35 * spread
    assert abs(np.median(rest)) < 0.1


def test_intervals_cover_what_they_say_on_prompts_that_were_not_seen() -> None:
    fresh = samples(200, seed=98)
    predicted = predict(fresh)
    for low, high, least, most in ((0, -1, 0.84, 0.96), (1, -2, 0.72, 0.88)):
        inside = np.mean(
            [
                p.quantiles[low] <= one.output_tokens <= p.quantiles[high]
                for p, one in zip(predicted, fresh, strict=True)
            ]
        )
        assert least <= inside <= most


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    few = samples(80, seed=3)
    one, same, other = (train(few, seed=seed, built_at_us=1, options=QUICK).artifact for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_one_expert_is_a_candidate_and_reported() -> None:
    metrics = trained().metrics
    assert set(metrics["experts_pinball"]) == {"1", "2"}
    assert str(metrics["experts"]) == min(metrics["experts_pinball"], key=metrics["experts_pinball"].__getitem__)
    json.dumps(metrics, allow_nan=False)


def test_progress_rises_to_the_end() -> None:
    seen: list[tuple[float, str]] = []
    train(samples(80, seed=3), seed=1, built_at_us=1, on_progress=lambda s, line: seen.append((s, line)), options=QUICK)
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert sum(bool(line) for _, line in seen) > 5


@pytest.mark.parametrize("calls", [1, 10, 40])
def test_training_stops_when_told(calls: int) -> None:
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= calls

    with pytest.raises(Cancelled):
        train(samples(80, seed=3), seed=1, built_at_us=1, should_stop=should_stop, options=QUICK)
    assert asked == calls


@pytest.mark.parametrize("n_prompts", [0, 1, 29])
def test_too_little_to_learn_from_is_refused(n_prompts: int) -> None:
    with pytest.raises(TrainingFailed, match=f"to {n_prompts} prompts"):
        train(samples(n_prompts, seed=1), seed=1, built_at_us=1, options=QUICK)


def test_answers_that_were_cut_do_not_pull_predictions_down() -> None:
    """The mutant takes cut answers for whole ones."""
    limit = 150
    cut = [
        Sample(
            features=one.features,
            model=one.model,
            output_tokens=min(one.output_tokens, limit),
            is_complete=one.output_tokens <= limit,
        )
        for one in samples(240, seed=7)
    ]
    mutant = [Sample(features=one.features, model=one.model, output_tokens=one.output_tokens) for one in cut]
    rng = random.Random(4)
    essays = [text for text, level in (prompt(rng) for _ in range(60)) if level == max(ASKS.values())]
    asked = [Request(features=extract(text, FACTS), model="wordy") for text in essays]
    medians = [
        np.median(
            [
                p.median
                for p in Predictor.load(train(rows, seed=1, built_at_us=1, options=QUICK).artifact).predict_batch(asked)
            ]
        )
        for rows in (cut, mutant)
    ]
    assert medians[0] > 1.3 * medians[1]


def test_an_unknown_model_and_an_unknown_prompt_are_predicted_soberly() -> None:
    strange = [extract(text, RequestFacts()) for text in ("", "\n" * 50, "qzx " * 3_000, "日本語で答えて")]
    known = [one for one in samples(40, seed=5) if one.model == "plain"]
    found = predict([Sample(features=one, model="nobody", output_tokens=1) for one in strange])
    assert all(1.0 <= p.quantiles[0] <= p.quantiles[-1] < 50_000 for p in found)
    unknown = predict([Sample(features=one.features, model="nobody", output_tokens=1) for one in known])
    ratio = [u.median / p.median for u, p in zip(unknown, predict(known), strict=True)]
    assert 0.5 < np.median(ratio) < 2.0


def test_predictions_do_not_depend_on_their_batch() -> None:
    fresh = samples(20, seed=42)
    together = predict(fresh)
    alone = [predict([one])[0] for one in fresh]
    np.testing.assert_allclose([p.quantiles for p in together], [p.quantiles for p in alone], rtol=1e-4)


@pytest.mark.parametrize("correction", [0.0, 0.5, -0.5, 99.0, -99.0, math.nan, math.inf])
@pytest.mark.parametrize("limit", [0, 1, 17, 100_000])
def test_whatever_is_corrected_quantiles_stay_finite_rising_and_within_limits(correction: float, limit: int) -> None:
    for p in predict(samples(5, seed=8), correction=correction, max_new_tokens=limit, n_answers=3):
        assert len(p.quantiles) == len(LEVELS)
        assert list(p.quantiles) == sorted(p.quantiles)
        assert p.quantiles[0] >= 1.0
        assert p.quantiles[-1] <= (limit or MAX_TOKENS)
        assert 0.0 <= p.runaway <= 1.0


def test_a_correction_moves_the_median_by_its_logarithm_and_no_further_than_the_bound() -> None:
    one = samples(1, seed=12)[:1]
    plain, more, most = (predict(one, correction=c)[0] for c in (0.0, 0.5, 99.0))
    assert math.log1p(more.median) - math.log1p(plain.median) == pytest.approx(0.5, abs=1e-3)
    assert math.log1p(most.median) - math.log1p(plain.median) == pytest.approx(MAX_CORRECTION, abs=1e-3)
    assert more.log_median == plain.log_median


def test_known_prompts_have_narrower_intervals_never_wider() -> None:
    widths = predictor().header.settings["memory_widths"]
    assert widths[0] == 1.0
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] > 0.0


def test_without_torch_the_mixture_is_the_same_function() -> None:
    torch.manual_seed(0)
    mixture = Mixture(10, 3, 4).eval()
    rng = np.random.default_rng(0)
    inputs, base = rng.standard_normal((50, 10), np.float32), rng.standard_normal(50, np.float32)
    models = rng.integers(-1, 3, 50)
    with torch.no_grad():
        place = torch.from_numpy(np.where(models < 0, 3, models))
        quantiles, logit = mixture(torch.from_numpy(inputs), place, torch.from_numpy(base))
    ours, runaway = forward(tensors(mixture), inputs, models, base)
    np.testing.assert_allclose(ours, quantiles.numpy(), atol=1e-5)
    np.testing.assert_allclose(runaway, torch.sigmoid(logit).numpy(), atol=1e-5)
    assert (np.diff(ours, axis=1) > 0).all()


def test_the_chance_of_running_away_is_learned_apart_from_the_median() -> None:
    rng = np.random.default_rng(1)
    n = 4_000
    inputs = rng.standard_normal((n, 3), np.float32)
    away = (inputs[:, 0] > 1.0) & (rng.random(n) < 0.4)
    y = np.where(away, np.float32(math.log(5_000)), np.float32(5.0) + rng.standard_normal(n, np.float32) * 0.2)
    rows = Rows(
        inputs=inputs,
        base=np.full(n, 5.0, np.float32),
        models=np.zeros(n, np.int64),
        y=y.astype(np.float32),
        is_cut=np.zeros(n, np.bool_),
        is_runaway=away,
        weight=np.ones(n, np.float32),
    )
    mixture = fit_mixture(
        rows, n_models=1, n_experts=2, seed=1, on_progress=lambda share: None, should_stop=lambda: False
    )
    quantiles, runaway = forward(tensors(mixture), inputs, rows.models, rows.base)
    risky, safe = inputs[:, 0] > 1.5, inputs[:, 0] < 0.5
    assert runaway[risky].mean() > 0.25
    assert runaway[safe].mean() < 0.05
    assert np.median(quantiles[risky, 3]) < 6.0


def test_groups_hold_near_duplicates_and_nobody_else() -> None:
    rng = random.Random(2)
    words = [f"word{i}a" for i in range(400)]
    texts = [" ".join(rng.sample(words, 30)) for _ in range(60)]
    near = [text.replace(text.split()[3], "changed") for text in texts[:10]]
    template = "Solve this task step by step and answer in the following format as one JSON object: "
    found = groups([extract(template + text, FACTS) for text in [*texts, *near, texts[0]]])
    assert (found[:10] == found[60:70]).all()
    assert found[70] == found[0]
    assert len(set(found[:60].tolist())) == 60


def test_a_group_of_any_size_is_one() -> None:
    """120 prompts that differ in one word each, too few among so many for a template's."""
    random = np.random.default_rng(5)

    def hashed(ids: np.ndarray[Any, Any]) -> Features:
        kept = np.unique(ids).astype(np.uint16)
        return Features(np.zeros(len(DENSE), np.float32), kept, np.ones(len(kept), np.uint8))

    strangers = [hashed(random.integers(0, 1 << 16, 60)) for _ in range(7_000)]
    first = random.integers(0, 1 << 16, 60)
    near = [hashed(np.append(first[1:], random.integers(0, 1 << 16))) for _ in range(120)]
    found = groups([*near, *strangers])
    assert len(set(found[:120].tolist())) == 1
    assert len(set(found.tolist())) == 7_001


@pytest.mark.parametrize("is_mutant", [False, True])
def test_conformal_factors_cover_what_the_levels_say(is_mutant: bool) -> None:
    """The mutant leaves the intervals as they are."""
    rng = np.random.default_rng(3)
    scale = np.array([-0.8, -0.6, -0.3, 0.0, 0.3, 0.6, 0.8], np.float32)
    seen, fresh = (rng.standard_normal(4_000, np.float32) for _ in range(2))
    logs = np.tile(scale, (4_000, 1))
    factors = conformal.factors(logs, seen, np.zeros(4_000, np.int64), 1)
    widened = logs if is_mutant else conformal.widen(logs, factors[np.zeros(4_000, np.int64)])
    covered = [float(((widened[:, pair] <= fresh) & (fresh <= widened[:, -1 - pair])).mean()) for pair in range(3)]
    close = [abs(share - want) < 0.03 for share, want in zip(covered, (0.9, 0.8, 0.5), strict=True)]
    assert all(close) is not is_mutant


def test_widening_keeps_quantiles_rising() -> None:
    logs = np.tile(np.linspace(-1, 1, 7, dtype=np.float32), (1, 1))
    widened = conformal.widen(logs, np.array([[0.25, 0.5, 4.0]], np.float32))
    assert (np.diff(widened, axis=1) >= 0).all()


# --- the file -----------------------------------------------------------------------------------------------------


def repacked(change: Callable[[dict[str, Any], model_file.Tensors], None]) -> bytes:
    """The file with other content and a digest that fits it."""
    header, blob = model_file.unpack(trained().artifact)
    fields = {"models": list(header.models), "settings": dict(header.settings)}
    blob = {name: tensor.copy() for name, tensor in blob.items()}
    change(fields, blob)
    return model_file.pack(blob, metrics={}, built_at_us=1, **fields)


def put(name: str, tensor: Any) -> Callable[[dict[str, Any], model_file.Tensors], None]:
    return lambda fields, blob: blob.update({name: tensor})


def drop(name: str) -> Callable[[dict[str, Any], model_file.Tensors], None]:
    return lambda fields, blob: blob.pop(name)


def test_repacking_alone_changes_nothing() -> None:
    data = repacked(lambda fields, blob: None)
    one = samples(1, seed=2)[0]
    asked = [Request(features=one.features, model=one.model)]
    assert Predictor.load(data).predict_batch(asked) == predictor().predict_batch(asked)


@pytest.mark.parametrize("place", [0, 4, 9, 200, 0.3, 0.6, 0.9, -1])
def test_a_flipped_bit_is_found(place: float) -> None:
    data = bytearray(trained().artifact)
    at = int(place * len(data)) if isinstance(place, float) else int(place)
    data[at] ^= 0x10
    with pytest.raises(ArtifactRefused):
        Predictor.load(bytes(data))


@pytest.mark.parametrize("length", [0, 1, 8, 100, 0.5, 0.999])
def test_a_cut_file_is_refused(length: float) -> None:
    data = trained().artifact
    with pytest.raises(ArtifactRefused):
        Predictor.load(data[: int(length * len(data)) if isinstance(length, float) else int(length)])


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"PK\x03\x04" + b"\0" * 100, b"\x80\x04\x95" + b"\0" * 50, b"\x02\0\0\0\0\0\0\0[]"]
)
def test_a_foreign_file_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactRefused):
        Predictor.load(data)


def test_an_oversize_file_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "MAX_BYTES", 1_000)
    with pytest.raises(ArtifactRefused, match="over the limit"):
        Predictor.load(trained().artifact)


def test_a_header_over_the_limit_is_refused_unread() -> None:
    data = trained().artifact
    n = int.from_bytes(data[:8], "little")

    def padded(size: int) -> bytes:
        return size.to_bytes(8, "little") + data[8 : 8 + n].ljust(size) + data[8 + n :]

    assert Predictor.load(padded(n + 8)).models
    with pytest.raises(ArtifactRefused, match="header"):
        Predictor.load(padded(model_file.MAX_HEADER_BYTES + 8))


def test_another_feature_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "FEATURE_VERSION", 99)
    with pytest.raises(ArtifactRefused, match="features of version"):
        Predictor.load(trained().artifact)


@pytest.mark.parametrize(
    "change",
    [
        put("kernel.level", np.full(4, np.nan, np.float32)),
        put("kernel.weights", np.zeros((4, 3), np.float32)),
        put("conformal.factors", np.zeros((4, 1), np.float32)),
        put("basis.row", np.full(1 << 16, 99_999_999, np.int32)),
        put("mixture0.first.weight", np.zeros((3, 3), np.float32)),
        put("mixture1.embedding.weight", np.zeros((2, 12), np.float32)),
        put("mixture0.first.weight", np.full((96, 127), 1e38, np.float32)),
        drop("mixture1.gate.bias"),
        drop("scaling.mean"),
        lambda fields, blob: fields["settings"].pop("memory_widths"),
        lambda fields, blob: fields["settings"].pop(probes.SETTING),
        lambda fields, blob: fields["settings"].update({"mixtures": [1e9]}),
        lambda fields, blob: fields["settings"].update({"memory_widths": []}),
        lambda fields, blob: fields["models"].append("one too many"),
        lambda fields, blob: fields["models"].clear(),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    change: Callable[[dict[str, Any], model_file.Tensors], None],
) -> None:
    with pytest.raises(ArtifactRefused):
        Predictor.load(repacked(change))


@pytest.mark.parametrize("is_mutant", [False, True])
@pytest.mark.parametrize(
    ("name", "factor"),
    [("kernel.level", -50.0), ("mixture0.experts.bias", 40.0), ("basis.projection", 3.0), ("conformal.factors", 0.5)],
)
def test_finite_weights_that_are_not_those_of_the_training_are_refused(
    name: str, factor: float, is_mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest fits. The mutant asks no questions with known answers."""

    def damage(fields: dict[str, Any], blob: model_file.Tensors) -> None:
        changed = blob[name] * np.array(factor, blob[name].dtype)
        blob[name] = changed if changed.any() else np.full_like(changed, factor)

    if is_mutant:
        monkeypatch.setattr(probes, "check", lambda *_: None)
        assert Predictor.load(repacked(damage)).models
    else:
        with pytest.raises(ArtifactRefused, match="not those of its training"):
            Predictor.load(repacked(damage))


@pytest.mark.parametrize("answers", [[], [0.0]])
def test_questions_without_their_answers_are_refused(answers: list[float]) -> None:
    with pytest.raises(ArtifactRefused):
        Predictor.load(repacked(lambda fields, blob: fields["settings"].update({probes.SETTING: answers})))


def test_a_file_that_knows_its_training_rows_worse_than_new_prompts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(vectors: Any, prompt_of: Any, *others: Any, **more: Any) -> kernel.Kernel:
        found = kernel.fit_kernel(vectors, prompt_of, *others, **more)
        is_final = len(prompt_of) == len(few)
        return kernel.Kernel(level=found.level + np.float32(2.0 * is_final), weights=found.weights)

    few = samples(80, seed=3)
    monkeypatch.setattr(training, "fit_kernel", spoiled)
    with pytest.raises(TrainingFailed, match="own pinball loss"):
        train(few, seed=1, built_at_us=1, options=QUICK)


# --- what it was trained on ---------------------------------------------------------------------------------------


def test_a_model_knows_which_prompts_it_was_trained_on() -> None:
    _, blob = model_file.unpack(trained().artifact)
    own, fresh = ({one.features.pack(): one.features for one in samples(240, seed=s)}.values() for s in (7, 99))
    assert seen.seen(blob[seen.TENSOR], own) == (240, 240)
    assert seen.seen(blob[seen.TENSOR], fresh) == (0, 240)


def test_other_sampling_of_a_prompt_is_the_same_prompt() -> None:
    one, other = (extract("Why?", facts) for facts in (FACTS, RequestFacts(is_greedy=True)))
    assert seen.seen(seen.sketch([one]), [other]) == (1, 1)


def test_a_sketch_is_bounded_and_still_a_fair_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "MAX_HASHES", 100)
    prompts = [extract(f"Prompt {i}", FACTS) for i in range(600)]
    known = seen.sketch(prompts[:400])
    assert len(known) == 100
    found, of = seen.seen(known, prompts[200:])
    assert 50 < of < 150
    assert 0.3 < found / of < 0.7
    assert seen.seen(known, prompts[:400]) == (100, 100)


# --- trees --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not trees.is_available(), reason="scikit-learn is not installed")
def test_trees_are_read_out_of_boosters_and_join_the_blend() -> None:
    found = train(samples(240, seed=7), seed=1, built_at_us=1, options=Options(experts=(1,)))
    assert found.metrics["has_trees"]
    served = Predictor.load(found.artifact)
    fresh = samples(60, seed=21)
    predicted = served.predict_batch([Request(features=one.features, model=one.model) for one in fresh])
    rest = [math.log1p(p.median) - math.log1p(one.output_tokens) for p, one in zip(predicted, fresh, strict=True)]
    assert np.std(rest) < 0.5 * np.std([math.log1p(one.output_tokens) for one in fresh])


def test_without_scikit_learn_training_goes_on_without_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.trees, "is_available", lambda: False)
    found = train(samples(80, seed=3), seed=1, built_at_us=1, options=Options(experts=(1,)))
    assert not found.metrics["has_trees"]
    assert Predictor.load(found.artifact).models == sorted(MODELS)


def test_trees_that_lead_nowhere_are_refused() -> None:
    sound = {
        "feature": np.array([0, -1, -1], np.int16),
        "threshold": np.zeros(3, np.float32),
        "left": np.array([1, 1, 2], np.int32),
        "right": np.array([2, 1, 2], np.int32),
        "value": np.array([0.0, 1.0, 2.0], np.float32),
        "start": np.zeros(1, np.int32),
        "offset": np.zeros(1, np.float32),
        "depth": np.ones(1, np.int32),
    }
    found = trees.Trees(**sound)
    found.check(1)
    assert found.predict(np.array([[-1.0], [0.0], [0.1]], np.float32)).tolist() == [1.0, 1.0, 2.0]
    for damage in (
        {"left": [9, 1, 2]},
        {"right": [-1, 1, 2]},
        {"feature": [5, -1, -1]},
        {"depth": [1_000]},
        {"start": [3]},
    ):
        broken = {**sound, **{name: np.array(value, sound[name].dtype) for name, value in damage.items()}}
        with pytest.raises(ValueError, match="lead nowhere"):
            trees.Trees(**broken).check(1)


def test_features_are_what_training_takes() -> None:
    one = samples(1, seed=1)[0]
    assert Features.unpack(one.features.pack()).pack() == one.features.pack()


def test_prompts_of_one_template_can_be_learnt_from() -> None:
    """All are near-duplicates of each other: keeping them together would leave folds without a row."""
    draw = random.Random(5)
    tasks = (
        "Write {n} words about {topic}.",
        "Explain {topic} in {n} words.",
        "I need a text of {n} words on {topic}.",
    )
    topics = ("rivers", "bridges", "the moon", "old towns", "bread", "glaciers", "violins", "maps")
    few = [
        Sample(
            features=extract(task.format(n=n, topic=topic), FACTS),
            model="m",
            output_tokens=max(1, round(n * draw.lognormvariate(0.0, 0.2))),
        )
        for n in (20, 40, 80, 150, 300, 600)
        for task in tasks
        for topic in topics
        for _ in range(2)
    ]
    assert len(set(groups([one.features for one in few]).tolist())) < training.FOLDS
    metrics = train(few, seed=1, built_at_us=1, options=QUICK).metrics
    assert math.isfinite(metrics["new_prompts"]["pinball"])


def test_models_with_few_prompts_are_covered_better_than_by_factors_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers to a prompt are alike, so 240 of a model say little more than its 12 prompts."""
    models = np.repeat(np.arange(40), 240)
    logs = np.tile(np.array([-1.6, -1.3, -0.7, 0.0, 0.7, 1.3, 1.6], np.float32), (len(models), 1))

    def answers(rng: np.random.Generator) -> Any:
        of_prompt = np.repeat(rng.standard_normal(40 * 12), 20)
        return (0.95 * of_prompt + 0.3 * rng.standard_normal(len(models))).astype(np.float32)

    def covered(seed: int) -> tuple[float, float]:
        """Of other prompts' answers: over all, and of the worst model."""
        rng = np.random.default_rng(seed)
        factors = conformal.factors(logs, answers(rng), models, 40)
        assert (factors[:, 0] >= factors[-1, 0]).all()
        widened, fresh = conformal.widen(logs, factors[models]), answers(rng)
        inside = (widened[:, 1] <= fresh) & (fresh <= widened[:, -2])
        return float(inside.mean()), min(float(inside[models == model].mean()) for model in range(40))

    shrunk = np.mean([covered(seed) for seed in range(8)], axis=0)
    monkeypatch.setattr(conformal, "_SHRINK", 0.0)
    own = np.mean([covered(seed) for seed in range(8)], axis=0)
    assert (shrunk > own + 0.005).all()
    assert abs(shrunk[0] - 0.8) < 0.03


def test_a_model_with_many_answers_has_factors_of_its_own() -> None:
    rng = np.random.default_rng(1)
    models = (rng.random(40_000) < 0.5).astype(np.int64)
    logs = np.tile(np.array([-1.6, -1.3, -0.7, 0.0, 0.7, 1.3, 1.6], np.float32), (len(models), 1))
    y = (rng.standard_normal(len(models)) * np.where(models, 1.0, 0.5)).astype(np.float32)
    found = conformal.factors(logs, y, models, 2)
    assert found[0, 1] < 0.6 * found[1, 1]
    assert found[0, 0] == found[-1, 0] < found[1, 0]
