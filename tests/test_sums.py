"""data_prep/sums.py: right answers, no sum in both splits, the worked examples in neither."""

import importlib.util
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from common.launch import UserError
from common.rewards import compute_score

spec = importlib.util.spec_from_file_location("sums", ROOT / "data_prep" / "sums.py")
sums = importlib.util.module_from_spec(spec)
sys.modules["sums"] = sums  # dataclasses look their module up
spec.loader.exec_module(sums)


def run(out: Path, **settings: object) -> list[list[dict]]:
    sums.main(sums.Args(out=str(out), **settings))
    return [pq.read_table(out / f"{split}.parquet").to_pylist() for split in ("train", "test")]


def numbers(row: dict) -> tuple[int, int]:
    a, b = row["prompt"][-1]["content"].split("+")
    return int(a), int(b)


def test_every_sum_is_in_one_split_in_both_orders(tmp_path):
    train, test = run(tmp_path, largest=9, num_examples=3)
    pairs = [{tuple(sorted(numbers(row))) for row in rows} for rows in (train, test)]
    assert pairs[0].isdisjoint(pairs[1])
    everything = {(a, b) for a in range(1, 10) for b in range(a, 10)}
    assert pairs[0] | pairs[1] == everything - {(5, 7), (6, 8)}  # the third example, 13 + 4, is above 9
    for rows in (train, test):
        orders = {numbers(row) for row in rows}
        assert {(b, a) for a, b in orders} == orders
        assert len(orders) == len(rows)


def test_answers_are_right_and_have_a_rule(tmp_path):
    train, test = run(tmp_path)
    for row in train + test:
        a, b = numbers(row)
        truth = row["reward_model"]["ground_truth"]
        assert truth == str(a + b)
        answer = sums.ANSWER.format(a=a, b=b, total=a + b)
        assert compute_score(row["data_source"], answer, truth) == 1.0
        assert compute_score(row["data_source"], sums.ANSWER.format(a=a, b=b, total=a + b + 1), truth) == 0.0
        assert compute_score(row["data_source"], f"{a}+{b}={a + b}", truth) == 0.0  # without the ####


def test_the_worked_examples_are_earlier_turns(tmp_path):
    train, _ = run(tmp_path, num_examples=2)
    contents = [message["content"] for message in train[0]["prompt"]]
    assert contents[:-1] == ["", "13+4", "13+4=17 #### 17", "5+7", "5+7=12 #### 12"]
    assert [message["role"] for message in train[0]["prompt"]] == ["system"] + ["user", "assistant"] * 2 + ["user"]


def test_the_seed_decides_the_split(tmp_path):
    first, again, other = (run(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2)))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"largest": 1}, "--largest 1"), ({"num_examples": 4}, "0 to 3"), ({"test_share": 1.0}, "--test-share 1.0")],
)
def test_bad_arguments_are_refused(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, **settings)
