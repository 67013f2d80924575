"""Rule rewards: a response and a ground truth in, a score out."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.rewards import arithmetic, countdown, gsm8k

RewardFn = Callable[[str, str, Any, dict | None], float | dict]

_BY_NAME: dict[str, RewardFn] = {
    "openai/gsm8k": gsm8k.strict,
    "tiny-arith": gsm8k.strict,
    "solorl/tiny-arith": gsm8k.strict,
}
_BY_PART: dict[str, RewardFn] = {
    "gsm8k": gsm8k.strict,
    "countdown": countdown.compute_score,
    "multiply": arithmetic.compute_score,
    "arithmetic": arithmetic.compute_score,
}


def _user_error(message: str) -> Exception:
    from common.launch import UserError  # here, because it imports torch, which the scoring workers do without

    return UserError(message)


def _find(data_source: str) -> RewardFn | None:
    if data_source in _BY_NAME:
        return _BY_NAME[data_source]
    return next((rule for part, rule in _BY_PART.items() if part in data_source), None)


def knows(data_source: str) -> bool:
    """Whether a rule scores rows of this data_source."""
    return _find(data_source) is not None


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None
) -> float | dict:
    """The score of a response by the rule of its data_source.

    Raises:
        UserError: no rule has this data_source.
    """
    rule = _find(data_source)
    if rule is None:
        raise _user_error(f"data_source '{data_source}' has no reward rule; pass --reward-fn file.py:name")
    return rule(data_source, solution_str, ground_truth, extra_info)


def load_reward_fn(spec: str | None) -> RewardFn:
    """`compute_score`, or the user's function from "path.py:name"."""
    if spec is None:
        return compute_score
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise _user_error(f"--reward-fn {spec}: no such file; give it as path.py:name")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise _user_error(f"--reward-fn {spec}: {path} has no function '{name}'")
    return getattr(module, name)


class Scorer:
    """Scores a batch of responses and counts what went wrong."""

    def __init__(
        self,
        reward_fn: RewardFn,
        *,
        timeout_s: float = 5.0,
        strict: bool = False,
        num_workers: int = 1,
        max_response_length: int | None = None,
        overlong_buffer: int = 0,
        overlong_penalty: float = 1.0,
    ) -> None:
        self.reward_fn = reward_fn
        self.timeout_s = timeout_s
        self.strict = strict
        self.max_response_length = max_response_length
        self.overlong_buffer = overlong_buffer
        self.overlong_penalty = overlong_penalty

    def __call__(
        self,
        data_sources: Sequence[str],
        responses: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict],
        response_lengths: Sequence[int] | None = None,
    ) -> tuple[list[float], dict[str, float]]:
        scores = []
        errors = 0
        extras: dict[str, list[float]] = {}
        for row in zip(data_sources, responses, ground_truths, extra_infos, strict=True):
            try:
                result = self.reward_fn(*row)
                if isinstance(result, dict):
                    for key, value in result.items():
                        if key != "score" and isinstance(value, int | float):
                            extras.setdefault(key, []).append(float(value))
                    result = result["score"]
                score = float(result)
                if not math.isfinite(score):
                    raise ValueError(f"the score is {score}")
            except Exception:
                if self.strict:
                    raise
                errors += 1
                score = 0.0
            scores.append(score)
        metrics = {"rewards/errors": float(errors), "rewards/timeouts": 0.0}
        metrics |= {f"rewards/{key}": sum(values) / len(values) for key, values in extras.items()}
        return scores, metrics

    def close(self) -> None:
        pass
