"""What happens when a rank fails, hangs, is told to stop or meets a NaN: nobody waits, and the first error is shown.

Real processes, two ranks under torchrun, in a loop of phases without a model (tests/workers/launched.py);
tests/test_reliability_runs.py has whole runs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, environment, run_forked, succeeded, torchrun_command
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from algos import grpo
from benchmarks.soak import is_alive, ranks_of
from common import engine, rewards
from common.device import get_device
from common.launch import UserError
from common.tracking import RL_COLUMNS, Tracker

WORKER = "tests/workers/launched.py"


def start(*args: object, script: str = WORKER) -> subprocess.Popen:
    """Two ranks in a process group of their own."""
    return subprocess.Popen(
        torchrun_command(script, *args, nproc=2), env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for(process: subprocess.Popen, line: str) -> str:
    """Read the output until a line that begins like this; returns what was read."""
    read = ""
    for text in process.stdout:
        read += text
        if text.startswith(line):
            return read
    raise AssertionError(f"ended with {process.wait()} before {line!r}:\n{read[-3000:]}")


def root_cause(output: str) -> str:
    """The end of torchrun's report, which is the last thing on the screen."""
    assert output.rstrip().endswith("=" * 20), output[-1000:]
    return output.rsplit("Root Cause", 1)[1]


def outcome(process: subprocess.Popen, limit: float = 60) -> tuple[int, str]:
    """Exit code and remaining output of a run that must end by itself within `limit` seconds, leaving no rank."""
    ranks = ranks_of(process)
    output, _ = process.communicate(timeout=limit)
    assert not [pid for pid in ranks if is_alive(pid)]
    return process.returncode, output


@pytest.mark.parametrize("rank", [0, -1])  # -1: on both at once, where each could think that it was the first
def test_the_first_error_is_shown_last_with_its_rank_and_its_place(rank):
    process = start("--fault", "raise", "--rank", rank)
    wait_for(process, "step 1")
    code, output = outcome(process)
    assert code == 1
    end = root_cause(output)
    first = rank if rank >= 0 else int(end.split("rank      : ")[1][0])
    assert f"rank      : {first} " in end
    assert f"[rank {first}] ValueError: a bug on one rank" in end
    assert "launched.py:" in end  # where it was raised
    # What the other rank ran into is not shown as a second failure of its own.
    assert output.count("Traceback (most recent call last)") == 2  # this rank's, and torchrun's around its report
    assert "SIGTERM: saving" not in output


def test_a_killed_rank_is_the_first_error():
    code, output = outcome(start("--fault", "kill", "--rank", 1))
    assert code == 1
    end = root_cause(output)
    assert "rank      : 1 " in end
    assert "SIGKILL" in end
    assert "Connection" not in end


def test_a_wrong_input_that_all_ranks_find_is_one_line():
    code, output = outcome(start("--fault", "user error", "--rank", -1))
    assert code == 1  # torchrun's; the ranks' own is 2
    assert [line for line in output.splitlines() if line.startswith("error: ")] == [
        "error: row 7 of x.parquet has no prompt"
    ]
    assert "stopped, because" not in output
    assert "exitcode  : 2 " in root_cause(output)
    assert "row 7 of x.parquet" in root_cause(output)


def test_the_watchdog_names_the_phase_and_the_rank_that_is_stuck():
    process = start("--fault", "hang", "--phase", "rewards", "--rank", 1, "--watchdog-s", 3)
    wait_for(process, "step 1")
    began = time.monotonic()
    code, output = outcome(process)
    assert time.monotonic() - began < 20
    assert code == 1
    named = "[rank 1] stuck: phase 'rewards' has run for more than 3 s"  # although rank 0 waits in "update" as long
    assert named in root_cause(output)
    assert output.count("stuck: phase") == output.count(named) == 2  # said once, and repeated in the report
    assert "in fail" in output  # the stacks: the line that is stuck


def test_the_watchdog_sees_what_hangs_between_two_phases():
    command = [sys.executable, str(ROOT / WORKER), "--fault", "hang between phases", "--rank", "0", "--watchdog-s", "1"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "[rank 0] stuck: phase 'after sync'" in run.stderr


def test_sigterm_to_the_whole_process_group_is_one_request():
    """Slurm signals every process; torchrun then signals its ranks once more."""
    process = start()
    wait_for(process, "step 2")
    for pid in [*ranks_of(process), process.pid]:
        os.kill(pid, signal.SIGTERM)
    _, output = outcome(process)  # torchrun itself ends with an error of its own
    assert "saved at step" in output
    assert output.count("SIGTERM: saving after this step") == 1


def test_a_second_sigterm_stops_at_once():
    process = start("--fault", "hang", "--phase", "update")
    wait_for(process, "step 1")
    time.sleep(1)  # into the step that hangs: nothing can be saved
    for pid in ranks_of(process):
        os.kill(pid, signal.SIGTERM)
    time.sleep(2.5)
    assert len(ranks_of(process)) == 2
    began = time.monotonic()
    for pid in ranks_of(process):
        os.kill(pid, signal.SIGTERM)
    code, output = outcome(process)
    assert time.monotonic() - began < 10
    assert code == 1
    assert "exitcode  : 143" in output
    assert "saved" not in output


def test_ranks_end_when_torchrun_is_killed():
    """Otherwise they would write into the folder of the run that goes on in their place."""
    process = start()
    wait_for(process, "step 1")
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(is_alive, ranks))


def test_a_sigterm_does_not_spoil_the_rewards_of_the_last_step(tmp_path):
    """torchrun signals a rank's whole session, scoring processes included; the step in hand still needs them."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    with rewards.Scorer(rewards.load_reward_fn(f"{tmp_path}/mine.py:compute_score")) as scorer:
        os.kill(scorer.pool.workers[0].process.pid, signal.SIGTERM)
        time.sleep(0.2)
        scores, metrics = scorer(["x"], ["a"], ["b"], [{}])
    assert scores == [1.0]
    assert metrics["rewards/errors"] == 0


def test_a_run_that_is_still_going_is_not_resumed(tmp_path):
    """Two runs would write into one folder. Whoever is killed leaves no lock behind: only the living count."""
    program = (
        "import sys, time; from common.tracking import Tracker, RL_COLUMNS\n"
        "options = dict(rank=0, total_steps=1, columns=RL_COLUMNS)\n"
        "tracker = Tracker({}, script=sys.argv[1], run_dir=sys.argv[2], **options)\n"
        "time.sleep(1000)"
    )
    folder = tmp_path / "run"
    going = subprocess.Popen(
        [sys.executable, "-c", program, str(ROOT / WORKER), str(folder)],
        env=environment(), stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert "run folder" in going.stdout.readline()
    options = {"script": __file__, "rank": 0, "total_steps": 1, "columns": RL_COLUMNS, "run_dir": folder}
    with pytest.raises(UserError, match="another process is writing into it"):
        Tracker({}, resume=True, **options)
    going.kill()
    going.wait()
    Tracker({}, resume=True, **options).finish()


# -- bad numbers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def updates(tmp_path_factory) -> dict[str, dict]:
    """What became of each update of tests/workers/bad_numbers.py, by the name of its case."""
    out = tmp_path_factory.mktemp("bad") / "results.json"
    succeeded(run_forked("tests/workers/bad_numbers.py", "--out", out, nproc=2))
    return {result["name"]: result for result in json.loads(out.read_text())}


BAD = ["loss NaN", "loss infinite", "gradient NaN", "reward NaN", "reward infinite", "output NaN"]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_is_skipped_on_all_ranks_alike(updates, name):
    ranks = updates[name]["ranks"]
    assert [rank["moved"] for rank in ranks] == [False, False]  # weights and both moments of AdamW
    assert [rank["norm"] for rank in ranks] == [None, None]


def test_good_updates_go_on(updates):
    for name in ("good", "good again", "good in between"):
        ranks = updates[name]["ranks"]
        assert [rank["moved"] for rank in ranks] == [True, True]
        assert ranks[0]["norm"] == ranks[1]["norm"]  # of the gradient over all ranks
        assert updates[name]["said"] == []
    assert all(rank["finite"] for result in updates.values() for rank in result["ranks"])


@pytest.mark.parametrize(
    ("name", "said", "row"),
    [
        ("loss NaN", "a loss or reward is NaN or infinite", None),
        ("gradient NaN", "gradient norm nan", None),
        ("reward NaN", "row 11 (rank 1): reward", {"row": 11, "rank": 1, "bad": "reward", "reward": None}),
        ("reward infinite", "row 1 (rank 0): reward", {"row": 1, "rank": 0, "bad": "reward"}),
        ("output NaN", "row 11 (rank 1): trainer's output", {"row": 11, "bad": "trainer's output", "reward": 0.5}),
    ],
)
def test_what_was_bad_is_said_and_the_rows_are_logged(updates, name, said, row):
    result = updates[name]
    assert said in " ".join(result["said"]) or said in result["ranks"][0]["error"]
    if row is None:
        assert "no row stands out" in result["said"][0]
        assert result["logged"] == []
    else:
        assert len(result["logged"]) == 1
        assert row.items() <= result["logged"][0].items()
        assert result["logged"][0]["response"] == "a response"
        assert result["logged"][0]["response_ids"] == [7, 8]


def test_bad_updates_are_counted_and_the_limit_in_a_row_ends_the_run_on_all_ranks(updates):
    counts = [(r["counts"]["bad_updates"], r["counts"]["bad_updates_in_a_row"]) for r in updates.values()]
    assert counts == [(0, 0), (1, 1), (1, 0), (2, 1), (3, 2), (3, 0), (4, 1), (5, 2), (6, 3)]
    errors = [rank["error"] for rank in updates["output NaN"]["ranks"]]
    assert errors[0] == errors[1]
    assert "3 updates in a row were skipped (--max-bad-updates)" in errors[0]
    assert "row 11 (rank 1)" in errors[0]
    assert not any(rank["error"] for name, r in updates.items() if name != "output NaN" for rank in r["ranks"])


# -- the engine is what the trainer thinks it is; tests/test_engine.py has the syncs themselves ------------------------


@pytest.fixture
def process_group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_engine_that_disagrees_stops_the_run_with_both_numbers(process_group):
    trainer, mask = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    agree = {"tolerance": None, "dtype": "fp32"}
    assert engine.check_agreement(trainer, trainer + 5e-4, mask, **agree) == pytest.approx(5e-4, abs=1e-6)
    assert engine.check_agreement(trainer, trainer + 0.05, mask, tolerance=None, dtype="bf16") < 0.1
    for other in (trainer + 2e-3, trainer * float("nan")):
        with pytest.raises(RuntimeError, match="engine and trainer disagree") as error:
            engine.check_agreement(trainer, other, mask, **agree)
        assert "-1.500000 (trainer)" in str(error.value)
    assert "nan (engine)" in str(error.value)


def test_what_the_root_holds_is_there_until_the_engine_is_done(process_group):
    """The engine packs embedding and head when all weights are there, long after it was handed these."""
    seen = {}

    def reload(name, kwargs):
        sent = dict(kwargs["weights_iterator"])
        seen.update({name: weight.clone() for name, weight in sent.items()})

    llm = SimpleNamespace(
        apply_model=lambda function: [{"weight", "bias"}], collective_rpc=reload, reset_prefix_cache=lambda: True
    )
    layer = torch.nn.Linear(2, 2)
    expected = {name: value.detach().clone() for name, value in layer.named_parameters()}
    model = fully_shard(layer)
    grpo.sync_weights(llm, model, get_device())
    assert all(torch.equal(seen[name], value) for name, value in expected.items())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())  # and then sharded again


def test_a_prefix_cache_that_was_not_dropped_stops_the_run(process_group):
    """The engine keeps it while a request still holds blocks of it, and only says so by what it returns."""
    results = [True, False]
    llm = SimpleNamespace(
        apply_model=lambda function: [{"weight", "bias"}],
        collective_rpc=lambda name, kwargs: list(kwargs["weights_iterator"]),
        reset_prefix_cache=lambda: results.pop(0),
    )
    model = fully_shard(torch.nn.Linear(2, 2))
    grpo.sync_weights(llm, model, get_device())
    with pytest.raises(RuntimeError, match="prefix cache"):
        grpo.sync_weights(llm, model, get_device())
