"""Rule rewards: a response and a ground truth in, a score out.

`compute_score` picks the rule by `data_source`, with verl's names for them; `Scorer` scores a batch, keeps count of
what goes wrong and lets nothing hang. One file per family: gsm8k, boxed (mathematics), countdown, arithmetic,
exact_match, think_format. Rules parse text and never evaluate it. docs/rewards.md has the table of what scores what.
"""

import ast
import atexit
import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from common.rewards import arithmetic, boxed, countdown, exact_match, gsm8k, think_format
from common.rewards.pool import Outcome, WorkerFailed, WorkerPool
from common.rewards.results import plain_result, where

logger = logging.getLogger(__name__)

Rule = Callable[[str, str, Any, dict | None], float | dict]
MathTask = Callable[[str, Any], tuple[str | None, str]]

RULES: dict[str, Rule] = {
    "openai/gsm8k": gsm8k.strict,
    "gsm8k": gsm8k.strict,
    "gsm8k-flexible": gsm8k.flexible,
    "tiny-arith": gsm8k.strict,
    "solorl/tiny-arith": gsm8k.strict,
    "exact_match": exact_match.compute_score,
    "format": think_format.compute_score,
}
"""Rules by the exact data_source."""

MATH_TASKS: dict[str, MathTask] = {
    "lighteval/MATH": boxed.math_task,
    "DigitalLearningGmbH/MATH-lighteval": boxed.math_task,
    "HuggingFaceH4/MATH-500": boxed.math_task,
    "EleutherAI/hendrycks_math": boxed.math_task,
    "math": boxed.dapo_task,
    "math_dapo": boxed.dapo_task,
    "math_dapo_reasoning": boxed.dapo_task,
}
"""Mathematics by the exact data_source: what these rules leave undecided goes to Math-Verify."""

RULES_BY_PART: dict[str, Rule] = {
    "countdown": countdown.compute_score,
    "multiply": arithmetic.compute_score,
    "arithmetic": arithmetic.compute_score,
    "searchR1_": exact_match.compute_score,
}
"""Rules by a part of the data_source, as TinyZero names its data ("yolo/arithmetic-3_digit")."""

MATH_TASKS_BY_PART: dict[str, MathTask] = {"aime": boxed.dapo_task, "numina_": boxed.dapo_task}


def _look_up(data_source: str, by_name: dict[str, Any], by_part: dict[str, Any]) -> Any:
    if data_source in by_name:
        return by_name[data_source]
    return next((rule for part, rule in by_part.items() if part in data_source), None)


def _rule(data_source: str) -> Rule | None:
    return _look_up(data_source, RULES, RULES_BY_PART)


def _math_task(data_source: str) -> MathTask | None:
    return _look_up(data_source, MATH_TASKS, MATH_TASKS_BY_PART)


def knows(data_source: str) -> bool:
    """Whether a rule scores rows of this data_source."""
    return _rule(data_source) is not None or _math_task(data_source) is not None


def _user_error(message: str) -> Exception:
    from common.launch import UserError  # here, because it imports torch, which the scoring processes do without

    return UserError(message)


# -- one response -----------------------------------------------------------------------------------------------------

_default_pool = WorkerPool()
_default_pool_lock = threading.Lock()
atexit.register(_default_pool.close)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None, *, timeout_s: float = 5.0
) -> float | dict:
    """The score of one response by the rule of its data_source; callable from any thread.

    Raises:
        UserError: no rule has this data_source.
        ValueError: the ground truth is not of the rule's form.
        TimeoutError: Math-Verify took longer than `timeout_s` seconds.
    """
    task = _math_task(data_source)
    if task is None:
        rule = _rule(data_source)
        if rule is None:
            raise _user_error(
                f"data_source '{data_source}' has no reward rule (docs/rewards.md lists them); "
                "pass your own with --reward-fn file.py:name"
            )
        return rule(data_source, solution_str, ground_truth, extra_info)
    answer, gold = task(solution_str, ground_truth)
    score = boxed.decide(answer, gold)
    if score is not None:
        return score
    with _default_pool_lock:
        [outcome] = _default_pool.run([(answer, gold)], timeout_s=timeout_s)
    if outcome.timed_out:
        raise TimeoutError(f"Math-Verify took longer than {timeout_s} s")
    if outcome.error:
        raise RuntimeError(outcome.error)
    return outcome.value


# -- the user's own function ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardFn:
    """What scores a run: the rules above, or a function in a user's file. Made by `load_reward_fn`."""

    path: str | None = None
    name: str = ""

    @property
    def spec(self) -> str | None:
        return f"{self.path}:{self.name}" if self.path else None

    def knows(self, data_source: str) -> bool:
        """Whether it can score such rows; what a user's function can score is the user's business."""
        return self.path is not None or knows(data_source)


def load_reward_fn(spec: str | None) -> RewardFn:
    """The reward function named by "path.py:name"; None means the built-in rules.

    Looks at the file without running it, so that a mistake is found before any model is loaded.

    Raises:
        UserError: no such file, a syntax error (with its line), or nothing of that name in it.
    """
    if spec is None:
        return RewardFn()
    path, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier():
        raise _user_error(f"--reward-fn {spec}: give it as path.py:name")
    if not Path(path).is_file():
        raise _user_error(f"--reward-fn {spec}: there is no file {path}")
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), filename=path)
    except (SyntaxError, ValueError) as error:
        raise _user_error(f"--reward-fn {spec}: {where(error)}") from error
    if name not in _top_level_names(tree):
        raise _user_error(f"--reward-fn {spec}: {path} defines no '{name}'")
    return RewardFn(path, name)


def _top_level_names(tree: ast.Module) -> set[str]:
    """Names that a module's statements bind, wherever they stand outside functions and classes."""
    names = set()
    statements: list[ast.stmt] = list(tree.body)
    while statements:
        node = statements.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        else:
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            statements += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
            handlers = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.ExceptHandler)]
            statements += [statement for handler in handlers for statement in handler.body]
    return names


# -- a batch ----------------------------------------------------------------------------------------------------------


class RewardError(RuntimeError):
    """A scorer failed and --strict-rewards is on."""


def overlong_penalty(length: int, *, max_response_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft punishment of length (Yu et al. 2025, eq. 13): 0 up to max - buffer, then falling to -factor at max.

    length, max_response_length, buffer: tokens.
    """
    if buffer == 0:
        return 0.0
    over = length - (max_response_length - buffer)
    return -factor * min(1.0, max(0.0, over / buffer))


def penalise_length(samples: Sequence[Any], args: Any) -> dict[str, float]:
    """Add the overlong penalty to each sample's `reward`; its `score`, and so the accuracy, stays what it was.

    Needs --overlong-buffer; without it nothing happens. Returns the metric rewards/overlong, the mean penalty.
    """
    if not args.overlong_buffer:
        return {}
    limit, buffer, factor = args.max_response_length, args.overlong_buffer, args.overlong_penalty
    total = 0.0
    for sample in samples:
        penalty = overlong_penalty(len(sample.response_ids), max_response_length=limit, buffer=buffer, factor=factor)
        sample.reward += penalty
        total += penalty
    return {"rewards/overlong": total / max(len(samples), 1)}


class Scorer:
    """Scores batches of responses; a failure costs one response its score, and is counted and said.

    The cheap rules run in this process. Math-Verify and a user's function run in worker processes, started once; a
    response that takes longer than `timeout_s` there scores 0 and its process is replaced.

    timeout_s: wall seconds per call: of one response, or of one batch for a user's batched function
    strict: raise RewardError at the first failure instead of counting it
    num_workers: scoring processes of this rank
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        *,
        timeout_s: float = 5.0,
        strict: bool = False,
        num_workers: int = 1,
    ) -> None:
        self.reward_fn = reward_fn
        self.timeout_s = timeout_s
        self.strict = strict
        self.pool = WorkerPool(reward_fn.spec, num_workers=num_workers)
        if reward_fn.path is not None:
            try:
                self.pool.start()
            except WorkerFailed as error:
                raise _user_error(f"--reward-fn {reward_fn.spec}: {error}") from error

    def __call__(
        self,
        data_sources: Sequence[str],
        responses: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict],
    ) -> tuple[list[float], dict[str, float]]:
        """Scores, and the metrics of the batch.

        Metrics: rewards/errors and rewards/timeouts (counts); the mean of every number that the scores came with
        (`rewards/acc`, ...).

        Raises:
            RewardError: a failure, with `strict`.
            UserError: a data_source without a rule.
        """
        rows = list(zip(data_sources, responses, ground_truths, extra_infos, strict=True))
        outcomes = self._by_rules(rows) if self.reward_fn.path is None else self._by_function(rows)
        results = [0.0 if outcome.error else outcome.value for outcome in outcomes]
        scores = [result["score"] if isinstance(result, dict) else result for result in results]
        for outcome, score in zip(outcomes, scores, strict=True):
            if not math.isfinite(score):
                outcome.error = f"the score is {score}"
        self._report(outcomes, rows)
        metrics = {
            "rewards/errors": float(sum(bool(outcome.error) and not outcome.timed_out for outcome in outcomes)),
            "rewards/timeouts": float(sum(outcome.timed_out for outcome in outcomes)),
        }
        metrics |= _means_of_extras(results)
        return scores, metrics

    def _by_rules(self, rows: Sequence[tuple]) -> list[Outcome]:
        """Score by the built-in rules; what mathematics leaves undecided goes to the worker processes together."""
        outcomes = []
        undecided: dict[int, tuple[str, str]] = {}
        for number, (data_source, response, ground_truth, extra_info) in enumerate(rows):
            task = _math_task(data_source)
            outcome = Outcome()
            try:
                if task is None:
                    outcome.value = plain_result(compute_score(data_source, response, ground_truth, extra_info))
                else:
                    answer, gold = task(response, ground_truth)
                    outcome.value = boxed.decide(answer, gold)
                    if outcome.value is None:
                        undecided[number] = (answer, gold)
            except Exception as error:
                if not knows(data_source):  # that is not this response's fault: no row of the run can be scored
                    raise
                outcome.error = where(error)
            outcomes.append(outcome)
        # The responses of a group often agree: each pair of answers is compared once.
        pairs = list(dict.fromkeys(undecided.values()))
        verified = dict(zip(pairs, self.pool.run(pairs, timeout_s=self.timeout_s), strict=True))
        for number, pair in undecided.items():
            outcomes[number] = verified[pair]
        return outcomes

    def _by_function(self, rows: Sequence[tuple]) -> list[Outcome]:
        if not self.pool.batched:
            return self.pool.run(rows, timeout_s=self.timeout_s)
        columns = tuple(list(column) for column in zip(*rows, strict=True))
        if not columns:
            return []
        [outcome] = self.pool.run([columns], timeout_s=self.timeout_s)
        if outcome.error:
            return [outcome] * len(rows)
        return [Outcome(value=one.get("value"), error=one.get("error")) for one in outcome.value]

    def _report(self, outcomes: Sequence[Outcome], rows: Sequence[tuple]) -> None:
        """Say the first failure of the batch, or stop at it."""
        failed = [number for number, outcome in enumerate(outcomes) if outcome.error]
        if not failed:
            return
        data_source, response, ground_truth, _ = rows[failed[0]]
        message = (
            f"{len(failed)} of {len(rows)} responses could not be scored; the first: "
            f"{outcomes[failed[0]].error} (data_source {data_source}, ground truth {str(ground_truth)[:80]!r}, "
            f"response ends in {response[-80:]!r})"
        )
        if self.strict:
            raise RewardError(message)
        logger.warning(message)

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _means_of_extras(results: Sequence[float | dict]) -> dict[str, float]:
    """`rewards/<key>`: the mean of every numeric key beside "score", over the rows that have it."""
    values: dict[str, list[float]] = {}
    for result in results:
        if isinstance(result, dict):
            for key, value in result.items():
                if key != "score" and isinstance(value, int | float):
                    values.setdefault(key, []).append(float(value))
    return {f"rewards/{key}": sum(items) / len(items) for key, items in values.items()}
