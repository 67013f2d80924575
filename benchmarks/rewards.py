"""How fast the reward rules are, and how many answers of the case table they read, beside verl's rules if at hand.

    python benchmarks/rewards.py
    pip install --no-deps verl && python benchmarks/rewards.py      # beside verl's rules (their files alone are loaded)

Prints a table with the targets and writes JSON (--out). Every figure is the median of --repeats passes; the two sides
of a comparison alternate. Rules that run in one process are timed in processor seconds (one core), mathematics with its
worker processes in wall seconds. Answers are made up from a seed: half of them right, in the styles that models use.
"""

import contextlib
import importlib.util
import io
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import tyro

from common.rewards import Scorer, boxed, load_reward_fn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from reward_cases import FAMILIES

Answers = list[tuple[str, Any]]
"""(response, ground truth)"""
VerlRule = Callable[[str, Any], float]


@dataclass
class Args:
    out: str = "benchmarks/results/rewards.json"
    """Where the figures go; "" writes none."""
    repeats: int = 5
    """Passes over each set of answers."""
    num_workers: int = 2
    """Worker processes for Math-Verify."""
    seed: int = 1
    """Seed of the answers."""


# -- answers ----------------------------------------------------------------------------------------------------------


def gsm8k_answers(generator: random.Random, count: int) -> Answers:
    styles = ["{}", "{:,}", "${}", "**{}**", "{}.", "{}.00", "{} apples", "\\boxed{{{}}}"]
    answers = []
    for _ in range(count):
        truth = generator.randint(1, 99_999)
        stated = truth if generator.random() < 0.5 else truth + 1
        working = f"First 12 * {stated} = {12 * stated}, so we are left with {stated}. " * 8
        answers.append((f"{working}\n#### {generator.choice(styles).format(stated)}", str(truth)))
    return answers


def countdown_answers(generator: random.Random, count: int) -> Answers:
    answers = []
    for _ in range(count):
        a, b, c, d = (generator.randint(1, 99) for _ in range(4))
        truth = {"target": (a + b) * c - d + (generator.random() < 0.5), "numbers": [c, a, d, b]}
        thought = f"Let me try {a} + {b}. " * 30
        answers.append((f"{thought}</think>\n<answer>({a} + {b}) * {c} - {d}</answer>", truth))
    return answers


def math_answers(generator: random.Random, count: int) -> Answers:
    """What MATH's answers are like: most are numbers, about a third need algebra to compare."""
    answers = []
    for _ in range(count):
        a, b, c = (generator.randint(2, 30) for _ in range(3))
        wrong = generator.random() < 0.5
        stated, truth = generator.choice(
            [
                (f"{a * b}", f"{a * b + wrong}"),
                (f"{a * b:,}", f"{a * b + wrong}"),
                (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a + wrong}}}{{{b}}}"),
                (rf"\frac{{{2 * a}}}{{{2 * b}}}", rf"\frac{{{a + wrong}}}{{{b}}}"),
                (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + wrong}}}"),
                (f"{a}x + {b}", f"{b + wrong} + {a}x"),
                (f"({a}, {b})", f"({a},{b + wrong})"),
                (rf"{a}\pi", rf"{a + wrong} \pi"),
                (r"\text{Evelyn}", "Angela" if wrong else "Evelyn"),
            ]
        )
        working = rf"We have $x = \frac{{{a}}}{{{c}}}$ and so on. " * 20
        answers.append((rf"{working} The answer is $\boxed{{{stated}}}$.", truth))
    return answers


# -- the two sides ----------------------------------------------------------------------------------------------------


def verl_rules() -> dict[str, VerlRule]:
    """verl's rule functions by our family names, from the installed package's files; {} when it is not installed."""
    package = importlib.util.find_spec("verl")
    if package is None:
        return {}
    folder = Path(package.submodule_search_locations[0]) / "utils" / "reward_score"
    rules = {}
    for family, filename in (("gsm8k", "gsm8k"), ("math", "math_reward"), ("math_dapo", "math_dapo")):
        spec = importlib.util.spec_from_file_location(f"verl_{filename}", folder / f"{filename}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        rules[family] = module.compute_score
    return rules


def verl_score(rule: VerlRule, response: str, truth: Any) -> float:
    """The score of verl's rule; an exception is its 0, and what it prints is not ours to show."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = rule(response, truth)
    except Exception:
        return 0.0
    return float(result["acc"] if isinstance(result, dict) else result)


def our_seconds(scorer: Scorer, source: str, answers: Answers, clock: Callable[[], float]) -> float:
    count = len(answers)
    responses, truths = zip(*answers)
    start = clock()
    _, metrics = scorer([source] * count, responses, truths, [{}] * count)
    seconds = clock() - start
    assert metrics["rewards/errors"] == metrics["rewards/timeouts"] == 0, metrics
    return seconds


def verl_seconds(rule: VerlRule, answers: Answers, clock: Callable[[], float]) -> float:
    start = clock()
    for response, truth in answers:
        verl_score(rule, response, truth)
    return clock() - start


# -- measurements -----------------------------------------------------------------------------------------------------


def measure_speed(args: Args, verl: dict[str, VerlRule]) -> list[dict[str, Any]]:
    generator = random.Random(args.seed)
    sets = [
        ("gsm8k", gsm8k_answers(generator, 10_000), 1.0),
        ("countdown", countdown_answers(generator, 10_000), 1.0),
        ("math", math_answers(generator, 1000), 10.0),
    ]
    rows = []
    with Scorer(load_reward_fn(None), num_workers=args.num_workers) as scorer:
        scorer.pool.start()
        for family, answers, target in sets:
            in_workers = family == "math"
            clock = time.perf_counter if in_workers else time.process_time
            ours, theirs = [], []
            for _ in range(args.repeats):
                ours.append(our_seconds(scorer, FAMILIES[family][0], answers, clock))
                if family in verl:
                    theirs.append(verl_seconds(verl[family], answers, clock))
            undecided = 0
            if in_workers:
                undecided = sum(boxed.decide(*boxed.math_task(*answer)) is None for answer in answers)
            rows.append(
                {
                    "family": family,
                    "responses": len(answers),
                    "clock": "wall" if in_workers else "processor",
                    "seconds": statistics.median(ours),
                    "target_seconds": target,
                    "through_math_verify": undecided,
                    "verl_seconds": statistics.median(theirs) if theirs else None,
                }
            )
    return rows


def measure_reading(verl: dict[str, VerlRule]) -> list[dict[str, Any]]:
    """Of the case table's right and wrong answers, how many verl's rules score like the table."""
    rows = []
    for family, rule in verl.items():
        cases = FAMILIES[family][2]
        right = [case for case in cases if case.score == 1]
        wrong = [case for case in cases if case.score == 0]
        rows.append(
            {
                "family": family,
                "right": len(right),
                "verl_right_scored_1": sum(verl_score(rule, c.response, c.ground_truth) == 1 for c in right),
                "wrong": len(wrong),
                "verl_wrong_scored_0": sum(verl_score(rule, c.response, c.ground_truth) != 1 for c in wrong),
            }
        )
    return rows


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main(args: Args) -> None:
    verl = verl_rules()
    speed, reading = measure_speed(args, verl), measure_reading(verl)
    print(f"{'rule':<12}{'responses':>10}{'clock':>11}{'seconds':>9}{'target':>8}  {'':<9}{'verl':>6}   Math-Verify")
    for row in speed:
        reached = "reached" if row["seconds"] < row["target_seconds"] else "MISSED"
        verl_time = f"{row['verl_seconds']:.2f}" if row["verl_seconds"] is not None else "-"
        print(
            f"{row['family']:<12}{row['responses']:>10}{row['clock']:>11}{row['seconds']:>9.2f}"
            f"{row['target_seconds']:>8.1f}  {reached:<9}{verl_time:>6}   {row['through_math_verify'] or '-'}"
        )
    for row in reading:
        print(
            f"{row['family']}: of the {row['right']} right answers in docs/rewards.md verl gives full score to "
            f"{row['verl_right_scored_1']}, of the {row['wrong']} wrong ones none to {row['verl_wrong_scored_0']}"
        )
    if not verl:
        print("verl is not installed: `pip install --no-deps verl` puts its rules beside these")
    if args.out:
        packages = ("math-verify", "sympy", "latex2sympy2_extended", "verl")
        record = {
            "command": f"python benchmarks/rewards.py --repeats {args.repeats} --num-workers {args.num_workers}",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
            "cpus": os.cpu_count(),
            "speed": speed,
            "reading": reading,
        }
        path = Path(args.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main(tyro.cli(Args))
