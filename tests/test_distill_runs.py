"""Short whole runs of distill.py with the real engine: 1 and 2 ranks, a padded teacher, resuming, the export."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, metrics_of, run_forked, run_script, samples_of, succeeded

from docs.generate import documented_metrics

SMALL = (
    *("--prompts-per-step", 8, "--steps", 2, "--max-response-length", 24, "--lr", "1e-3", "--warmup-steps", 1),
    *("--eval-every", 0, "--save-every", 1, "--keep-checkpoints", 9, "--max-prompt-length", 40),
    *("--dtype", "fp32"),
)


@pytest.fixture(scope="module")
def padded_teacher(tmp_path_factory) -> Path:
    """The embedded teacher with 192 embeddings in the place of 128: what is beyond the tokenizer must not matter."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("teachers") / "padded"
    model = AutoModelForCausalLM.from_pretrained(TINY / "teacher")
    model.resize_token_embeddings(192, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[128:] = 3.0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "teacher").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """2 ranks, several micro-batches each."""
    run_dir = tmp_path_factory.mktemp("distill") / "two"
    run = succeeded(run_script("algos/distill.py", *SMALL, "--micro-batch-tokens", 80, "--run-dir", run_dir, nproc=2))
    assert run.stderr.strip() == ""
    assert "engine and trainer agree" in run.stdout
    return run_dir


def test_metrics_are_there_and_make_sense(two_ranks):
    for row in metrics_of(two_ranks):
        assert row["divergence"] > 0
        assert row["loss"] == pytest.approx(row["divergence"], rel=1e-5)
        assert 0 < row["agreement"] < 1
        assert 0 < row["entropy"] < 5
        assert 0 <= row["accuracy"] <= 1
        assert row["grad_norm"] > 0
        assert row["mismatch_abs"] < 1e-4
        assert row["bad_updates"] == 0
    assert len(samples_of(two_ranks)) == 2 * 4  # of rank 0


def test_the_metrics_are_those_of_the_documentation(two_ranks):
    rows = [json.loads(line) for line in (two_ranks / "metrics.jsonl").read_text().splitlines()]
    logged = {key for row in rows for key in row} - {"step"}
    documented = documented_metrics("distill")
    patterns = [re.sub(r"<\w+>", r"\\w+", entry["key"]) for entry in documented]
    assert {key for key in logged if not any(re.fullmatch(pattern, key) for pattern in patterns)} == set()
    assert {entry["key"] for entry in documented if "when" not in entry} - logged == set()


def test_one_rank_one_micro_batch_and_a_padded_teacher_are_the_same_first_step(two_ranks, padded_teacher, tmp_path):
    arguments = (*SMALL, "--steps", 1, "--no-export", "--run-dir", tmp_path / "one", "--teacher", padded_teacher)
    succeeded(run_forked("algos/distill.py", *arguments))
    one, two = metrics_of(tmp_path / "one")[0], metrics_of(two_ranks)[0]
    assert set(one) == set(two)
    for name in one:
        assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-5), name


def test_resumed_after_step_1_it_is_the_same_run_bit_for_bit(two_ranks, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(two_ranks, copy)
    shutil.rmtree(copy / "checkpoints" / "step_2")
    shutil.rmtree(copy / "hf")
    arguments = (*SMALL, "--micro-batch-tokens", 80, "--resume", "--run-dir", copy)
    run = succeeded(run_forked("algos/distill.py", *arguments, nproc=2))
    assert "resumed after step 1" in run.stdout
    assert metrics_of(copy) == metrics_of(two_ranks)
    assert samples_of(copy) == samples_of(two_ranks)
    weights = "hf/model.safetensors"
    assert (copy / weights).read_bytes() == (two_ranks / weights).read_bytes()


def test_it_does_not_go_on_with_another_teacher(two_ranks, padded_teacher, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(two_ranks, copy)
    run = run_forked("algos/distill.py", *SMALL, "--resume", "--run-dir", copy, "--teacher", padded_teacher)
    assert run.returncode != 0
    assert "is not the teacher that this run began with" in run.stderr


def test_the_export_loads_and_generates(two_ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(two_ranks / "hf")
    tokenizer = AutoTokenizer.from_pretrained(two_ranks / "hf")
    assert model.config.hidden_size == 48  # the student, not its teacher
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "123+456=?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert "####" in tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :])
