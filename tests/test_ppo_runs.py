"""Short whole runs of ppo.py with the real engine: 1 and 2 ranks, resuming, exports, a reward model."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, metrics_of, run_forked, run_script, samples_of, succeeded

from docs.generate import documented_metrics

SMALL = (
    *("--prompts-per-step", 8, "--group-size", 2, "--num-minibatches", 2, "--epochs", 2, "--eval-every", 0),
    *("--kl-coef", "0.05", "--kl-target", "0.01", "--kl-horizon", "100", "--dual-clip", "3", "--lr", "1e-3"),
    *("--save-every", 1, "--keep-checkpoints", 9, "--micro-batch-tokens", "600", "--max-prompt-length", "100"),
    *("--dtype", "fp32"),
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("ppo") / "two"
    run = succeeded(run_script("algos/ppo.py", *SMALL, "--steps", 2, "--run-dir", run_dir, nproc=2))
    assert run.stderr.strip() == ""
    return run_dir


def test_metrics_are_there_and_make_sense(two_ranks):
    first, second = metrics_of(two_ranks)
    assert first["values"] == 0.0  # the critic's head starts from 0
    assert second["values"] != 0.0
    assert first["kl_ref"] == pytest.approx(0.0, abs=1e-4)  # the reference is the starting model
    assert first["kl_coef"] == 0.05
    assert second["kl_coef"] == pytest.approx(
        0.05 * (1 - 0.2 * 16 / 100), rel=1e-6
    )  # 16 responses far below the target
    assert first["clip_fraction"] < 1
    assert first["returns"] == pytest.approx(first["reward"], abs=0.2)
    for row in (first, second):
        assert row["explained_variance"] <= 1
        assert row["mismatch_abs"] < 1e-4
        assert row["value_loss"] > 0
        assert row["critic_grad_norm"] > 0
        assert row["bad_updates"] == 0


def test_the_metrics_are_those_of_the_documentation(two_ranks):
    rows = [json.loads(line) for line in (two_ranks / "metrics.jsonl").read_text().splitlines()]
    logged = {key for row in rows for key in row} - {"step"}
    documented = documented_metrics("ppo")
    patterns = [re.sub(r"<\w+>", r"\\w+", entry["key"]) for entry in documented]
    assert {key for key in logged if not any(re.fullmatch(pattern, key) for pattern in patterns)} == set()
    assert {entry["key"] for entry in documented if "when" not in entry} - logged == set()


def test_resumed_after_step_1_it_is_the_same_run_bit_for_bit(two_ranks, tmp_path):
    """Weights, both optimizers and the KL coefficient come back."""
    copy = tmp_path / "copy"
    shutil.copytree(two_ranks, copy)
    for folder in ("checkpoints/step_2", "hf", "critic"):
        shutil.rmtree(copy / folder)
    run = succeeded(run_forked("algos/ppo.py", *SMALL, "--steps", 2, "--resume", "--run-dir", copy, nproc=2))
    assert "resumed after step 1" in run.stdout
    assert metrics_of(copy) == metrics_of(two_ranks)
    assert samples_of(copy) == samples_of(two_ranks)
    for name in ("hf", "critic"):
        assert (copy / name / "model.safetensors").read_bytes() == (two_ranks / name / "model.safetensors").read_bytes()


def test_one_rank_does_the_same_first_step(two_ranks, tmp_path):
    succeeded(run_forked("algos/ppo.py", *SMALL, "--steps", 1, "--no-export", "--run-dir", tmp_path / "one"))
    one, two = metrics_of(tmp_path / "one")[0], metrics_of(two_ranks)[0]
    assert set(one) == set(two)
    for name in one:
        assert one[name] == pytest.approx(two[name], rel=2e-3, abs=2e-5), name


def test_the_exports_load_and_the_policy_generates(two_ranks):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(two_ranks / "hf")
    tokenizer = AutoTokenizer.from_pretrained(two_ranks / "hf")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "123+456=?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert "####" in tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :])
    critic = AutoModelForSequenceClassification.from_pretrained(two_ranks / "critic")
    assert critic.score.weight.shape == (1, critic.config.hidden_size)
    assert critic.score.weight.abs().max() > 0


def test_a_reward_model_scores_truncated_responses_and_warms_the_critic_up(tmp_path):
    """One step in which only the critic learns, then one of both; 6 tokens are too few for any answer."""
    from safetensors import safe_open
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(2)
    reward_model = AutoModelForSequenceClassification.from_pretrained(TINY / "model", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    reward_model.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    run_dir = tmp_path / "run"
    arguments = ("--train-files", TINY / "prompts_model.parquet", "--reward-model", tmp_path / "rm")
    arguments += ("--critic-model", tmp_path / "rm", "--max-response-length", 6, "--critic-warmup", 1, "--steps", 2)
    arguments += ("--dtype", "fp32")
    arguments += ("--prompts-per-step", 8, "--eval-every", 0, "--save-every", 1, "--no-export", "--run-dir", run_dir)
    succeeded(run_forked("algos/ppo.py", *arguments))

    first, second = metrics_of(run_dir)
    assert first["truncated"] == second["truncated"] == 1.0
    assert "grad_norm" not in first
    assert second["grad_norm"] > 0
    assert first["values"] != 0  # the reward model's head
    with torch.no_grad():
        for row in samples_of(run_dir):
            ids = tokenizer.encode(row["prompt"] + row["response"], add_special_tokens=False, return_tensors="pt")
            assert row["reward"] == pytest.approx(float(reward_model(ids).logits), abs=1e-4)

    def weight(step: int, name: str) -> torch.Tensor:
        import torch.distributed.checkpoint as dcp

        state = {name: torch.zeros(reward_model.model.norm.weight.shape)}
        dcp.load(state, checkpoint_id=run_dir / "checkpoints" / f"step_{step}" / "state", no_dist=True)
        return state[name]

    with safe_open(TINY / "model" / "model.safetensors", "pt") as file:
        start = file.get_tensor("model.norm.weight")
    assert weight(1, "policy.weights.model.norm.weight").equal(start)
    assert not weight(1, "critic.weights.model.norm.weight").equal(start)
    assert not weight(2, "policy.weights.model.norm.weight").equal(start)
