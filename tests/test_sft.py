"""Supervised fine-tuning: what is trained, and whole runs on 1 and 2 ranks."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import TINY, metrics_of, run_forked, run_script, succeeded

from algos.sft import Sample, collate, compute_loss
from common.device import Device

CPU = Device("CPU", "cpu", 0, "gloo", "", can_sleep=False)


def test_loss_by_hand():
    logprobs = torch.tensor([[-1.0, 0.0], [-2.0, -4.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    loss, metrics = compute_loss(new_logprobs=logprobs, response_mask=mask, num_tokens=3)
    loss.backward()
    assert loss.item() == pytest.approx(7 / 3)
    assert metrics["loss"].item() == pytest.approx(7.0)  # a sum: the caller divides by the global number of tokens
    torch.testing.assert_close(logprobs.grad, -mask / 3)


def test_collate_finds_the_trained_tokens_wherever_they_are():
    """Two turns in the first example; in the second the pad id 0 is a real token and is trained."""
    batch = collate([Sample([5, 6, 7, 8, 9], [0, 1, 0, 1, 1]), Sample([5, 0], [0, 1])], CPU)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 0, 0, 0, 0]]
    trained = batch.input_ids[batch.rows, batch.columns].tolist()
    assert trained == [6, 8, 9, 0]
    assert batch.response_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.response_mask[batch.rows, batch.offsets].tolist() == [1, 1, 1, 1]


def test_an_empty_micro_batch_counts_for_nothing():
    batch = collate([], CPU)
    assert batch.input_ids.shape == (1, 2)
    assert batch.response_mask.sum() == 0


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple:
    """Arguments of the runs here; evaluation takes as many tokens as training."""
    path = tmp_path_factory.mktemp("data") / "test.parquet"
    pq.write_table(pq.read_table(TINY / "sft.parquet").slice(0, 64), path)
    sizes = "--steps", 4, "--batch-size", 8, "--save-every", 2, "--test-files", path, "--eval-every", 4
    return *sizes, "--dtype", "fp32"


@pytest.fixture(scope="module")
def two_ranks(small, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    run = succeeded(run_script("algos/sft.py", *small, "--run-dir", run_dir, nproc=2))
    assert run.stderr.strip() == ""
    return run_dir


def test_one_rank_with_small_micro_batches_learns_the_same(small, two_ranks, tmp_path):
    arguments = ("--micro-batch-tokens", 256, "--max-length", 64, "--run-dir", tmp_path / "r")
    succeeded(run_forked("algos/sft.py", *small, *arguments, nproc=1))
    here, there = metrics_of(tmp_path / "r"), metrics_of(two_ranks)
    assert [row["step"] for row in here] == [row["step"] for row in there] == [0, 1, 2, 3, 4, 4]
    for a, b in zip(here, there, strict=True):
        for key in ("loss", "grad_norm", "eval/loss"):
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-4), (a["step"], key)


def test_resumed_it_is_the_same_run(small, two_ranks, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(two_ranks, copy)
    shutil.rmtree(copy / "checkpoints" / "step_4")
    succeeded(run_forked("algos/sft.py", *small, "--resume", "--run-dir", copy, nproc=2))
    assert metrics_of(copy) == metrics_of(two_ranks)


def test_the_export_loads_and_its_loss_is_the_one_that_was_logged(two_ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from common.data import load_sft

    model = AutoModelForCausalLM.from_pretrained(two_ranks / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(two_ranks / "hf")
    examples = load_sft([str(TINY / "sft.parquet")], tokenizer=tokenizer, max_length=64)
    total, count = 0.0, 0
    for i in range(0, len(examples), 16):  # a sixteenth of the rows says enough
        example = examples[i]
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(example.loss_mask[1:])
        total, count = total - (logprobs * mask).sum().item(), count + int(mask.sum())
    assert total / count == pytest.approx(metrics_of(two_ranks)[-1]["eval/loss"], abs=0.05)
    assert json.loads((two_ranks / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_learning_from_random_weights(tmp_path):
    """A response that is always the same is learnt at once, its end included."""
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "response": "abc"} for i in range(64)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    arguments = ("--train-files", tmp_path / "x.parquet", "--batch-size", 16, "--num-epochs", 6, "--lr", "3e-3")
    succeeded(run_forked("algos/sft.py", *arguments, "--run-dir", tmp_path / "r", nproc=1))
    losses = [row["loss"] for row in metrics_of(tmp_path / "r")]
    assert len(losses) == 24
    assert losses[-1] < 0.2 < losses[0]
