"""Sums and products with one number as the answer, in the last <answer>...</answer> or after `####`."""

from typing import Any

from common.rewards.gsm8k import stated_answers
from common.rewards.numbers import read_number, readings_of, same_number
from common.rewards.text import last_tagged_answer


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> float:
    """1.0 when the stated number is `ground_truth`, else 0.0.

    Raises:
        ValueError: the ground truth is not a number.
    """
    expected = readings_of(ground_truth)
    if not expected:
        raise ValueError(f"arithmetic: the ground truth {str(ground_truth)[:80]!r} is not a number")
    tagged = last_tagged_answer(solution_str)
    for answer in stated_answers(solution_str) if tagged is None else [tagged]:
        stated = read_number(answer)
        if stated:
            return float(same_number(stated, expected))
    return 0.0
