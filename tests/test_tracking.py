"""The run's folder, its logs, the console, resuming, Weights & Biases offline, the picture."""

import dataclasses
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.launch import UserError
from common.tracking import LINE_WIDTH, Column, Tracker, format_duration, read_metrics, redact, versions

COLUMNS = [Column("reward", "reward"), Column("response_length", "length", ".1f"), Column("perf/tps", "tok/s", ",.0f")]


@dataclasses.dataclass
class Args:
    model: str = "some/model"
    seed: int = 7
    max_tokens: int = 5
    tokenizer: str = "fast"
    hf_token: str | None = "hf_abcdefghijklmnop"
    wandb_api_key: str = "0123456789"
    files: list[str] = dataclasses.field(default_factory=lambda: ["https://me:secret@host/x.parquet", "b.parquet"])
    lr: float = 1e-6


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "grpo.py"
    path.write_text("print('the algorithm')\n")
    return path


def make(script: Path, **options: Any) -> Tracker:
    settings = {"rank": 0, "total_steps": 40, "columns": COLUMNS, "run_dir": script.parent / "run"}
    return Tracker(Args(), script=str(script), **(settings | options))


def metrics_at(step: int) -> dict[str, float]:
    return {"reward": step / 10, "response_length": 20.0 + step, "perf/tps": 5321.0, "only_in_file": 1.0}


def without_clock(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "time/elapsed_s"} for row in read_metrics(path)]


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_tells_what_ran(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    one, two = make(script, run_dir=None), make(script, run_dir=None)
    assert re.fullmatch(r"grpo-\d{8}-\d{6}-7", one.run_dir.name) and one.run_dir.parent.name == "runs"
    assert one.run_dir != two.run_dir  # started in the same second
    assert (one.run_dir / "grpo.py").read_text() == script.read_text()
    found = json.loads((one.run_dir / "versions.json").read_text())
    assert found["torch"] == torch.__version__ and found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "transformers" in found and found["git_commit"] is None  # not in a repository


def test_the_git_commit_is_noted() -> None:
    found = versions(__file__)
    if found["git_commit"] is None:
        pytest.skip("not a git checkout")
    assert re.fullmatch(r"[0-9a-f]{40}", found["git_commit"]) and found["git_dirty"] in (True, False)


def test_no_secrets_are_written(script: Path) -> None:
    tracker = make(script)
    text = (tracker.run_dir / "args.json").read_text()
    assert json.loads(text) == {
        "model": "some/model",
        "seed": 7,
        "max_tokens": 5,
        "tokenizer": "fast",
        "hf_token": "<redacted>",
        "wandb_api_key": "<redacted>",
        "files": ["<redacted>", "b.parquet"],
        "lr": 1e-6,
    }
    assert redact({"note": "hf_" + "x" * 20, "nested": {"password": "p", "n": 1}, "hf_token": None}) == {
        "note": "<redacted>",
        "nested": {"password": "<redacted>", "n": 1},
        "hf_token": None,
    }


def test_a_folder_is_not_used_twice(script: Path) -> None:
    make(script).finish()
    with pytest.raises(UserError, match="already holds a run; resume it"):
        make(script)


def test_a_folder_that_cannot_be_made(script: Path) -> None:
    with pytest.raises(UserError, match=r"grpo.py/run: cannot be made \(Not a directory\)"):
        make(script, run_dir=script / "run")


def rank_main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    os.chdir(folder)
    tracker = make(folder / "grpo.py", rank=rank, run_dir=None)
    (folder / f"dir{rank}").write_text(str(tracker.run_dir))
    with pytest.raises(UserError, match="cannot be made"):  # fails on rank 0 only, raises on both
        make(folder / "grpo.py", rank=rank, run_dir=folder / "grpo.py" / "run")
    log_steps(tracker, range(1, 3))
    if rank == 1:
        tracker.resume(0)
        tracker.note("text")
        tracker.summary({"a": 1})
        assert tracker.plot({"reward": ["reward"]}) is None
    tracker.finish()
    dist.destroy_process_group()


def test_two_ranks_agree_on_the_folder_and_one_writes(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.multiprocessing.spawn(rank_main, args=(script.parent,), nprocs=2)
    assert (script.parent / "dir0").read_text() == (script.parent / "dir1").read_text()
    (run_dir,) = (script.parent / "runs").iterdir()
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")] == [1, 2, 2]
    assert not (run_dir / "summary.json").exists() and not (run_dir / "curve.png").exists()
    out = capfd.readouterr().out
    assert out.count("1/40") == 1 and "text" not in out


# ---- logs ------------------------------------------------------------------------------------------------------------


def test_every_metric_is_in_the_file(script: Path) -> None:
    tracker = make(script)
    tracker.log(1, {**metrics_at(1), "tensor": torch.tensor(2.5)})
    tracker.log_eval(1, {"eval/accuracy": 0.5})
    tracker.log(2, {**metrics_at(2), "bad": math.nan, "worse": math.inf})
    tracker.log_samples(2, [{"prompt": "1+1=", "response": "ä", "reward": 1.0}])
    lines = (tracker.run_dir / "metrics.jsonl").read_text().splitlines()  # already there, although nothing was closed
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # strict JSON: no NaN
    assert [row["step"] for row in rows] == [1, 1, 2]
    assert rows[0].keys() == {"step", "time/elapsed_s", "tensor", *metrics_at(1)} and rows[0]["tensor"] == 2.5
    assert rows[1]["eval/accuracy"] == 0.5
    assert rows[2]["bad"] is None and rows[2]["worse"] is None
    sample = json.loads((tracker.run_dir / "samples.jsonl").read_text())
    assert sample == {"step": 2, "prompt": "1+1=", "response": "ä", "reward": 1.0}


def log_steps(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log(step, metrics_at(step))
        tracker.log_samples(step, [{"response": f"r{step}"}])
        if step % 2 == 0:
            tracker.log_eval(step, {"eval/accuracy": step / 100})


def test_a_resumed_log_equals_that_of_an_uninterrupted_run(script: Path) -> None:
    whole = make(script, run_dir=script.parent / "whole")
    log_steps(whole, range(1, 9))
    broken = make(script)
    log_steps(broken, range(1, 7))
    broken._start -= 100  # as if it had run for a while
    broken.log(7, metrics_at(7))
    broken.finish()
    with open(broken.run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "rew')  # killed while it wrote

    resumed = make(script, resume=True)
    resumed.resume(4)  # the newest checkpoint
    log_steps(resumed, range(5, 9))
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert without_clock(resumed.run_dir / file) == without_clock(whole.run_dir / file)
    clock = [row["time/elapsed_s"] for row in read_metrics(resumed.run_dir / "metrics.jsonl")]
    assert clock == sorted(clock)
    assert {"args.json", "args.resume1.json", "versions.resume1.json", "grpo.resume1.py"} <= {
        path.name for path in resumed.run_dir.iterdir()
    }


def test_the_clock_of_a_resumed_run_goes_on(script: Path) -> None:
    tracker = make(script)
    tracker._start -= 100
    tracker.log(1, metrics_at(1))
    tracker.finish()
    resumed = make(script, resume=True)
    resumed.resume(1)
    resumed.log(2, metrics_at(2))
    assert 100 <= read_metrics(resumed.run_dir / "metrics.jsonl")[-1]["time/elapsed_s"] < 110


# ---- console ---------------------------------------------------------------------------------------------------------


def test_the_console_is_a_table(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = make(script)
    capsys.readouterr()
    for step in range(1, 42):
        tracker.log(step, metrics_at(step) if step != 3 else {"reward": math.nan})
    tracker.log_eval(41, {"eval/accuracy": 0.87654, "time/evaluate": 3.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == " step   reward   length    tok/s     left"
    assert lines[1] == " 1/40    0.100     21.0    5,321        -"
    assert re.fullmatch(r" 3/40      nan        -        -     0:\d\d", lines[3])
    assert [index for index, line in enumerate(lines) if line.startswith(" step")] == [0, 21, 42]
    assert len({len(line) for line in lines[:-1]}) == 1 and len(lines[0]) <= LINE_WIDTH
    assert lines[-1] == "  eval   accuracy 0.8765"
    assert not any("\033" in line for line in lines)  # a log file stays plain


def test_rows_fit_into_the_terminal(script: Path) -> None:
    with pytest.raises(ValueError, match="a row has 100"):
        make(script, columns=[Column(f"m{i}", f"heading{i}") for i in range(12)])


def test_time_left(script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tracker = make(script, total_steps=100)
    for step in range(1, 41):
        now[0] += 60.0 if step < 10 else 3.0  # a slow start must not spoil the estimate for ever
        tracker.log(step, {})
    assert capsys.readouterr().out.splitlines()[-1].endswith("   3:00")  # 60 steps of 3 s
    assert [format_duration(s) for s in (0, 59.6, 61, 3600, 90061)] == ["0:00", "1:00", "1:01", "1:00:00", "25:01:01"]


def test_the_summary_is_shown_and_kept(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = make(script)
    tracker.summary({"accuracy": "0.31 -> 0.91", "steps": 40, "score": 0.123456, "folder": tracker.run_dir})
    out = capsys.readouterr().out
    assert "  accuracy   0.31 -> 0.91\n" in out and "  score      0.1235\n" in out
    kept = json.loads((tracker.run_dir / "summary.json").read_text())
    assert kept["steps"] == 40 and kept["score"] == 0.123456 and kept["folder"] == str(tracker.run_dir)


# ---- picture and Weights & Biases ------------------------------------------------------------------------------------


def test_the_outcome_compares_the_first_and_the_last_evaluation_over_an_interruption(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make(script)
    first.log_eval(0, {"eval/accuracy": 0.25, "eval/response_length": 15.0})
    first.log(1, metrics_at(1))
    first.log_eval(1, {"eval/accuracy": 0.75, "eval/response_length": 30.5})
    first.finish()
    resumed = make(script, resume=True)
    resumed.resume(1)
    resumed.conclude(1, panels={"accuracy": ["eval/accuracy"]})  # nothing was left to do
    summary = json.loads((resumed.run_dir / "summary.json").read_text())
    assert summary["accuracy"] == "0.250 -> 0.750"
    assert summary["response_length"] == "15.000 -> 30.500"


@pytest.mark.parametrize(("evaluations", "said"), [([], None), ([0.5], "0.500"), ([None, 0.5], "0.500")])
def test_the_outcome_of_few_evaluations(script: Path, evaluations: list[float | None], said: str | None) -> None:
    tracker = make(script)
    for step, value in enumerate(evaluations):
        tracker.log_eval(step, {"eval/accuracy": math.nan if value is None else value})
    tracker.log(2, metrics_at(2))
    tracker.conclude(2, panels={"reward": ["reward"]})
    assert json.loads((tracker.run_dir / "summary.json").read_text()).get("accuracy") == said


def test_the_picture_shows_both_curves(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot as plt

    tracker = make(script)
    log_steps(tracker, range(1, 9))
    tracker.log(9, {"reward": math.nan})
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    panels = {"accuracy": ["reward", "eval/accuracy"], "response length (tokens)": ["response_length"], "x": ["absent"]}
    path = tracker.plot(panels)
    assert path == tracker.run_dir / "curve.png" and path.read_bytes().startswith(b"\x89PNG")
    upper, lower, empty = figures[0].axes
    assert upper.get_ylabel() == "accuracy" and lower.get_ylabel() == "response length (tokens)"
    raw, mean, evaluation = upper.lines
    assert list(raw.get_xdata()) == list(range(1, 9)) and raw.get_ydata()[7] == 0.8  # the NaN is no point
    assert mean.get_ydata() == pytest.approx(raw.get_ydata())  # a straight line is its own running mean: no lag
    assert list(evaluation.get_xdata()) == [2, 4, 6, 8]
    assert list(lower.lines[0].get_ydata()) == [20.0 + step for step in range(1, 9)]
    assert not empty.lines


def wandb_records(path: Path) -> list[bytes]:
    """The records of an offline file: LevelDB's log format (32 KiB blocks, 7-byte headers) after 7 bytes of header."""
    data, position, records, record = path.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # too little room for a header: the block ends with zeros
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(record)
            record = b""
    return records


def wandb_rows(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What reached Weights & Biases' own offline files: the history rows, and each metric's step metric."""
    from wandb.proto import wandb_internal_pb2

    rows, step_metrics = [], {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
            if record.HasField("metric"):
                step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return rows, step_metrics


def test_wandb_offline_loses_no_row(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = make(script, wandb_project="solorl-test")
    log_steps(tracker, range(1, 7))
    tracker.summary({"accuracy": 0.5})
    tracker.finish()
    run_id = (tracker.run_dir / "wandb_id.txt").read_text()
    resumed = make(script, wandb_project="solorl-test", resume=True)
    resumed.resume(4)  # W&B itself has already seen step 6
    log_steps(resumed, range(5, 9))
    resumed.finish()
    assert (tracker.run_dir / "wandb_id.txt").read_text() == run_id

    rows, step_metrics = wandb_rows(tracker.run_dir)
    assert step_metrics["*"] == "step"
    # The built-in step only counts rows, so that it never goes backwards when a run resumes from an earlier step.
    assert [row["_step"] for row in rows] == [*range(9), *range(6)]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [2, 4, 6, 6, 8]
    assert [row["reward"] for row in rows if "reward" in row] == [s / 10 for s in (1, 2, 3, 4, 5, 6, 5, 6, 7, 8)]
    assert len(read_metrics(tracker.run_dir / "metrics.jsonl")) == 12
    secrets = (b"hf_abcdefghijklmnop", b"0123456789", b"me:secret@")
    for path in tracker.run_dir.rglob("*"):
        if path.is_file():
            assert not any(secret in path.read_bytes() for secret in secrets), path
