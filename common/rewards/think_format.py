"""The R1 format: thinking in <think> tags, then the answer in <answer> tags. Scores the form, not the answer."""

import re
from typing import Any

_TAG = re.compile(r"<(/?)(think|answer)>")
_END_TOKENS = re.compile(r"(?:\s|<\|[^|<>]{1,40}\|>|</s>)*")
_ORDER = [("", "think"), ("/", "think"), ("", "answer"), ("/", "answer")]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> float:
    """1.0 for `<think>...</think> <answer>...</answer>`, each tag once, in order, nothing outside, no empty part.

    The opening <think> may be missing, since many chat templates end the prompt with it.
    """
    tags = list(_TAG.finditer(solution_str))
    names = [(tag[1], tag[2]) for tag in tags]
    if names == _ORDER[1:]:
        thought, before = solution_str[: tags[0].start()], ""
    elif names == _ORDER:
        thought, before = solution_str[tags[0].end() : tags[1].start()], solution_str[: tags[0].start()]
    else:
        return 0.0
    *_, think_end, answer_start, answer_end = tags
    between = solution_str[think_end.end() : answer_start.start()]
    answer = solution_str[answer_start.end() : answer_end.start()]
    after = solution_str[answer_end.end() :]
    nothing_outside = not (before + between).strip() and _END_TOKENS.fullmatch(after)
    return float(bool(nothing_outside) and bool(thought.strip()) and bool(answer.strip()))
