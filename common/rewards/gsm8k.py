"""GSM8K's format: the solution, and at the end `#### 72`. Also used for the embedded sums (tiny-arith).

`strict` wants the `####`; `flexible` falls back to the last number of the response. Both score 1.0 or 0.0.
"""

import re
from typing import Any

from common.rewards.numbers import read_number, readings_of, same_number
from common.rewards.text import after_thinking

MAX_MARKS = 20
"""Of more `####` only the last twenty are looked at."""
_MARK = re.compile(r"#{4,}")
_NO_WORDS = re.compile(r"[\W_]*(?:(?:the|final|answer|is)\b[\W_]*)*", re.IGNORECASE)
_NUMBER_IN_TEXT = re.compile(r"(?<![-\w.,/^])[-+\u2212]?[$\u20ac\u00a3]?(?:\d|\.\d)[\d,.]*(?:/\d+)?%?")
FLEXIBLE_TAIL = 2000
"""`flexible` looks for the last number in this many last characters."""


def stated_answers(response: str) -> list[str]:
    """The texts that follow `####`, last first: the rest of the line, or the next line when the rest is empty."""
    text = after_thinking(response)
    ends = [text.rfind("####")] if "####" in text else []
    ends = [mark.end() for mark in _MARK.finditer(text)] if ends else []
    answers = []
    for end in reversed(ends[-MAX_MARKS:]):
        lines = text[end : end + 1000].split("\n")
        line = lines[0]
        if _NO_WORDS.fullmatch(line):
            line = next((line for line in lines[1:] if line.strip()), "")
        answers.append(line.strip())
    return answers


def strict(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> float:
    """1.0 when the last `####` that states an answer states `ground_truth`; numbers compare by value."""
    expected = _expected(ground_truth)
    for line in stated_answers(solution_str):
        if expected:
            stated = read_number(line)
            if stated:
                return float(same_number(stated, expected))
        elif line:
            return float(_plain(line) == _plain(str(ground_truth)))
    return 0.0


def flexible(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> float:
    """Like `strict`; a response without a usable `####` is scored by its last number."""
    expected = _expected(ground_truth)
    if any(read_number(line) for line in stated_answers(solution_str)) or not expected:
        return strict(data_source, solution_str, ground_truth, extra_info)
    numbers = _NUMBER_IN_TEXT.findall(after_thinking(solution_str)[-FLEXIBLE_TAIL:])
    for number in reversed(numbers):
        stated = read_number(number.rstrip(".,"))
        if stated:
            return float(same_number(stated, expected))
    return 0.0


def _expected(ground_truth: Any) -> tuple:
    """The readings of the ground truth; () when it is a text. The whole solution of a raw GSM8K row is accepted too.

    Raises:
        ValueError: there is no ground truth to compare with.
    """
    if isinstance(ground_truth, str) and "####" in ground_truth:
        ground_truth = ground_truth.rpartition("####")[2]
    if ground_truth is None or not str(ground_truth).strip():
        raise ValueError("gsm8k: the ground truth is empty")
    return readings_of(ground_truth)


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[*_`$.]", "", text).casefold().split())
