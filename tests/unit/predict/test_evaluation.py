"""What evaluation reads, splits, counts and reports."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from router_ext import cli
from router_ext.errors import AnswersRefused
from router_ext.predict import reference
from router_ext.predict.answer_files import OUTPUTS, PROMPTS
from router_ext.predict.answers import Answer, read_answers
from router_ext.predict.evaluation import mean_of, split
from router_ext.predict.features import RequestFacts
from router_ext.predict.figures import coverage_by, figures, interval_figures, runaway_figures, spearman

FOLDER = Path(__file__).parents[2] / "support" / "answers"

HEADER = "prompt_id,source,model,max_new_tokens,temperature,top_p,out_tokens,hit_cap"
ROW = "p1,s,m,400,0.7,,12,0"
PROMPT = {"prompt_id": "p1", "source": "s", "subset": "part", "text": "Why?"}


def write(folder: Path, rows: list[str], prompts: list[object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OUTPUTS).write_bytes(gzip.compress("\n".join([HEADER, *rows]).encode()))
    (folder / PROMPTS).write_bytes(gzip.compress("\n".join(json.dumps(prompt) for prompt in prompts).encode()))
    return folder


def test_folders_are_searched_and_joined(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", [ROW], [PROMPT])
    write(tmp_path / "c", ["p1,s,m,,0.0,0.9,400,1"], [{**PROMPT, "text": "line\u2028end"}])
    one, other = read_answers(tmp_path)
    assert (one.text, one.kind, one.tenant, one.output_tokens, one.is_complete) == ("Why?", "s/part", "s m", 12, True)
    assert one.facts == RequestFacts(max_new_tokens=400, temperature=0.7)
    assert other.facts == RequestFacts(temperature=0.0, top_p=0.9, is_greedy=True)
    assert (other.text, other.is_complete) == ("line\u2028end", False)


@pytest.mark.parametrize(
    ("rows", "prompts", "named"),
    [
        (["p2,s,m,400,0.7,,12,0"], [PROMPT], "row 2: prompt 'p2'"),
        ([ROW, "p1,s,m,400,0.7,,none,0"], [PROMPT], "row 3: ValueError"),
        (["p1,s,m,400,0.7,,0,0"], [PROMPT], "out_tokens 0"),
        (["p1,s,m,400,nan,,5,0"], [PROMPT], "temperature 'nan'"),
        ([ROW], [{"prompt_id": "p1"}], "row 1: not a prompt"),
        ([ROW], [[]], "row 1: not a prompt"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, rows: list[str], prompts: list[object], named: str) -> None:
    with pytest.raises(AnswersRefused, match=named):
        read_answers(write(tmp_path, rows, prompts))


def test_a_folder_without_answers_is_named(tmp_path: Path) -> None:
    with pytest.raises(AnswersRefused, match="no outputs"):
        read_answers(tmp_path)


def test_splits_keep_prompts_and_their_near_duplicates_together() -> None:
    answers = read_answers(FOLDER)
    near = [replace(answer, text=f"{answer.text} Thanks!") for answer in answers if len(answer.text) > 120]
    assert len(near) > 20
    train, test = split([*answers, *near], seed=1)
    assert len(train) + len(test) == len(answers) + len(near)
    assert 0.1 < len(test) / (len(train) + len(test)) < 0.35
    texts = {answer.text.removesuffix(" Thanks!") for answer in train}
    assert not texts & {answer.text.removesuffix(" Thanks!") for answer in test if len(answer.text) > 120}
    assert [answer.text for answer in split([*answers, *near], seed=1)[1]] == [answer.text for answer in test]
    assert {answer.text for answer in split([*answers, *near], seed=2)[1]} != {answer.text for answer in test}


def test_figures_are_what_their_names_say() -> None:
    tokens = np.array([10.0, 20.0, 40.0, 5_000.0])
    found = figures(np.array([12.0, 20.0, 20.0, 2_500.0]), tokens)
    assert found["mae"] == pytest.approx((2 + 0 + 20 + 2_500) / 4)
    assert found["mae_2048"] == pytest.approx((2 + 0 + 20 + 0) / 4)
    assert found["median_relative_error"] == pytest.approx((0.2 + 0.5) / 2)
    assert found["accuracy_2"] == pytest.approx(0.75)
    assert figures(tokens, tokens)["r2_log"] == pytest.approx(1.0)
    mean = np.full(4, np.expm1(np.log1p(tokens).mean()))
    assert figures(mean, tokens)["r2_log"] == pytest.approx(0.0)


def test_ranks_of_ties_are_their_mean() -> None:
    left, right = np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0, 4.0])
    ranks = np.array([1.0, 2.5, 2.5, 4.0]), np.array([1.0, 3.0, 2.0, 4.0])
    assert spearman(left, right) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert spearman(left, -left) == pytest.approx(-1.0)
    assert spearman(np.ones(4), right) == 0.0


def test_intervals_count_their_ends_as_inside() -> None:
    quantiles = np.tile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], (4, 1))
    found = interval_figures(quantiles, np.array([1.0, 2.0, 7.0, 8.0]))
    assert (found["coverage_90"], found["coverage_80"]) == (0.75, 0.25)
    assert coverage_by(["a", "a", "b"], np.array([True, False, True]), 2) == {"a": {"n": 2, "coverage_90": 0.5}}


def test_the_chance_of_running_away_is_judged_by_rank_and_by_size() -> None:
    tokens = np.array([10.0, 10.0, 10.0, 9_000.0])
    sharp = runaway_figures(np.array([0.0, 0.0, 0.0, 1.0]), tokens, 2_000)
    blunt = runaway_figures(np.full(4, 0.25), tokens, 2_000)
    assert (sharp["auc"], sharp["brier"]) == (1.0, 0.0)
    assert (blunt["auc"], blunt["brier"]) == (0.5, blunt["brier_of_share"])


def answer(model: str, tokens: int, tenant: str = "t") -> Answer:
    return Answer(
        text="x", kind="k", tenant=tenant, model=model, facts=RequestFacts(), output_tokens=tokens, is_complete=True
    )


def test_trivial_baselines_know_no_prompt_and_no_future() -> None:
    train = [answer("a", 10), answer("a", 30), answer("b", 100)]
    test = [answer("a", 1), answer("a", 2), answer("c", 7, "u"), answer("b", 4)]
    found = reference.trivial(train, test, np.array([1, 0, 3, 2]))
    assert found["global_median"].tolist() == [30.0] * 4
    assert found["model_median"].tolist() == [20.0, 20.0, 30.0, 100.0]
    assert found["tenant_last5_mean"].tolist() == [2.0, 30.0, 30.0, 1.5]


def test_means_are_of_numbers_that_all_splits_have() -> None:
    one = {"a": 1.0, "b": {"c": 2, "d": None}, "e": "x", "f": {"g": 1}}
    other = {"a": 2.0, "b": {"c": 4, "d": 1.0}, "e": "x", "f": None}
    assert mean_of([one, other]) == {"a": 1.5, "b": {"c": 3.0}}


@pytest.mark.slow
def test_the_commands_train_judge_and_show(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On so few prompts the figures mean nothing; that every one is there and sane does."""
    answers = read_answers(FOLDER)
    n_prompts = len({answer.text for answer in answers})
    file = tmp_path / "deep" / "model.safetensors"
    words = ["--experts", "1", "--json"]
    assert cli.main(["predictor", "train", "--data", str(FOLDER), "--output", str(file), *words]) == 0
    assert json.loads(capfd.readouterr().out)["prompts"] == n_prompts
    assert cli.main(["predictor", "inspect", str(file), "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["models"]) == len({answer.model for answer in answers})
    assert (
        cli.main(
            ["predictor", "evaluate", "--train", str(FOLDER), "--test", str(FOLDER), "--model", str(file), "--json"]
        )
        == 0
    )
    found = json.loads(capfd.readouterr().out)
    assert {"mae", "median_relative_error", "r2_log", "spearman", "coverage_80", "coverage_90", "predict_us"} <= set(
        found["model"]
    )
    assert set(found["model"]["predict_us"]) == {"p50", "p99"}
    assert {"global_median", "model_median", "tenant_last5_mean", "empirical_quantiles"} <= set(found["baselines"])
    assert found["whole"]["rows"] == sum(answer.is_complete for answer in answers) < len(answers)
    assert found["whole"]["mae"] != found["model"]["mae"]
    assert found["model"]["mae"] < found["baselines"]["global_median"]["mae"]
    assert found["data"]["test_prompts_seen_in_training"] == n_prompts
    assert found["data"]["seen_by_model"] == {"prompts": n_prompts, "of": n_prompts}
    assert cli.main(["predictor", "evaluate", "--test", str(FOLDER), "--model", str(file)]) == 0
    printed = capfd.readouterr().out
    assert "prediction: p50" in printed
    assert f"NOT held out: the model was trained on {n_prompts} of {n_prompts} prompts" in printed


@pytest.mark.parametrize(
    "words", [[], ["--train", "x"], ["--data", "x", "--train", "y"], ["--data", str(FOLDER), "--seeds", "0"]]
)
def test_options_that_do_not_fit_together_are_refused(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predictor", "evaluate", *words]) == 1
    assert len(capfd.readouterr().err.strip().splitlines()) == 1


def test_a_file_that_is_no_model_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f").write_bytes(b"no")
    assert cli.main(["predictor", "inspect", str(tmp_path / "f")]) == 1
    assert cli.main(["predictor", "inspect", str(tmp_path / "missing")]) == 1
    assert "missing" in capfd.readouterr().err
    assert cli.main(["predictor", "evaluate", "--test", str(FOLDER), "--model", str(tmp_path / "missing")]) == 1
    assert "missing: No such file" in capfd.readouterr().err
