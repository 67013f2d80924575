r"""Competition mathematics: the answer in the last `\boxed{}` (MATH) or after the last "Answer:" (DAPO's data).

Scoring has two steps. `decide` settles what plain text and exact numbers can settle, which is most answers, at once and
in bounded time. What is left goes through the Math-Verify library (`verify`): it parses LaTeX into SymPy and compares
there, which can take for ever ("9^{9^{9^9}}"), so it only ever runs in a worker process that can be killed.
"""

import math
import re
from typing import Any

from common.rewards.numbers import read_number, same_number
from common.rewards.text import after_thinking, last_tagged_answer

MAX_ANSWER = 1000
"""Characters; a longer answer is not one."""
MAX_DIGITS = 10_000
"""Powers of plain numbers with more digits than this are compared as text only."""
MAX_DEPTH = 30
"""Of brackets: the time of a LaTeX parser doubles with each."""
MAX_MARKS = 20
"""Of more boxes or "Answer:" lines only the last twenty are looked at."""
SEARCHED = 200_000
"""Only this many last characters of a response are searched for an answer."""

# -- extraction -------------------------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BARE_CONTENT = re.compile(r"-?[\w.,/]+|\\[a-zA-Z]+")
_ANSWER_COLON = re.compile(r"\banswer\b[*_\s]*[:\uff1a][*_]*", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 7`; None without one.

    A mere mention ("put it in \boxed and ...") is no box. A last box that never closes is a truncated answer: None.
    """
    boxes = list(_BOX.finditer(text))[-MAX_MARKS:]
    for box in reversed(boxes):
        start = box.end()
        if text.startswith("{", start):
            end = _closing_brace(text, start)
            return None if end is None else text[start + 1 : end].strip()
        bare = _BARE_CONTENT.match(text, start)
        if bare and any(character.isdigit() for character in bare[0]):
            return bare[0].rstrip(".,")
    return None


def _closing_brace(text: str, opening: int) -> int | None:
    r"""The index of the brace that closes the one at `opening`; `\{` and `\}` are not braces of the group."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[opening : opening + 10 * MAX_ANSWER], re.DOTALL):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return opening + brace.start()
    return None


def last_answer_line(text: str) -> str | None:
    """What follows the last "Answer:" on its line (or on the next, if nothing does); None without one."""
    for mark in list(_ANSWER_COLON.finditer(text))[-MAX_MARKS:][::-1]:
        lines = text[mark.end() : mark.end() + 2 * MAX_ANSWER].lstrip().split("\n", 1)
        line = lines[0].strip().strip("*_").strip()
        if line:
            return line
    return None


def extract(solution_str: str, *, allow_answer_line: bool) -> str | None:
    """The answer that a response states, or None."""
    text = after_thinking(solution_str)[-SEARCHED:]
    if allow_answer_line:
        line = last_answer_line(text)
        if line is not None:
            boxed = last_boxed(line)
            return boxed if boxed is not None else line
    tagged = last_tagged_answer(text)
    if tagged is not None and not _BOX.search(tagged):
        boxed = last_boxed(text)
        return tagged if boxed is None else boxed
    return last_boxed(text)


def gold_answer(ground_truth: Any) -> str:
    r"""The answer behind a ground truth: a number, an answer, or a whole solution with a `\boxed{}`.

    Raises:
        ValueError: there is none.
    """
    gold = str(ground_truth).strip() if ground_truth is not None else ""
    if _BOX.search(gold):
        gold = last_boxed(gold) or ""
    if not gold:
        raise ValueError("math: the ground truth is empty")
    return gold


# -- comparison as text and as numbers --------------------------------------------------------------------------------

_DRESS = re.compile(
    r"(?<!\\)\\[!,;: ()\[\]]|\\(?:left|right|displaystyle)\b|\\(?:big|Big|bigg|Bigg)[lr]?\b|\^\{?\\circ\}?|~"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|\w)\s*(\{[^{}]*\}|\w)")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\w)")
_PLAIN_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)")
_TOWER = re.compile(r"\d+(?:\s*\^[\s{(]*\d+)+")
_BRACKET = re.compile(r"[()\[\]{}]")
_TEXT_WITH_NUMBER = re.compile(r"\\text\s*\{\s*([-+]?[\d.,/]*\d)\s*([^{}]*)\}")
_TUPLE = re.compile(r"([(\[])([^()\[\]]+,[^()\[\]]+)([)\]])")
_REPEATING = re.compile(r"(\d+)\.(\d*)\\overline\s*\{(\d+)\}")
_ASSIGNMENT = re.compile(r"[a-zA-Z](?:_\w|_\{\w+\})?\s*=\s*(?=[^=]+$)")
_UNICODE = {
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u00d7": r"\times ",
    "\u00f7": r"\div ", "\u22c5": r"\cdot ", "\u00b7": r"\cdot ", "\u2212": "-", "\u2013": "-", "\u00b1": r"\pm ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2260": r"\ne ", "\u00b0": "", "\u00a0": " ", "\u2009": " ",
    "\u202f": " ",
}  # fmt: skip
_UNICODE_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\w+))")


def to_latex(answer: str) -> str:
    r"""One LaTeX spelling for many: no dress, `\frac{a}{b}`, `\sqrt{a}`, Unicode signs as commands."""
    for sign, command in _UNICODE.items():
        answer = answer.replace(sign, command)
    answer = _UNICODE_ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", answer)
    answer = answer.replace("\\$", "").replace("$", "").replace("{,}", ",")
    answer = re.sub(r"\\[dtc]frac", r"\\frac", _DRESS.sub(" ", answer))
    answer = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{m[1].strip('{}')}}}{{{m[2].strip('{}')}}}", answer)
    answer = _SHORT_ROOT.sub(r"\\sqrt{\1}", _PLAIN_ROOT.sub(r"\\sqrt{\1}", answer))
    answer = _TEXT_WITH_NUMBER.sub(r"\1 \\text{ \2}", _REPEATING.sub(_fraction_of_repeating, answer))
    answer = answer.replace(r"\varnothing", r"\emptyset").removeprefix(r"\approx")
    answer = answer.strip().strip("*_`").rstrip(".,").replace("**", "^")
    return " ".join(answer.split())


def _fraction_of_repeating(match: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as a fraction: the digits with one period, less those without, over 9...90...0."""
    whole, fixed, period = match.groups()
    numerator = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _as_text(latex: str) -> str:
    """What is left when spaces, case, wrappers and an assignment to one variable do not count."""
    latex = _ASSIGNMENT.sub("", _TEXT.sub(r"\1", latex), count=1)
    latex = re.sub(r"\s+", "", latex).casefold()
    choice = re.fullmatch(r"\(?([a-z])\)?", latex)
    return choice[1] if choice else latex


def _as_number(latex: str) -> tuple:
    """The readings of an answer that is nothing but a number, in `to_latex` spelling; () for anything else."""
    return read_number(latex, bare=True)


def _as_tuple(latex: str) -> list | None:
    """[opening bracket, closing bracket, readings of each entry] of a tuple or interval of plain numbers, else None."""
    match = _TUPLE.fullmatch(latex)
    if match is None:
        return None
    entries = [_as_number(entry.strip()) for entry in match[2].split(",")]
    return [match[1], match[3], entries] if all(entries) else None


def _same_tuple(first: list, second: list) -> bool:
    return (
        first[:2] == second[:2]
        and len(first[2]) == len(second[2])
        and all(same_number(a, b) for a, b in zip(first[2], second[2], strict=True))
    )


def _too_big(latex: str) -> bool:
    """Whether a power of plain numbers in it has more than MAX_DIGITS digits."""
    for tower in _TOWER.findall(latex):
        *levels, size = (int(number[:9]) for number in re.findall(r"\d+", tower))
        for base in reversed(levels):
            if base > 1 and size > MAX_DIGITS / math.log10(base):
                return True
            size = base**size
    return False


def _depth(text: str) -> int:
    """How deep its brackets are nested."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def decide(answer: str | None, gold: str) -> float | None:
    """1.0 or 0.0 where text and numbers settle it, None where Math-Verify must."""
    if answer is None or not answer.strip() or len(answer) > MAX_ANSWER:
        return 0.0
    answer, gold = to_latex(answer), to_latex(gold)
    if _as_text(answer) == _as_text(gold):
        return 1.0
    stated, expected = _as_number(answer), _as_number(gold)
    if stated and expected:
        return float(same_number(stated, expected))
    stated, expected = _as_tuple(answer), _as_tuple(gold)
    if stated and expected:
        return float(_same_tuple(stated, expected))
    if _too_big(answer) or _depth(answer) > MAX_DEPTH:
        return 0.0
    if re.fullmatch(r"[^\W\d]{2,}", _as_text(gold)):  # a word: nothing to compute
        return 0.0
    return None


def verify(answer: str, gold: str) -> float:
    """1.0 when Math-Verify finds the two equal. Only for worker processes: it may not return.

    Only its LaTeX grammar is used; its parser for plain expressions would hand the text to `eval`.
    """
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as math_verify

    def read(text: str) -> list:
        # No timeouts: they work by signals, and the process that runs this has a wall limit anyway.
        return parse(
            rf"\boxed{{{to_latex(text)}}}",
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )

    return float(math_verify(read(gold), read(answer), timeout_seconds=None, allow_set_relation_comp=True))


# -- the rules --------------------------------------------------------------------------------------------------------


def math_task(solution_str: str, ground_truth: Any) -> tuple[str | None, str]:
    r"""(answer, gold) for MATH and its like: the answer stands in a box."""
    return extract(solution_str, allow_answer_line=False), gold_answer(ground_truth)


def dapo_task(solution_str: str, ground_truth: Any) -> tuple[str | None, str]:
    r"""(answer, gold) for DAPO-Math, AIME and Numina: after "Answer:", else in a box."""
    return extract(solution_str, allow_answer_line=True), gold_answer(ground_truth)
