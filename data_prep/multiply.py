"""Products of two numbers, generated: a task with an exact answer that needs working to get right.

    python data_prep/multiply.py --digits 3

The same seed gives the same problems. a * b and b * a count as one problem, which is in one split only.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from common.launch import UserError, launch
from common.prep import Report, Row, make_row, write_dataset

TASK = (
    "What is {a} * {b}? Show your working in <think> </think> tags and put the product alone in <answer> </answer> "
    "tags, for example <answer> 56 </answer>."
)


@dataclass
class Args:
    out: str = "data/multiply"
    """Where train.parquet and test.parquet go."""
    digits: int = 3
    """Digits of both factors, 1 to 9."""
    num_train: int = 32_768
    """Training problems."""
    num_test: int = 4096
    """Test problems."""
    seed: int = 1
    """Seed of the generator."""


def factors(args: Args) -> Iterator[tuple[int, int]]:
    """Endless different pairs of factors."""
    generator = random.Random(args.seed)
    low, high = 10 ** (args.digits - 1), 10**args.digits - 1
    seen = set()
    while True:
        a, b = generator.randint(low, high), generator.randint(low, high)
        key = (min(a, b), max(a, b))
        if key not in seen:
            seen.add(key)
            yield a, b


def main(args: Args) -> None:
    if not 1 <= args.digits <= 9:
        raise UserError(f"--digits {args.digits}: needed 1 to 9")
    if args.num_train < 1 or args.num_test < 1:
        raise UserError(f"--num-train {args.num_train} --num-test {args.num_test}: both must be at least 1")
    count = 9 * 10 ** (args.digits - 1)
    available = count * (count + 1) // 2
    # Random pairs are drawn until a new one comes up: near the end of the supply that takes long.
    if args.num_train + args.num_test > 0.9 * available:
        raise UserError(f"{args.digits} digits give {available} problems; asked for more than 90 % of them")
    report = Report()
    source = factors(args)

    def rows(split: str, wanted: int) -> Iterator[Row]:
        for index in range(wanted):
            report.read[split] += 1
            a, b = next(source)
            task = TASK.format(a=a, b=b)
            yield make_row("multiply", task, ability="math", ground_truth=str(a * b), split=split, index=index)

    # The test split first: it stays the same when --num-train changes.
    test = list(rows("test", args.num_test))
    write_dataset(args.out, rows("train", args.num_train), test, report)


if __name__ == "__main__":
    launch(main, Args)
