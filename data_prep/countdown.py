"""Countdown: reach a target with 3 or 4 given numbers and + - * /. Generated, solvable, the same from the same seed.

    python data_prep/countdown.py                                   # for instruction-tuned models
    python data_prep/countdown.py --template base --out data/countdown-base

The problems are of the kind of Jiayi-Pan/Countdown-Tasks-3to4, which TinyZero trains on (numbers 1 to 99, targets 10 to
100). Each is made by carrying out random operations on random numbers, so it has a solution in whole, non-negative
steps; the solution is kept in `extra_info`. Problems with the same numbers and target occur once, in one split only.

Templates: `instruct` is a system and a user message, and the assistant's turn opened with <think>. `base` is one text
for models without a chat template; if the tokenizer has one all the same, train with
--chat-template-kwargs '{"chat_template": "plain"}'.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from common.launch import UserError, launch
from common.prep import Report, Row, make_row, write_dataset

NUMBERS = range(1, 100)
TARGETS = range(10, 101)
MAX_MISSES = 1000
"""So many already known problems in a row mean that there are no more."""

SYSTEM = "You first think about the problem step by step and then give the answer."
TASK = (
    "Use the numbers {numbers} to make an expression that equals {target}. You may add (+), subtract (-), multiply (*) "
    "and divide (/), with parentheses, and must use each number exactly once. Put your thoughts in <think> </think> "
    "tags and the expression in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
OPENING = "Let me think step by step.\n<think>"


@dataclass
class Args:
    out: str = "data/countdown"
    """Where train.parquet and test.parquet go."""
    template: Literal["instruct", "base"] = "instruct"
    """Chat messages, or one text for base models."""
    num_train: int = 327_680
    """Training problems (TinyZero's number)."""
    num_test: int = 1024
    """Test problems (TinyZero's number)."""
    min_numbers: int = 3
    """Fewest numbers in a problem."""
    max_numbers: int = 4
    """Most numbers in a problem; at most 6."""
    seed: int = 1
    """Seed of the generator."""


def make_problem(generator: random.Random, count: int) -> tuple[list[int], int, str]:
    """(numbers in random order, target, a solution): combines random pairs by random operations until one is left."""
    while True:
        numbers = [generator.choice(NUMBERS) for _ in range(count)]
        terms = [(value, str(value)) for value in numbers]
        while len(terms) > 1:
            (a, left), (b, right) = (terms.pop(generator.randrange(len(terms))) for _ in range(2))
            operation = generator.choice("+-*/")
            if operation == "-" and a < b:
                a, left, b, right = b, right, a, left
            if operation == "/" and (b == 0 or a % b != 0):
                operation = "+"
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
            terms.append((value, f"({left} {operation} {right})"))
        target, solution = terms[0]
        if target in TARGETS:
            return numbers, target, solution[1:-1]


def problems(args: Args) -> Iterator[tuple[list[int], int, str]]:
    """Endless problems, each set of numbers and target once.

    Raises:
        UserError: there are no further ones.
    """
    generator = random.Random(args.seed)
    seen = set()
    misses = 0
    while True:
        problem = make_problem(generator, generator.randint(args.min_numbers, args.max_numbers))
        numbers, target, _ = problem
        key = (tuple(sorted(numbers)), target)
        if key in seen:
            misses += 1
            if misses > MAX_MISSES:
                raise UserError(f"only {len(seen)} different problems found; lower --num-train or allow more numbers")
            continue
        misses = 0
        seen.add(key)
        yield problem


def prompt(numbers: list[int], target: int, template: str) -> str | list[dict[str, str]]:
    task = TASK.format(numbers=numbers, target=target)
    if template == "base":
        return f"The assistant thinks before it answers the user's question.\nUser: {task}\nAssistant: {OPENING}"
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task},
        {"role": "assistant", "content": OPENING},
    ]


def main(args: Args) -> None:
    if not 2 <= args.min_numbers <= args.max_numbers <= 6:
        raise UserError(
            f"--min-numbers {args.min_numbers} --max-numbers {args.max_numbers}: needed 2 <= min <= max <= 6"
        )
    if args.num_train < 1 or args.num_test < 1:
        raise UserError(f"--num-train {args.num_train} --num-test {args.num_test}: both must be at least 1")
    report = Report()
    source = problems(args)

    def rows(split: str, count: int) -> Iterator[Row]:
        for index in range(count):
            report.read[split] += 1
            numbers, target, solution = next(source)
            yield make_row(
                "countdown",
                prompt(numbers, target, args.template),
                ability="math",
                ground_truth={"target": target, "numbers": numbers},
                split=split,
                index=index,
                solution=solution,
            )

    # The test split first: it stays the same when --num-train changes.
    test = list(rows("test", args.num_test))
    write_dataset(args.out, rows("train", args.num_train), test, report)


if __name__ == "__main__":
    launch(main, Args)
