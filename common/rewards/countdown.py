"""Countdown: reach a target with given numbers and + - * /, each number used exactly once.

The expression stands in the last <answer>...</answer>. It is parsed, never evaluated by Python, and computed in exact
fractions: 8 / (3 - 8 / 3) is 24, not 23.999. Scores 1.0 or 0.0.
"""

import re
from collections import Counter
from fractions import Fraction
from typing import Any

from common.rewards.numbers import readings_of
from common.rewards.text import last_tagged_answer

MAX_EXPRESSION = 500
"""Characters; six numbers need about thirty."""
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([-+*/()]))")
Number = int | Fraction
"""Whole numbers stay ints, which are faster."""
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> float:
    """1.0 for an expression that uses the numbers and gives the target.

    ground_truth: {"target": int, "numbers": list[int]}; with "use_all": False a number may be left out.

    Raises:
        ValueError: the ground truth has not that form.
    """
    target, numbers, use_all = _read_ground_truth(ground_truth)
    answer = last_tagged_answer(solution_str)
    if answer is None or len(answer) > MAX_EXPRESSION:
        return 0.0
    return float(any(_solves(side, other, target, numbers, use_all) for side, other in _sides(_plain(answer))))


def _read_ground_truth(ground_truth: Any) -> tuple[Number, list[Number], bool]:
    """(target, the numbers in ascending order, whether all must be used)."""
    if not isinstance(ground_truth, dict) or not {"target", "numbers"} <= set(ground_truth):
        raise ValueError(f"countdown: the ground truth needs 'target' and 'numbers', it is {str(ground_truth)[:80]}")
    target, *numbers = (_exact(value) for value in [ground_truth["target"], *ground_truth["numbers"]])
    return target, sorted(numbers), bool(ground_truth.get("use_all", True))


def _exact(value: Any) -> Number:
    """A number of the ground truth, which may be any type of number, or text."""
    if type(value) is int:
        return value
    readings = readings_of(value)
    if not readings:
        raise ValueError(f"countdown: {str(value)[:80]!r} in the ground truth is not a number")
    return readings[0]


_SPELLINGS = {
    "\u00d7": "*",
    "\u22c5": "*",
    "\u00b7": "*",
    "\u00f7": "/",
    "\u2212": "-",
    "\u2013": "-",
    "[": "(",
    "]": ")",
}
_LATEX = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""), (r"\(", ""), (r"\)", ""))
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def _plain(answer: str) -> str:
    """The expression with LaTeX and Unicode operators in ASCII and without markup around it."""
    for written, plain in (*_SPELLINGS.items(), *_LATEX):
        answer = answer.replace(written, plain)
    for _ in range(5):
        answer = _FRACTION.sub(r"((\1)/(\2))", answer)
    boxed = re.fullmatch(r"\s*\$*\s*\\boxed\s*\{(.*)\}\s*\$*\s*", answer, re.DOTALL)
    return (boxed[1] if boxed else answer).strip().strip("`$").strip()


def _sides(answer: str) -> list[tuple[str, str | None]]:
    """(expression, what it is said to equal): the answer as it stands, or both ways round for `a = b`."""
    if "=" not in answer:
        return [(answer, None)]
    left, _, right = answer.partition("=")
    return [] if "=" in right else [(left, right), (right, left)]


def _solves(expression: str, said: str | None, target: Number, numbers: list[Number], use_all: bool) -> bool:
    parsed = evaluate(expression)
    if parsed is None:
        return False
    value, used = parsed
    if said is not None:
        result = evaluate(said)
        if result is None or result[0] != target:
            return False
    allowed = sorted(used) == numbers if use_all else not Counter(used) - Counter(numbers)
    return allowed and value == target


def evaluate(expression: str) -> tuple[Number, list[Number]] | None:
    """(value, the numbers in it) of an arithmetic expression; None when it is not one or divides by zero.

    Operator precedence with two stacks, so nesting costs no recursion.
    """
    values: list[Number] = []
    operators: list[str] = []
    used: list[Number] = []
    expect_value = True
    position = 0
    expression = expression.rstrip()
    try:
        while position < len(expression):
            token = _TOKEN.match(expression, position)
            if token is None:
                return None
            position = token.end()
            number, operator = token.groups()
            if number is not None:
                if not expect_value:
                    return None
                values.append(int(number) if number.isdecimal() else Fraction(number))
                used.append(values[-1])
                expect_value = False
            elif operator == "(":
                if not expect_value:
                    return None
                operators.append("(")
            elif operator == ")":
                if expect_value:
                    return None
                while operators[-1] != "(":
                    _apply(operators.pop(), values)
                operators.pop()
            elif expect_value:
                if operator not in "+-":
                    return None
                if operator == "-":
                    operators.append("negate")
            else:
                while operators and operators[-1] != "(" and _PRECEDENCE[operators[-1]] >= _PRECEDENCE[operator]:
                    _apply(operators.pop(), values)
                operators.append(operator)
                expect_value = True
        if expect_value:
            return None
        while operators:
            _apply(operators.pop(), values)
    except (IndexError, KeyError, ZeroDivisionError):  # unbalanced parentheses; x / 0
        return None
    return values[0], used


def _apply(operator: str, values: list[Number]) -> None:
    """Replace the operands at the end of `values` by the result."""
    right = values.pop()
    if operator == "negate":
        values.append(-right)
    elif operator == "+":
        values.append(values.pop() + right)
    elif operator == "-":
        values.append(values.pop() - right)
    elif operator == "*":
        values.append(values.pop() * right)
    elif operator == "/":
        values.append(Fraction(values.pop()) / right)
    else:
        raise KeyError(operator)
