"""benchmarks/learning_curves.py: what is run, what is read of it, and the verdict. The runs themselves take an hour."""

import json
from pathlib import Path

import pytest
from conftest import ROOT

from benchmarks import learning_curves
from benchmarks.learning_curves import EXPERIMENTS, Args, Result, bar_of, command_of, read, run, table, with_needs

BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


def finished_run(folder: Path, accuracies: list[float]) -> Path:
    """What a finished run leaves of evaluations, every 10 steps, among rows of training."""
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "config.json").write_text("{}")
    rows = [{"step": 5, "reward": 0.5, "time/elapsed_s": 3.0}]
    for number, accuracy in enumerate(accuracies):
        evaluation = {"eval/accuracy": accuracy, "eval/response_length": 15.0 + number}
        rows.append({"step": 10 * number, **evaluation, "time/elapsed_s": 20.0 * number})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_every_script_with_something_to_learn_is_there() -> None:
    scripts = {path.stem for path in (ROOT / "algos").glob("*.py")} - {"sft"}  # the start of all the others
    assert {experiment.script for experiment in EXPERIMENTS} == scripts


def test_models_that_others_need_are_trained_first() -> None:
    assert [experiment.name for experiment in with_needs(("distill",))] == ["grpo", "distill"]
    assert [experiment.name for experiment in with_needs(("ppo, reward model",))][-1] == "ppo, reward model"
    assert with_needs(()) == list(EXPERIMENTS)
    with pytest.raises(SystemExit, match="no such experiment"):
        with_needs(("grop",))


def test_the_command_names_the_model_of_the_same_seed(tmp_path: Path) -> None:
    command = command_of(BY_NAME["distill"], 2, Args(runs_dir=tmp_path, nproc=4))
    assert command[:4] == ["torchrun", "--nproc_per_node", "4", "algos/distill.py"]
    assert command[command.index("--teacher") + 1] == f"{tmp_path}/grpo-seed2/hf"


def test_a_finished_run_is_read_and_not_repeated(tmp_path: Path) -> None:
    finished_run(tmp_path / "grpo-seed3", [0.25, 0.75, 0.9])
    result = run(BY_NAME["grpo"], 3, Args(runs_dir=tmp_path))
    assert (result.steps, result.accuracy, result.length) == ([0, 10, 20], [0.25, 0.75, 0.9], [15.0, 16.0, 17.0])
    assert result.seconds == 40.0


@pytest.mark.parametrize(
    ("name", "last", "reached"),
    [
        ("grpo", 0.85, True),
        ("grpo", 0.84, False),
        ("spin", 0.26, True),
        ("spin", 0.25, False),  # where it started
        ("distill", 0.76, True),  # its teacher has 0.8
        ("distill", 0.75, False),
    ],
)
def test_bars(tmp_path: Path, name: str, last: float, reached: bool) -> None:
    result = read(BY_NAME[name], 1, finished_run(tmp_path / "run", [0.25, last]))
    result.bar = bar_of(result, {1: Result(BY_NAME["grpo"], 1, accuracy=[0.2, 0.8])})
    assert result.reached is reached
    assert ("missed" in table({name: [result]})) is not reached


def test_a_run_that_fails_is_said_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_curves, "command_of", lambda *_: ["torchrun", "no_such_script.py"])
    with pytest.raises(RuntimeError, match=r"grpo, seed 1: exit code \d+; .*grpo-seed1.log says why"):
        run(BY_NAME["grpo"], 1, Args(runs_dir=tmp_path))
    assert "no_such_script.py" in (tmp_path / "grpo-seed1.log").read_text()


def test_the_report_names_no_place_of_this_machine(tmp_path: Path) -> None:
    result = read(BY_NAME["distill"], 1, finished_run(tmp_path / "run", [0.25, 0.75]))
    result.bar = 0.7
    learning_curves.write({"distill": [result]}, Args(runs_dir=tmp_path / "runs", out_dir=tmp_path / "out", seeds=(1,)))
    report = (tmp_path / "out" / "learning_curves.md").read_text() + (
        tmp_path / "out" / "learning_curves.json"
    ).read_text()
    assert "--teacher runs/learning_curves/grpo-seed1/hf" in report
    assert "learning_curves.py --only distill" in report
    assert str(tmp_path) not in report and str(ROOT) not in report
    assert (tmp_path / "out" / "learning_curves.png").read_bytes()[:4] == b"\x89PNG"
