"""Simulations with real answers: who sends what, what is trained on, and what is read."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from router_ext.cli import main
from router_ext.errors import SimulationError
from router_ext.sim.answers import kinds, read_answers
from router_ext.sim.jobs import Job
from router_ext.sim.suites import SuiteChoice
from router_ext.sim.workloads import Streams

ANSWERS = Path(__file__).parents[2] / "support" / "answers"

PROMPT = {"prompt_id": "p", "source": "s", "text": "?", "in_tokens": 1}
COLUMNS = "prompt_id,model,max_new_tokens,temperature,top_p,out_tokens"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six clients, three requests a second for a minute, of lengths that real answers do not have."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "t_s,client,input_tokens,output_tokens\n" + "".join(f"{i / 3},c{i % 6},1,9999\n" for i in range(180))
    )
    return path


def sent(choice: SuiteChoice, index: int, seed: int = 1) -> list[Job]:
    suite = choice.build()
    return list(suite.clients[index].source(Streams(f"{suite.name}:{seed}:{suite.clients[index].name}", index, 1e9)))


def test_each_client_sends_prompts_of_one_source_and_gets_answers_of_one_model(trace: Path) -> None:
    choice = SuiteChoice(name="trace", file=trace, lengths=ANSWERS)
    real = Counter((each.prompt.text, each.model, each.output_tokens) for each in read_answers(ANSWERS))
    kinds_drawn = set()
    for index in range(6):
        jobs = sent(choice, index)
        assert [job.arrival_s for job in jobs] == pytest.approx([(index + 6 * i) / 3 for i in range(30)])
        answers = [job.answer for job in jobs if job.answer is not None]
        assert len(answers) == 30
        ((source, model),) = {(each.prompt.source, each.model) for each in answers}
        kinds_drawn.add((source, model))
        for job, answer in zip(jobs, answers, strict=True):
            assert (answer.prompt.text, model, answer.output_tokens) in real
            assert job.output_tokens == min(answer.output_tokens, 4_096)
            assert job.input_tokens == answer.prompt.input_tokens
            assert job.max_new_tokens == 4_096
        # Every prompt once before any of them again.
        num_prompts = len(kinds(ANSWERS)[source, model])
        assert len({each.prompt.prompt_id for each in answers[:num_prompts]}) == min(30, num_prompts)
    assert len(kinds_drawn) > 1


def test_what_is_sent_depends_on_the_seed_alone(trace: Path) -> None:
    choice = SuiteChoice(name="trace", file=trace, lengths=ANSWERS)
    one, again, other = ([job.output_tokens for job in sent(choice, 0, seed)] for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_prompts_that_are_replayed_are_never_trained_on() -> None:
    replayed = {answer.prompt.text for kind in kinds(ANSWERS).values() for answers in kind for answer in answers}
    others = {answer.prompt.text for answer in read_answers(ANSWERS) if not answer.prompt.is_replayed}
    assert not replayed & others
    assert 0.3 < len(replayed) / len(replayed | others) < 0.7


def test_a_faster_and_shorter_trace_keeps_its_pattern(trace: Path) -> None:
    slow = SuiteChoice(name="trace", file=trace)
    fast = SuiteChoice(name="trace", file=trace, speed=2.0, span_s=10.0)
    assert fast.build().duration_s == 10.0
    for index in range(6):
        expected = [job.arrival_s / 2.0 for job in sent(slow, index) if job.arrival_s <= 20.0]
        assert [job.arrival_s for job in sent(fast, index)] == expected
    with pytest.raises(SimulationError, match=r"a span of 0\.1 s is shorter than the gap"):
        SuiteChoice(name="trace", file=trace, span_s=0.1).build()


def simulate(trace: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    command = ["simulate", "trace", str(trace), "--lengths", str(ANSWERS), "--model", "a10g", "--backends", "1"]
    assert main([*command, "--jobs", "1", "--json", *words]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.slow
def test_predictors_are_compared_on_the_same_requests(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["none", "trivial", "oracle"]
    result = simulate(trace, capsys, "--policy", "vtc", "slo-fair", "--predictor", *names)
    results = result["results"]
    assert [(each["policy"], each["predictor"]) for each in results] == [*itertools.product(["vtc", "slo-fair"], names)]
    assert len({json.dumps({name: each["requests"] for name, each in one["tenants"].items()}) for one in results}) == 1
    for policy, of_policy in (("vtc", results[:3]), ("slo-fair", results[3:])):
        none, trivial, oracle = (each["metrics"] for each in of_policy)
        assert oracle["mean_running"] > 1.1 * none["mean_running"]
        for metric, sign in (("throughput_tokens_per_s", 1.0), ("ttft_p99_s", -1.0)):
            gain = sign * (oracle[metric] / none[metric] - 1.0)
            (told,) = (each for each in result["gains"] if (each["policy"], each["metric"]) == (policy, metric))
            assert told["oracle_gain"] == pytest.approx(gain)
            assert gain >= 0.03
            share = (trivial[metric] - none[metric]) / (oracle[metric] - none[metric])
            assert told["recovered"] == {"trivial": pytest.approx(share)}


def test_what_true_lengths_do_not_gain_is_not_divided_by(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second of the trace: nobody waits, whatever is known."""
    result = simulate(trace, capsys, "--policy", "slo-fair", "--predictor", "none", "mean5", "oracle", "--span", "1")
    assert [each["recovered"] for each in result["gains"]] == [{"mean5": None}] * 2
    assert "gains" not in simulate(trace, capsys, "--policy", "slo-fair", "--predictor", "none", "--span", "1")


@pytest.mark.slow
def test_the_table_and_the_report_tell_predictors_apart(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "trace", str(trace), "--lengths", str(ANSWERS), "--model", "a10g", "--backends", "1"]
    words += ["--policy", "slo-fair", "--predictor", "none", "oracle", "--report", str(tmp_path / "report")]
    assert main([*words, "--jobs", "1"]) == 0
    assert "slo-fair, oracle" in capsys.readouterr().out
    page = (tmp_path / "report" / "report.html").read_text()
    assert "slo-fair, none" in page
    assert f"--lengths {ANSWERS}" in page
    assert "--predictor none oracle" in page


@pytest.mark.parametrize(
    ("prompts", "outputs", "message"),
    [
        (PROMPT, None, r"no outputs\.csv\.gz in it or below"),
        ({"prompt_id": "p"}, [], r"prompts\.jsonl\.gz row 1: not a prompt \(KeyError: 'source'\)"),
        (PROMPT, ["q,m,,,,1"], r"outputs\.csv\.gz row 2: prompt 'q' is not in prompts\.jsonl\.gz"),
        (PROMPT, ["p,m,,,,1", "p,m,,,,0"], r"row 3, column out_tokens: 0 is not a whole number from 1"),
        (PROMPT, ["p,m,,hot,,1"], r"row 2: ValueError: could not convert string to float: 'hot'"),
        (PROMPT, ["p,m,,,,1"], r"no source and model with answers to 10 prompts"),
    ],
)
def test_what_cannot_be_read_is_named(prompts: object, outputs: list[str] | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl.gz").write_bytes(gzip.compress(json.dumps(prompts).encode()))
    if outputs is not None:
        (tmp_path / "outputs.csv.gz").write_bytes(gzip.compress("\n".join([COLUMNS, *outputs]).encode()))
    with pytest.raises(SimulationError, match=message):
        kinds(tmp_path)


def test_answers_belong_to_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "light", "--lengths", str(ANSWERS)]) == 1
    assert "suite light has neither lengths nor speed nor span" in capsys.readouterr().err


def test_a_line_separator_within_a_prompt_is_part_of_it(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    line = json.dumps({**PROMPT, "text": text}, ensure_ascii=False) + "\n"
    (tmp_path / "prompts.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "outputs.csv.gz").write_bytes(gzip.compress(f"{COLUMNS}\np,m,400,0.8,,7\n".encode()))
    (answer,) = read_answers(tmp_path)
    assert answer.prompt.text == text
    assert (answer.max_new_tokens, answer.temperature, answer.top_p, answer.output_tokens) == (400, 0.8, None, 7)


def test_near_duplicates_are_replayed_together_or_not_at_all(tmp_path: Path) -> None:
    """Twenty questions, each asked in five ways that differ in little."""
    words = [f"w{number:x}" for number in range(2_000)]
    lines = []
    for number in range(20):
        text = " ".join(words[number * 40 : number * 40 + 40])
        lines += [{**PROMPT, "prompt_id": f"{number}-{way}", "text": f"{text} way{way}"} for way in range(5)]
    (tmp_path / "prompts.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    rows = "\n".join(f"{line['prompt_id']},m,,,,7" for line in lines)
    (tmp_path / "outputs.csv.gz").write_bytes(gzip.compress(f"{COLUMNS}\n{rows}\n".encode()))
    by_question: dict[str, set[bool]] = {}
    for answer in read_answers(tmp_path):
        by_question.setdefault(answer.prompt.prompt_id.split("-")[0], set()).add(answer.prompt.is_replayed)
    assert all(len(each) == 1 for each in by_question.values())
    assert {True, False} == set().union(*by_question.values())
