"""A length model in virtual time: what it is trained on, what it is asked, what it learns on the way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router_ext.cli import main
from router_ext.errors import SimulationError
from router_ext.predict import training
from router_ext.sim.answers import Answer, read_answers
from router_ext.sim.foresight import Foresight
from router_ext.sim.jobs import Job
from router_ext.sim.learning import train_on_others
from router_ext.sim.prediction import Prediction, Predictor
from router_ext.sim.runs import Task, perform
from router_ext.sim.suites import SuiteChoice

ANSWERS = Path(__file__).parents[2] / "support" / "answers"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "length-model"
    told: list[float] = []
    path.write_bytes(train_on_others(ANSWERS, on_progress=lambda share, line: told.append(share)))
    assert told == sorted(told)
    assert told[-1] == 1.0
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six clients, three requests a second for a minute: more than one of the smaller servers can do."""
    path = tmp_path / "trace.csv"
    path.write_text("t_s,client,input_tokens,output_tokens\n" + "".join(f"{i / 3},c{i % 6},1,1\n" for i in range(180)))
    return path


def test_it_is_trained_on_all_answers_to_prompts_that_are_not_sent_and_on_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    train: Callable[..., Any] = training.train

    def watched(samples: list[Any], **options: Any) -> Any:
        seen.extend(samples)
        return train(samples, **options)

    monkeypatch.setattr(training, "train", watched)
    train_on_others(ANSWERS, on_progress=lambda share, line: None)
    others = [answer for answer in read_answers(ANSWERS) if not answer.prompt.is_replayed]
    assert sorted((sample.model, sample.output_tokens) for sample in seen) == sorted(
        (answer.model, answer.output_tokens) for answer in others
    )


def job(answer: Answer | None, number: int, output_tokens: int) -> Job:
    return Job(
        tenant=0,
        arrival_s=float(number),
        input_tokens=50 if answer is None else answer.prompt.input_tokens,
        output_tokens=output_tokens,
        max_new_tokens=4_096,
        answer=answer,
    )


def test_what_finishes_is_learned_from(artifact: Path) -> None:
    """A tenant whose answers are three times as long as anybody would expect is soon expected to go on so."""
    foresight = Foresight(artifact.read_bytes())
    replayed = [answer for answer in read_answers(ANSWERS) if answer.prompt.is_replayed][:61]
    first = foresight.quantiles(job(replayed[60], 0, 1), None)
    assert first is not None
    for number, answer in enumerate(replayed[:60], 1):
        asked = job(answer, number, 0)
        told = foresight.quantiles(asked, None)
        assert told is not None
        assert told == foresight.quantiles(asked, None)  # what was said is not said again in another way
        asked.output_tokens = min(3 * told[3], 4_000)
        asked.finish_s = number + 0.5
        foresight.finished(asked)
    last = foresight.quantiles(job(replayed[60], 99, 1), None)
    assert last is not None
    assert last[3] > 1.5 * first[3]


def test_it_is_better_than_chance_on_prompts_it_never_saw(artifact: Path) -> None:
    """Mean distance of logs, against the mean of all answers it was trained on; and 90% lie within its interval."""
    foresight = Foresight(artifact.read_bytes())
    answers = list(read_answers(ANSWERS))
    known = [math.log(answer.output_tokens) for answer in answers if not answer.prompt.is_replayed]
    middle = sorted(known)[len(known) // 2]
    wrong, by_chance, within = 0.0, 0.0, 0
    replayed = [answer for answer in answers if answer.prompt.is_replayed]
    for number, answer in enumerate(replayed):
        told = foresight.quantiles(job(answer, number, answer.output_tokens), None)
        assert told is not None
        wrong += abs(math.log(told[3]) - math.log(answer.output_tokens))
        by_chance += abs(middle - math.log(answer.output_tokens))
        within += told[0] <= answer.output_tokens <= told[-1]
    assert wrong < 0.9 * by_chance
    assert within > 0.75 * len(replayed)


def test_the_same_run_makes_the_same_decisions(trace: Path, artifact: Path) -> None:
    choice = SuiteChoice(name="trace", file=trace, lengths=ANSWERS, model="a10g", num_backends=1)
    task = Task(choice=choice, policy="slo-fair", seed=1, predictor=Predictor.MODEL, model=artifact)
    assert perform(task).digest == perform(task).digest


@pytest.mark.slow
def test_a_model_is_trained_once_and_kept(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kept"
    words = ["simulate", "trace", str(trace), "--lengths", str(ANSWERS), "--model", "a10g", "--backends", "1"]
    words += ["--policy", "slo-fair", "--predictor", "none", "model", "oracle", "--length-model", str(path)]
    assert main([*words, "--jobs", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [entry["predictor"] for entry in result["results"]] == ["none", "model", "oracle"]
    assert all(gain["recovered"]["model"] > 0.3 for gain in result["gains"])
    written = path.stat().st_mtime_ns
    assert main([*words, "--jobs", "1", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert path.stat().st_mtime_ns == written
    assert again["gains"] == result["gains"]


def test_clients_of_whom_only_lengths_are_known_say_something_that_says_nothing(artifact: Path) -> None:
    """No prompts there: it learns their lengths all the same, and slices come out no worse than from what finished."""
    choice = SuiteChoice(name="kv-overreserve")
    model, none = (
        perform(Task(choice=choice, policy="slo-fair", seed=1, predictor=predictor, model=artifact))
        for predictor in (Predictor.MODEL, Predictor.NONE)
    )
    assert model.num_output >= none.num_output


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "light", "--predictor", "model"]) == 1
    assert "predictor model needs --length-model FILE, or --lengths DIR" in capsys.readouterr().err
    path = tmp_path / "damaged"
    assert main(["simulate", "light", "--predictor", "model", "--length-model", str(path)]) == 1
    assert f"{path}: No such file" in capsys.readouterr().err
    path.write_bytes(b"damaged")
    assert main(["simulate", "light", "--predictor", "model", "--length-model", str(path)]) == 1
    assert "the length model cannot be used" in capsys.readouterr().err
    with pytest.raises(SimulationError, match="goes with a length model"):
        Prediction(Predictor.MODEL)
