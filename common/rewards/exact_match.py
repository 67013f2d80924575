"""Short text answers: equal after case, punctuation, articles and spaces are set aside (the rule of SQuAD)."""

import re
import string
from typing import Any

from common.rewards.text import after_thinking, last_tagged_answer

MAX_ANSWER = 2000
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


def plain(text: str) -> str:
    """`text` in lower case, without punctuation, articles and surplus spaces."""
    text = text.casefold()
    without = _ARTICLES.sub(" ", text.translate(_PUNCTUATION))
    # An answer of nothing but signs or articles ("+", "A") is compared as it stands.
    return " ".join(without.split()) or " ".join(text.split())


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None) -> float:
    """1.0 when the last <answer>, or the whole response without one, equals the truth or one of several truths.

    ground_truth: the answer, a list of accepted answers, or {"target": either of them}.

    Raises:
        ValueError: there is no answer to compare with.
    """
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target")
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    accepted = {plain(str(truth)) for truth in truths if truth is not None and str(truth).strip()}
    if not accepted:
        raise ValueError("exact_match: the ground truth is empty")
    answer = last_tagged_answer(solution_str)
    if answer is None:
        answer = after_thinking(solution_str)
    return float(len(answer) <= MAX_ANSWER and plain(answer) in accepted)
