"""Whole runs that are killed, resumed, broken and started beside each other. Two ranks, the real engine, one rank less.

tests/test_checkpoint_kills.py kills at every single file operation of a save; benchmarks/soak.py kills for longer.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, environment, metrics_of, run_forked, samples_of, succeeded, torchrun_command
from test_reliability import outcome, root_cause, wait_for

from benchmarks import soak
from benchmarks.soak import is_alive, ranks_of

STEPS = 6
RUN = (
    *("--steps", STEPS, "--prompts-per-step", 8, "--group-size", 4, "--num-minibatches", 2, "--kl-coef", "0.01"),
    *("--lr", "1e-3", "--eval-every", 3, "--save-every", 1, "--keep-checkpoints", 9, "--max-prompt-length", 64),
    # One sequence of the longest fills it: ranks need different numbers of micro-batches.
    *("--micro-batch-tokens", 64 + 48, "--export-dtype", "fp32"),
)


@pytest.fixture(scope="module")
def one_prompt(tmp_path_factory) -> Path:
    """An evaluation of a single prompt: one of the two ranks has none."""
    import pyarrow.parquet as pq

    path = tmp_path_factory.mktemp("data") / "one.parquet"
    pq.write_table(pq.read_table(TINY / "test.parquet").slice(0, 1), path)
    return path


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, one_prompt) -> Path:
    """A run that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run = run_forked("algos/grpo.py", *RUN, "--test-files", one_prompt, "--run-dir", run_dir, nproc=2)
    (run_dir / "output").write_text(succeeded(run).stdout)
    return run_dir


def test_fewer_evaluation_prompts_than_ranks(whole_run):
    rows = [row for row in metrics_of(whole_run) if "eval/accuracy" in row]
    assert [row["step"] for row in rows] == [0, 3, 6]
    assert all(row["eval/accuracy"] in (0.0, 1.0) for row in rows)  # of one prompt, not a mean with an empty rank


def test_a_run_killed_at_a_random_moment_ends_as_if_nothing_had_happened(whole_run, one_prompt, tmp_path):
    """Metrics, samples and fp32 weights; the moment differs from one test run to the next, and is said on failure."""
    seed = int(time.time())
    moment = random.Random(seed)
    arguments = (*map(str, RUN), "--test-files", str(one_prompt))
    command = ("--nproc_per_node", "2", f"{soak.ROOT}/algos/grpo.py", *arguments)
    run_dir, log = tmp_path / "run", tmp_path / "log"
    launcher = soak.start(command, run_dir, resume=False, log=log)
    wanted = moment.randint(1, STEPS - 1)
    while soak.steps_done(run_dir) < wanted:
        assert launcher.poll() is None, log.read_text()[-3000:]
        time.sleep(0.02)
    time.sleep(moment.uniform(0, 0.5))
    gone_after = soak.kill(launcher, moment.choice(["all", "torchrun", "one rank"]))
    assert gone_after < 60
    succeeded(run_forked(*command[2:3], *arguments, "--resume", "--run-dir", run_dir, nproc=2))
    assert soak.differences(run_dir, whole_run) == [], f"seed {seed}"


def test_a_run_without_an_engine_killed_before_its_first_checkpoint_and_once_more(tmp_path):
    """sft.py on one rank. Resuming without a checkpoint begins again: the first evaluation is logged once."""
    data = soak.make_data(tmp_path)
    command = (
        *("--nproc_per_node", "1", f"{soak.ROOT}/algos/sft.py", *data, "--steps", "30", "--batch-size", "8"),
        *("--eval-every", "15", "--save-every", "4", "--export-dtype", "fp32"),
    )
    whole, run_dir, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    undisturbed = soak.start(command, whole, resume=False, log=tmp_path / "whole.log")  # at the same time
    for resume, wanted in ((False, 1), (True, random.randint(5, 25))):
        launcher = soak.start(command, run_dir, resume=resume, log=log)
        while soak.steps_done(run_dir) < wanted:
            assert launcher.poll() is None, log.read_text()[-3000:]
            time.sleep(0.01)
        soak.kill(launcher, "all")
        if not resume:  # as if the kill had come before the first checkpoint, however late it was
            shutil.rmtree(run_dir / "checkpoints")
    assert soak.start(command, run_dir, resume=True, log=log).wait(timeout=120) == 0, log.read_text()[-3000:]
    assert undisturbed.wait(timeout=120) == 0
    assert [row["step"] for row in metrics_of(run_dir) if "eval/loss" in row] == [0, 15, 30]
    assert (run_dir / "metrics.jsonl").read_text().count("eval/loss") == 3
    assert "samples.jsonl" in {path.name for path in run_dir.iterdir()}
    assert soak.differences(run_dir, whole) == []


def test_resumed_on_another_number_of_ranks(whole_run, one_prompt, tmp_path):
    """The same rows in the same order, and the same weights up to the order in which gradients are summed."""
    from safetensors.numpy import load_file

    copy = tmp_path / "copy"
    shutil.copytree(whole_run, copy)
    shutil.rmtree(copy / "checkpoints" / f"step_{STEPS}")
    shutil.rmtree(copy / "hf")
    succeeded(run_forked("algos/grpo.py", *RUN, "--test-files", one_prompt, "--resume", "--run-dir", copy, nproc=1))
    prompts = [row["prompt"] for row in samples_of(whole_run)]
    assert [row["prompt"] for row in samples_of(copy)] == prompts
    here, there = metrics_of(copy)[-2], metrics_of(whole_run)[-2]
    assert here["step"] == there["step"] == STEPS
    for name in ("reward", "response_length", "entropy", "kl_ref", "grad_norm", "lr"):
        assert here[name] == pytest.approx(there[name], rel=1e-3), name
    mine, theirs = load_file(copy / "hf" / "model.safetensors"), load_file(whole_run / "hf" / "model.safetensors")
    for name, weight in theirs.items():
        assert abs(mine[name] - weight).mean() < 1e-6, name  # an update moves a weight by up to 1e-3


# -- one rank fails ---------------------------------------------------------------------------------------------------


def test_an_engine_that_fails_on_one_rank_ends_the_run_and_is_shown_last(tmp_path):
    arguments = (*RUN, "--eval-every", 0, "--save-every", 0, "--run-dir", tmp_path / "run")
    process = subprocess.Popen(
        torchrun_command("tests/workers/troubles.py", "engine", *arguments, nproc=2), env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(process, "step ")
    code, output = outcome(process, limit=60)
    assert code == 1
    assert "rank      : 1 " in root_cause(output)
    assert "[rank 1] RuntimeError: trouble on rank 1" in root_cause(output)
    assert output.count("Traceback (most recent call last)") == 2  # this rank's, and torchrun's


# -- bad numbers ------------------------------------------------------------------------------------------------------


PHASES = {
    "set-up", "evaluate", "logprobs", "update", "sync", "save",
    "rollout",  # fails in test_an_engine_that_fails_on_one_rank_ends_the_run_and_is_shown_last
    "rewards",  # fails in test_runs.py, test_an_error_on_one_rank_ends_all_of_them
}  # fmt: skip


def test_every_phase_of_a_step_is_tried():
    """`PHASES` are those that the script has."""
    assert set(re.findall(r'phases\("(.+?)"\)', (ROOT / "algos" / "grpo.py").read_text())) == PHASES


@pytest.mark.parametrize("phase", sorted(PHASES - {"rollout", "rewards"}))
def test_a_rank_that_fails_in_any_phase_ends_the_run_and_is_shown_last(phase, tmp_path):
    arguments = (*RUN, "--steps", 3, "--eval-every", 1, "--run-dir", tmp_path / "run")
    process = subprocess.Popen(
        torchrun_command("tests/workers/troubles.py", phase, *arguments, nproc=2), env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if phase != "set-up":
        wait_for(process, "step ")
    code, output = outcome(process, limit=60)
    assert code == 1
    assert "[rank 1] RuntimeError: trouble on rank 1" in root_cause(output)
    assert output.count("Traceback (most recent call last)") == 2  # this rank's, and torchrun's


def test_bad_numbers_and_rewards_that_never_return(tmp_path):
    """Skipped updates leave every weight as it was; a third one in a row ends the run. A stuck reward scores 0."""
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str.count('7') == 1:\n"  # some responses, not all of them
        "        time.sleep(1000)\n"
        "    return {'score': float(len(solution_str) % 2), 'length': len(solution_str)}\n"
    )
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        torchrun_command(
            "tests/workers/troubles.py", "numbers", *RUN, "--steps", 20, "--num-minibatches", 1, "--eval-every", 0,
            "--prompts-per-step", 4, "--reward-fn", f"{tmp_path}/mine.py:compute_score", "--reward-timeout", "0.3",
            "--run-dir", run_dir, nproc=2,
        ),
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 1
    checksums = {(int(r), int(u)): c for r, u, c in re.findall(r"checksum (\d) (\d+) (\S+)", output)}
    assert {update for _, update in checksums} == set(range(1, 8))  # the run ended with the third in a row
    for rank in (0, 1):
        of = [checksums[rank, update] for update in range(1, 8)]
        assert of[0] == of[1] == of[2]  # a NaN reward, an infinite gradient
        assert of[3] != of[2]
        assert of[3] == of[4] == of[5] == of[6]  # NaN losses
        assert "nan" not in "".join(of)
    assert re.search(r"step 2: update skipped, .*: row \d+ \(rank 1\): score, reward, advantage; row", output)
    assert "3 updates in a row were skipped (--max-bad-updates)" in root_cause(output)

    rows = metrics_of(run_dir)
    assert [row["bad_updates"] for row in rows] == [0, 1, 2, 2, 3, 4]
    assert sum(row["rewards/timeouts"] for row in rows) > 0
    assert all(row["rewards/length"] == pytest.approx(row["response_length"], rel=0.5) for row in rows)  # not a sum
    logged = [(row["rank"], row["bad"]) for row in samples_of(run_dir) if row["step"] == 2 and "bad" in row]
    assert logged == [(1, "score, reward, advantage"), *[(1, "advantage")] * 3]  # the NaN, and the group that it spoils


# -- two runs at once -------------------------------------------------------------------------------------------------


def test_two_tensor_parallel_runs_at_once_and_one_that_was_killed_do_not_meet(tmp_path):
    """The second starts while the first holds its shared memory; neither leaves a name in /dev/shm, killed or not."""
    before = {path.name for path in Path("/dev/shm").iterdir()}
    first = subprocess.Popen(
        torchrun_command("tests/workers/syncs.py", "--out", tmp_path / "first", "--hold", nproc=2), env=environment(),
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(first, "ready")
    ranks = ranks_of(first)
    succeeded(run_forked("tests/workers/syncs.py", "--out", tmp_path / "second", "--syncs", 80, nproc=2))
    assert len(ranks) == 2
    assert all(map(is_alive, ranks))  # the first is still there
    results = json.loads((tmp_path / "second").read_text())
    for pid in [first.pid, *ranks]:
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=60)
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert not [name for name in left | set(results["shared_memory"]) if "cpushm" in name]
    assert results["mb_per_sync"] < 0.1, results
