"""Short whole runs of spin.py with the real engine: 1 and 2 ranks, both pairings, ties, resuming, exports."""

import json
import math
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from conftest import TINY, metrics_of, run_forked, run_script, samples_of, succeeded

from common.data import BatchSampler
from docs.generate import documented_metrics

LN_2 = math.log(2.0)
COMMON = (
    *("--prompts-per-step", 8, "--steps-per-iteration", 2, "--lr", "1e-4", "--lr-decay", "constant"),
    *("--warmup-steps", 1, "--beta", "0.5"),
    *("--max-prompt-length", 100, "--max-response-length", 48, "--micro-batch-tokens", 600, "--export-dtype", "fp32"),
    *("--save-every", 1, "--keep-checkpoints", 9, "--dtype", "fp32"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("spin")


@pytest.fixture(scope="module")
def arguments(folder) -> tuple:
    """Those of most runs here; the test prompts are so few that evaluating in every step costs little."""
    pq.write_table(pq.read_table(TINY / "test.parquet").slice(0, 33), folder / "test.parquet")  # 2 does not divide 33
    return (*COMMON, "--test-files", folder / "test.parquet", "--eval-every", 1)


@pytest.fixture(scope="module")
def two_ranks(folder, arguments) -> Path:
    """Two iterations of two steps each, on 2 ranks, evaluated and saved in every step."""
    run = succeeded(run_script("algos/spin.py", *arguments, "--iterations", 2, "--run-dir", folder / "two", nproc=2))
    assert run.stderr.strip() == ""
    assert "engine and trainer agree" in run.stdout
    return folder / "two"


def steps_of(run_dir: Path) -> list[dict]:
    return [row for row in metrics_of(run_dir) if "grad_norm" in row]


def weights(run_dir: Path, step: int, module: str) -> torch.Tensor:
    """A weight of the policy or the opponent in a checkpoint."""
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open

    name = "model.layers.0.mlp.down_proj.weight"
    with safe_open(TINY / "model" / "model.safetensors", "pt") as file:
        start = file.get_tensor(name)
    if step == 0:
        return start
    state = {f"{module}.weights.{name}": torch.zeros_like(start)}
    dcp.load(state, checkpoint_id=run_dir / "checkpoints" / f"step_{step}" / "state", no_dist=True)
    return state[f"{module}.weights.{name}"]


def test_every_iteration_starts_from_ln_2_and_learns(two_ranks):
    rows = steps_of(two_ranks)
    assert [row["iteration"] for row in rows] == [0, 0, 1, 1]
    for row in rows[::2]:
        assert row["loss"] == pytest.approx(LN_2, abs=1e-6)
        assert row["margin"] == pytest.approx(0.0, abs=1e-5)
        assert row["pair_accuracy"] == pytest.approx(0.5, abs=0.5)
    for row in rows[1::2]:
        assert row["loss"] < LN_2 - 1e-3
        assert row["margin"] == pytest.approx(row["reward_chosen"] - row["reward_rejected"], abs=1e-4)
    assert all(row["grad_norm"] > 0 and row["bad_updates"] == 0 for row in rows)
    assert all("reward" not in row and "accuracy" not in row for row in rows)  # no rule has looked at them


def test_the_opponent_is_the_policy_at_the_start_of_the_iteration(two_ranks):
    """Frozen in between: in the checkpoints, and in what the engine samples from."""
    policy = [weights(two_ranks, step, "policy") for step in range(5)]
    opponent = [weights(two_ranks, step, "opponent") for step in range(5)]
    assert not any(policy[step].equal(policy[step + 1]) for step in range(4))
    assert opponent[1].equal(policy[0]) and opponent[2].equal(policy[0])
    assert opponent[3].equal(policy[2]) and opponent[4].equal(policy[2])
    # Before every rollout the engine had the policy's weights, for an evaluation. By its log-probs it sampled from the
    # opponent's all the same: those of the policy are far away by then.
    assert all(row["mismatch_abs"] < 1e-4 for row in steps_of(two_ranks))


def test_the_metrics_are_those_of_the_documentation(two_ranks, by_reward):
    logged = [
        {key for line in (run / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)} - {"step"}
        for run in (two_ranks, by_reward)
    ]
    documented = documented_metrics("spin")
    patterns = [re.sub(r"<\w+>", r"\\w+", entry["key"]) for entry in documented]
    for keys in logged:
        assert {key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns)} == set()
        assert {entry["key"] for entry in documented if "when" not in entry} - keys == set()
    with_reward = {entry["key"] for entry in documented if entry.get("when") == "with --pairing reward"}
    assert with_reward <= logged[1]
    assert not with_reward & logged[0]


def test_the_samples_show_both_sides(two_ranks):
    rows = samples_of(two_ranks)
    assert [row["step"] for row in rows] == [step for step in (1, 2, 3, 4) for _ in range(4)]  # those of rank 0
    for row in rows:
        a, b = map(int, re.search(r"(\d+)\+(\d+)=\?", row["prompt"]).groups())
        assert row["chosen"].endswith(f" #### {a + b}<|end|>")
        assert row["rejected"]


@pytest.fixture(scope="module")
def resumed(two_ranks, arguments, folder) -> Path:
    """The same run up to step 3, within an iteration, and gone on with from there, to one iteration more."""
    copy = folder / "copy"
    shutil.copytree(two_ranks, copy)
    for name in ("checkpoints/step_4", "hf"):
        shutil.rmtree(copy / name)
    again = (*arguments, "--iterations", 3, "--resume", "--no-export", "--run-dir", copy)
    assert "resumed after step 3" in succeeded(run_forked("algos/spin.py", *again, nproc=2)).stdout
    return copy


def test_a_resumed_run_is_the_same_bit_for_bit(two_ranks, resumed):
    """After step 3 policy and opponent differ, and both from the start."""
    assert [row for row in metrics_of(resumed) if row["step"] <= 4] == metrics_of(two_ranks)
    assert [row for row in samples_of(resumed) if row["step"] <= 4] == samples_of(two_ranks)
    for module in ("policy", "opponent"):
        assert weights(resumed, 4, module).equal(weights(two_ranks, 4, module))


def test_an_iteration_can_be_added(resumed):
    rows = steps_of(resumed)
    assert [row["iteration"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert rows[4]["loss"] == pytest.approx(LN_2, abs=1e-6)
    assert weights(resumed, 6, "opponent").equal(weights(resumed, 4, "policy"))


def test_one_rank_does_the_same(two_ranks, arguments, tmp_path):
    shared = (*arguments, "--iterations", 1, "--no-export", "--run-dir", tmp_path / "one")
    succeeded(run_forked("algos/spin.py", *shared))
    one, two = metrics_of(tmp_path / "one"), metrics_of(two_ranks)
    assert [row["step"] for row in one] == [0, 1, 1, 2, 2]
    for mine, theirs in zip(one, two, strict=False):
        assert set(mine) == set(theirs)
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=5e-3, abs=2e-4), (mine["step"], name)


REWARD = '''
def by_length(data_source, solution_str, ground_truth, extra_info=None):
    """Longer is better, but sums in TIED are all worth the same."""
    return 0.5 if ground_truth in TIED else len(solution_str) / 100
'''


@pytest.fixture(scope="module")
def by_reward(folder, arguments, two_ranks) -> Path:
    """Online DPO on 2 ranks, from the model that `two_ranks` exported.

    All rewards are tied in step 1, and those of rank 0 in step 2.
    """
    rows = pq.read_table(TINY / "train.parquet").slice(0, 16)
    pq.write_table(rows, folder / "train.parquet")
    truths = [row["ground_truth"] for row in rows["reward_model"].to_pylist()]
    sampler = BatchSampler(16, 8, seed=1)
    first, second = sampler.next_batch(), sampler.next_batch()
    tied = {truths[row] for row in first + second[:4]}
    (folder / "reward.py").write_text(f"TIED = {tied}\n{REWARD}")
    assert tied.isdisjoint(truths[row] for row in second[4:])
    settings = ("--pairing", "reward", "--group-size", 4, "--model", two_ranks / "hf", "--iterations", 1)
    settings += ("--train-files", folder / "train.parquet", "--reward-fn", f"{folder / 'reward.py'}:by_length")
    run = succeeded(run_forked("algos/spin.py", *arguments, *settings, "--run-dir", folder / "by_reward", nproc=2))
    assert run.stderr.strip() == ""
    return folder / "by_reward"


def test_an_evaluation_is_of_the_policy_and_not_of_the_opponent(two_ranks, by_reward):
    """The last evaluation of a run is the first one of a run that starts from its export, which no opponent was."""
    last, first = metrics_of(two_ranks)[-1], metrics_of(by_reward)[0]
    assert first["step"] == 0
    for name in ("eval/response_length", "eval/truncated"):  # the rewards are others
        assert first[name] == pytest.approx(last[name], abs=1e-6)
    before = [row["eval/response_length"] for row in metrics_of(two_ranks) if "eval/response_length" in row]
    assert len(set(before)) == 5  # no two evaluations of different weights are equal


def test_a_step_without_pairs_changes_nothing_and_does_not_hang(two_ranks, by_reward):
    first, second = steps_of(by_reward)
    assert first["tied"] == 1.0
    assert first["grad_norm"] == 0.0
    assert first["bad_updates"] == second["bad_updates"] == 0
    assert "loss" not in first and "mismatch_abs" not in first
    from safetensors.torch import load_file

    start = load_file(two_ranks / "hf" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert weights(by_reward, 1, "policy").equal(start)
    assert not weights(by_reward, 2, "policy").equal(start)


def test_a_rank_without_pairs_keeps_in_step(by_reward):
    _, second = steps_of(by_reward)
    assert 0.5 <= second["tied"] < 1.0  # rank 0 has none
    assert second["loss"] == pytest.approx(LN_2, abs=1e-6)
    assert second["grad_norm"] > 0
    assert second["mismatch_abs"] < 1e-4
    assert 0 < second["reward"] < 1


def test_the_export_loads_and_generates(two_ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(two_ranks / "hf")
    tokenizer = AutoTokenizer.from_pretrained(two_ranks / "hf")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "123+456=?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        response = model.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1] :]
    assert len(tokenizer.decode(response)) > 0
    assert weights(two_ranks, 4, "policy").equal(model.model.layers[0].mlp.down_proj.weight)
