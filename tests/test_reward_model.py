"""The reward model: the Bradley-Terry loss, where the score is read, whole runs, and the folder that it leaves."""

import importlib
import json
import math
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, TINY, metrics_of, run_forked, run_script, succeeded

from algos import reward_model
from algos.reward_model import Sample, choose_pad_token, collate, compute_loss
from common.device import get_device
from common.launch import UserError
from docs.generate import documented_metrics

DEVICE = get_device()

# -- the loss ---------------------------------------------------------------------------------------------------------


def loss_of(chosen, rejected, mask=None, num_pairs=None):
    chosen, rejected = (torch.as_tensor(x).double().detach().clone().requires_grad_() for x in (chosen, rejected))
    mask = torch.ones(len(chosen), dtype=torch.float64) if mask is None else torch.as_tensor(mask).double()
    loss, metrics = compute_loss(
        chosen_scores=chosen, rejected_scores=rejected, pair_mask=mask, num_pairs=num_pairs or len(chosen)
    )
    loss.backward()
    return loss.item(), metrics, chosen.grad, rejected.grad


def test_loss_by_hand():
    """Margins 0 and ln 3: sigmoid 1/2 and 3/4."""
    loss, metrics, chosen_grad, rejected_grad = loss_of([1.0, math.log(3.0)], [1.0, 0.0])
    assert loss == pytest.approx((math.log(2) + math.log(4 / 3)) / 2)
    assert chosen_grad.tolist() == pytest.approx([-0.25, -0.125])
    assert rejected_grad.tolist() == pytest.approx([0.25, 0.125])
    assert metrics["accuracy"] == 1.5  # a tie counts a half
    assert metrics["margin"] == pytest.approx(math.log(3.0))
    assert metrics["loss"] == pytest.approx(2 * loss)


def test_loss_equals_a_slow_reference_and_only_differences_count():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (3 * torch.randn(20, dtype=torch.float64, generator=generator) for _ in range(2))
    loss, metrics, chosen_grad, rejected_grad = loss_of(chosen, rejected)
    expected = sum(math.log1p(math.exp(r - c)) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)) / 20
    assert loss == pytest.approx(expected, abs=1e-12)
    right = sum(c > r for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True))
    assert metrics["accuracy"] == right
    for i in range(20):
        p_wrong = 1 / (1 + math.exp(chosen[i] - rejected[i]))
        assert chosen_grad[i] == pytest.approx(-p_wrong / 20)
        assert rejected_grad[i] == pytest.approx(p_wrong / 20)
    assert loss_of(chosen + 100, rejected + 100)[0] == pytest.approx(loss)


def test_scores_far_apart_overflow_nowhere():
    loss, _, chosen_grad, _ = loss_of([1e4, -1e4], [-1e4, 1e4])
    assert loss == pytest.approx(1e4)
    assert chosen_grad.tolist() == pytest.approx([0.0, -0.5])


def test_masked_pairs_and_single_and_no_pairs():
    alone, _, grad, _ = loss_of([2.0], [0.0])
    masked, metrics, masked_grad, _ = loss_of([2.0, 7.0], [0.0, 9.0], mask=[1, 0], num_pairs=1)
    assert masked == pytest.approx(alone)
    assert masked_grad.tolist() == pytest.approx([grad.item(), 0.0])
    assert metrics["accuracy"] == 1
    nothing, metrics, grad, _ = loss_of([0.0], [0.0], mask=[0])
    assert nothing == 0
    assert grad.tolist() == [0]
    assert all(value == 0 for value in metrics.values())


# -- where the score is read ------------------------------------------------------------------------------------------


def test_rows_end_at_their_last_real_token_even_if_it_is_the_pad_id():
    batch = collate([Sample([1, 2], [5, 0], [7, 8, 9, 0]), Sample([0], [0], [0, 0])], DEVICE)
    assert batch.input_ids.tolist() == [
        [1, 2, 5, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 2, 7, 8, 9, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert batch.columns.tolist() == [3, 1, 5, 2]
    assert batch.pair_mask.tolist() == [1, 1]
    assert collate([], DEVICE).pair_mask.tolist() == [0]


class Tokens:
    """As much of a tokenizer as `choose_pad_token` looks at."""

    def __init__(self, pad: int | None, unk: int | None, special: list[int]) -> None:
        self.pad_token_id, self.unk_token_id, self.all_special_ids = pad, unk, special

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"<{token}>" for token in ids]


def test_rows_are_never_filled_with_the_token_that_ends_responses():
    assert choose_pad_token(Tokens(3, 4, [3, 4]), {2}) == 3
    assert choose_pad_token(Tokens(2, 4, [2, 4]), {2}) == 4  # pad == eos
    assert choose_pad_token(Tokens(None, None, [2, 9]), {2}) == 9
    with pytest.raises(UserError, match="<2>"):
        choose_pad_token(Tokens(2, None, [2]), {2})


# -- whole runs -------------------------------------------------------------------------------------------------------

SMALL = (
    *("--steps", 4, "--batch-size", 16, "--eval-every", 2, "--save-every", 1, "--keep-checkpoints", 9),
    *("--export-dtype", "fp32", "--warmup-steps", 2, "--micro-batch-tokens", 640, "--max-length", 100),
    *("--dtype", "fp32"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """The same run on 1 and on 2 ranks."""
    folder = tmp_path_factory.mktemp("reward_model")
    test_pairs = folder / "test.parquet"
    pq.write_table(pq.read_table(TINY / "pairs_test.parquet").slice(0, 33), test_pairs)  # does not divide by 2
    for nproc, start in ((1, run_forked), (2, run_script)):
        arguments = (*SMALL, "--test-files", test_pairs, "--run-dir", folder / str(nproc))
        run = succeeded(start("algos/reward_model.py", *arguments, nproc=nproc))
        (folder / str(nproc) / "stdout").write_text(run.stdout)
        assert run.stderr.strip() == ""
    return {nproc: folder / str(nproc) for nproc in (1, 2)}


def test_the_first_loss_is_ln_2_and_it_falls(runs):
    first, *rows = metrics_of(runs[1])
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["eval/accuracy"] == 0.5
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["eval/loss"] < math.log(2)
    assert rows[-1]["eval/accuracy"] > 0.5
    assert rows[-1]["eval/margin"] == pytest.approx(
        rows[-1]["eval/score_chosen"] - rows[-1]["eval/score_rejected"], abs=1e-6
    )


def test_the_metrics_are_those_of_the_documentation(runs):
    rows = [json.loads(line) for line in (runs[2] / "metrics.jsonl").read_text().splitlines()]
    logged = {key for row in rows for key in row} - {"step"}
    assert logged == {entry["key"] for entry in documented_metrics("reward_model")}


def test_one_and_two_ranks_learn_the_same(runs):
    for one, two in zip(metrics_of(runs[1]), metrics_of(runs[2]), strict=True):
        assert set(one) == set(two)
        for name in one:
            assert one[name] == pytest.approx(two[name], rel=2e-3, abs=2e-4), (one["step"], name)


def test_resumed_after_step_2_it_is_the_same_run_bit_for_bit(runs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(runs[2], copy)
    for step in (3, 4):
        shutil.rmtree(copy / "checkpoints" / f"step_{step}")
    shutil.rmtree(copy / "hf")
    test_pairs = json.loads((copy / "args.json").read_text())["test_files"][0]
    arguments = (*SMALL, "--test-files", test_pairs, "--run-dir", copy, "--resume")
    assert "resumed after step 2" in succeeded(run_forked("algos/reward_model.py", *arguments, nproc=2)).stdout
    assert metrics_of(copy) == metrics_of(runs[2])
    ours, theirs = ((folder / "hf" / "model.safetensors").read_bytes() for folder in (copy, runs[2]))
    assert ours == theirs


def test_the_folder_scores_the_same_alone_and_with_batch_mates(runs):
    """In AutoModelForSequenceClassification, padded right and left, against the values at the last token (case B28)."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(runs[1] / "hf")
    tokenizer = AutoTokenizer.from_pretrained(runs[1] / "hf")
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    assert type(model).__name__ == model.config.architectures[0] == "Qwen3ForSequenceClassification"

    from common.data import load_pairs

    pairs = load_pairs([str(TINY / "pairs_test.parquet")], tokenizer=tokenizer, max_length=100)
    sequences = [pair.prompt_ids + ids for pair in map(pairs.__getitem__, range(6)) for ids in vars(pair).values()]
    sequences = [ids for ids in sequences if len(ids) > 15]
    # The end-of-turn token also stands inside of the prompt, and one sequence ends in the middle of a word.
    sequences.append(sequences[0][:-4])
    expected = []
    with torch.no_grad():
        for ids in sequences:
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
            expected.append(float(hidden @ model.score.weight[0]))
            assert float(model(torch.tensor([ids])).logits) == pytest.approx(expected[-1], abs=1e-5)
        for side in ("right", "left"):
            tokenizer.padding_side = side
            batch = tokenizer.pad({"input_ids": sequences}, return_tensors="pt")
            assert (batch["attention_mask"] == 0).any()
            assert model(**batch).logits[:, 0].tolist() == pytest.approx(expected, abs=1e-4), side
    assert max(expected) - min(expected) > 1e-3


def test_the_script_reads_the_scores_that_the_folder_gives(runs):
    """The last evaluation of both runs against AutoModelForSequenceClassification, one sequence at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from common.data import load_pairs

    test_pairs = json.loads((runs[1] / "args.json").read_text())["test_files"][0]
    for run_dir in runs.values():
        model = AutoModelForSequenceClassification.from_pretrained(run_dir / "hf")
        tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
        pairs = load_pairs([test_pairs], tokenizer=tokenizer, max_length=100)
        totals = {"chosen": 0.0, "rejected": 0.0}
        with torch.no_grad():
            for pair in map(pairs.__getitem__, range(len(pairs))):
                for name in totals:
                    ids = pair.prompt_ids + getattr(pair, f"{name}_ids")
                    totals[name] += float(model(torch.tensor([ids])).logits) / len(pairs)
        last = metrics_of(run_dir)[-1]
        assert {name: last[f"eval/score_{name}"] for name in totals} == pytest.approx(totals, abs=1e-5)


# -- the embedded preferences -----------------------------------------------------------------------------------------


def test_the_embedded_pairs_are_what_their_script_writes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "data_prep")
    monkeypatch.setattr(sys, "argv", ["tiny_pairs.py", "--out", str(tmp_path)])
    importlib.import_module("tiny_pairs").main()
    for name in ("pairs_train", "pairs_test", "prompts_model"):
        assert pq.read_table(tmp_path / f"{name}.parquet").equals(pq.read_table(TINY / f"{name}.parquet")), name


def test_chosen_is_right_with_working_and_rejected_is_wrong_or_a_guess():
    from common.rewards import compute_score

    for split in ("train", "test"):
        prompts = {row["prompt"][0]["content"]: row for row in pq.read_table(TINY / f"{split}.parquet").to_pylist()}
        wrong = 0
        rows = pq.read_table(TINY / f"pairs_{split}.parquet").to_pylist()
        for row in rows:
            truth = prompts[row["prompt"][0]["content"]]["reward_model"]["ground_truth"]
            chosen, rejected = (compute_score("tiny-arith", row[name], truth) for name in ("chosen", "rejected"))
            assert chosen == 1.0
            assert row["chosen"].count("=") == 3
            assert rejected == 0.0 or "=" not in row["rejected"], row
            wrong += rejected == 0.0
        assert 0.8 < wrong / len(rows) < 0.95
    styles = {row["style"] for row in pq.read_table(TINY / "prompts_model.parquet")["reward_model"].to_pylist()}
    assert styles == {"model"}


def test_the_defaults_fit_the_embedded_pairs():
    args = reward_model.Args()
    assert all(Path(name).is_file() for name in (*args.train_files, *args.test_files))
