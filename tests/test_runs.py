"""Whole runs of grpo.py, as a user starts, stops and resumes them. Two ranks, the real engine, the embedded model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import (
    ROOT,
    TINY,
    environment,
    metrics_of,
    run_forked,
    run_script,
    samples_of,
    succeeded,
    torchrun_command,
)

from benchmarks.soak import is_alive, ranks_of

SMALL = (
    *("--steps", 4, "--prompts-per-step", 8, "--group-size", 4, "--eval-every", 0, "--save-every", 1),
    *("--keep-checkpoints", 9, "--lr", "1e-3", "--num-minibatches", 2, "--kl-coef", "0.01"),
    *("--overlong-buffer", 40, "--dtype", "fp32"),
)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "first"
    run = succeeded(run_script("algos/grpo.py", *SMALL, "--run-dir", run_dir, nproc=2))
    (run_dir / "stdout").write_text(run.stdout)
    (run_dir / "stderr").write_text(run.stderr)
    return run_dir


def test_output_is_tidy(first_run):
    stdout = (first_run / "stdout").read_text()
    assert "4/4" in stdout
    assert "engine and trainer agree" in stdout
    assert str(first_run) in stdout
    assert (first_run / "stderr").read_text().strip() == ""  # no chatter, and no traceback after the last line


def test_the_run_folder_is_complete(first_run):
    assert {"args.json", "versions.json", "grpo.py", "metrics.jsonl", "samples.jsonl", "curve.png", "hf"} <= {
        path.name for path in first_run.iterdir()
    }
    assert (first_run / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((first_run / "args.json").read_text())["lr"] == 1e-3
    rows = metrics_of(first_run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(0 < row["entropy"] < 5 and row["mismatch_abs"] < 1e-4 for row in rows)
    for row in rows:  # the penalty on length is in the reward, and not in the accuracy
        assert row["rewards/overlong"] < 0
        assert row["reward"] == pytest.approx(row["accuracy"] + row["rewards/overlong"])
    assert {row["step"] for row in samples_of(first_run)} == {1, 2, 3, 4}


def test_the_export_loads_and_generates(first_run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(first_run / "hf")
    tokenizer = AutoTokenizer.from_pretrained(first_run / "hf")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "123+456=?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    text = tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :])
    assert "####" in text
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.equal(
        model.lm_head.weight.float(), AutoModelForCausalLM.from_pretrained(TINY / "model").lm_head.weight.float()
    )


def test_resumed_after_step_2_it_is_the_same_run_bit_for_bit(first_run, tmp_path):
    """Also that the same seed gives the same run: steps 3 and 4 happen a second time."""
    from safetensors import safe_open

    copy = tmp_path / "copy"
    shutil.copytree(first_run, copy)
    for step in (3, 4):
        shutil.rmtree(copy / "checkpoints" / f"step_{step}")
    shutil.rmtree(copy / "hf")
    run = succeeded(run_forked("algos/grpo.py", *SMALL, "--resume", "--run-dir", copy, nproc=2))
    assert "resumed after step 2" in run.stdout
    assert metrics_of(copy) == metrics_of(first_run)
    assert samples_of(copy) == samples_of(first_run)
    files = [safe_open(folder / "hf" / "model.safetensors", "pt") for folder in (first_run, copy)]
    for name in files[0].keys():  # noqa: SIM118 (not a dict)
        assert files[0].get_tensor(name).equal(files[1].get_tensor(name)), name


def test_another_seed_is_another_run_and_one_rank_works_too(first_run, tmp_path):
    succeeded(run_forked("algos/grpo.py", *SMALL, "--seed", 2, "--save-every", 0, "--run-dir", tmp_path / "r", nproc=1))
    here, there = metrics_of(tmp_path / "r"), metrics_of(first_run)
    assert [row["step"] for row in here] == [1, 2, 3, 4]
    assert all(a["entropy"] != b["entropy"] for a, b in zip(here, there, strict=True))
    assert {s["prompt"] for s in samples_of(tmp_path / "r")} != {s["prompt"] for s in samples_of(first_run)}


def test_bf16_works_on_every_processor(first_run, tmp_path):
    """It is the default where the processor multiplies it. Engine and trainer then round, and differ, more."""
    arguments = ("--steps", 2, "--prompts-per-step", 8, "--group-size", 4, "--eval-every", 0, "--lr", "1e-3")
    arguments += ("--dtype", "bf16", "--overlong-buffer", 40, "--no-export", "--run-dir", tmp_path / "r")
    assert "engine and trainer agree" in succeeded(run_forked("algos/grpo.py", *arguments, nproc=2)).stdout
    rows = metrics_of(tmp_path / "r")
    assert all(1e-4 < row["mismatch_abs"] < 0.02 and row["grad_norm"] > 0 for row in rows)
    assert rows[0]["entropy"] == pytest.approx(metrics_of(first_run)[0]["entropy"], rel=0.1)


# -- stopping ---------------------------------------------------------------------------------------------------------


def start(run_dir: Path, *args: object) -> subprocess.Popen:
    """A long run in a process group of its own, returned when its second step is on the screen."""
    command = torchrun_command(
        "algos/grpo.py", *SMALL, "--steps", 500, "--save-every", 0, "--run-dir", run_dir, *args, nproc=2
    )
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    for line in process.stdout:
        if line.strip().startswith("2/500"):
            return process
    raise AssertionError(f"ended with {process.wait()} before its second step")


def test_ctrl_c_stops_all_ranks_within_10_seconds(tmp_path):
    process = start(tmp_path / "r")
    ranks = ranks_of(process)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends; torchrun passes it on
    process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode != 0
    assert len(ranks) == 2
    assert not any(map(is_alive, ranks))


def test_sigterm_saves_and_ends_and_the_run_goes_on_from_there(tmp_path):
    process = start(tmp_path / "r")
    for pid in ranks_of(process):
        os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output[-3000:]
    assert "stopped after step" in output
    saved = int(next((tmp_path / "r" / "checkpoints").glob("step_*")).name.split("_")[1])
    last = metrics_of(tmp_path / "r")[-1]["step"]
    assert saved == last >= 2


def test_an_error_on_one_rank_ends_all_of_them(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise RuntimeError('a bug in my reward')\n"
        "    return 0.0\n"
    )
    began = time.monotonic()
    run = run_script(
        "algos/grpo.py", *SMALL, "--reward-fn", f"{tmp_path}/mine.py:compute_score", "--strict-rewards",
        "--run-dir", tmp_path / "r", nproc=2, timeout=120,
    )  # fmt: skip
    assert run.returncode != 0
    assert "a bug in my reward" in run.stderr
    assert "[rank 1]" in run.stderr
    assert time.monotonic() - began < 100


# -- bad input --------------------------------------------------------------------------------------------------------


def one_line_error(run: subprocess.CompletedProcess) -> str:
    """It must have ended with exit code 2 and one line on stderr, which is returned."""
    lines = run.stderr.strip().splitlines()
    assert run.returncode == 2, run.stderr[-3000:]
    assert len(lines) == 1, run.stderr
    return lines[0]


def refused(*args: object) -> str:
    return one_line_error(run_forked("algos/grpo.py", *args))


def test_plain_python_says_what_is_wrong_in_one_line():
    command = [sys.executable, str(ROOT / "algos/grpo.py"), "--train-files", "nowhere.parquet"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert "nowhere.parquet" in one_line_error(run)


def test_a_buffer_longer_than_the_responses_is_refused():
    assert "--overlong-buffer 49" in refused("--overlong-buffer", 49)


def test_a_folder_that_is_no_model_is_named(tmp_path):
    assert str(tmp_path) in refused("--model", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"top_p": 0.9}, ["--top-p 0.9", "--temperature"]),
        ({"top_k": 20}, ["--top-k 20"]),
        ({"temperature": 0.0}, ["--temperature"]),
        ({"prompts_per_step": 9}, ["9", "2 ranks"]),
        ({"num_minibatches": 3}, ["3", "128", "32"]),
        ({"rollout_tp": 3}, ["3", "2 ranks"]),
        ({"micro_batch_tokens": 100}, ["100", "512", "48"]),
        ({"group_size": 0}, ["--group-size"]),
        ({"chat_template_kwargs": "{oops"}, ["--chat-template-kwargs"]),
        ({"chat_template_kwargs": "[1]"}, ["--chat-template-kwargs"]),
    ],
)
def test_bad_arguments_are_refused_with_the_numbers(monkeypatch, arguments, words):
    from algos.grpo import TINY_DEFAULTS, Args
    from common import arguments as checks
    from common.device import get_device
    from common.launch import UserError, json_object

    monkeypatch.setenv("WORLD_SIZE", "2")
    args = Args(**arguments)
    checks.fill_in(args, TINY_DEFAULTS, get_device())
    with pytest.raises(UserError) as error:
        checks.check_rollout(args)
        json_object(args.chat_template_kwargs, flag="--chat-template-kwargs")
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def write_rows(path: Path, **changes) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {
        "data_source": "solorl/tiny-arith",
        "prompt": [{"role": "user", "content": "1+1=?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    pq.write_table(pa.Table.from_pylist([row | changes] * 4), path)
    return path


def test_an_unknown_data_source_is_named(tmp_path):
    path = write_rows(tmp_path / "x.parquet", data_source="nobody/knows")
    error = refused("--train-files", path, "--test-files", path, "--run-dir", tmp_path / "r")
    assert "nobody/knows" in error
    assert "--reward-fn" in error


def test_prompts_that_are_all_too_long_are_counted(tmp_path):
    path = write_rows(tmp_path / "x.parquet", prompt=[{"role": "user", "content": "1" * 600}])
    error = refused("--train-files", path, "--run-dir", tmp_path / "r")
    assert "4" in error
    assert "512" in error
