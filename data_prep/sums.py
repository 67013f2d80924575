"""Sums of two small numbers, with worked examples in the prompt: a task for small pretrained models on small machines.

    python data_prep/sums.py --largest 12

The examples are earlier turns of the conversation, so that a model of a hundred million parameters sees the form of the
answer, `13+4=17 #### 17`; the prompts are short because every response trains on its whole prompt. All pairs up to
the largest number are used, in an order that depends on the seed; a + b and b + a are in one split.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from common.launch import UserError, launch
from common.prep import Report, Row, make_row, write_dataset

EXAMPLES = ((13, 4), (5, 7), (8, 6))
"""Sums that are worked in the prompt, and in neither split."""
QUESTION = "{a}+{b}"
ANSWER = "{a}+{b}={total} #### {total}"


@dataclass
class Args:
    out: str = "data/sums"
    """Where train.parquet and test.parquet go."""
    largest: int = 12
    """Largest number to add; the smallest is 1."""
    num_examples: int = 1
    """Worked examples in the prompt, 0 to 3."""
    test_share: float = 0.3
    """Share of the problems that goes into the test split."""
    seed: int = 1
    """Seed of the order of the problems."""


def problems(args: Args) -> list[tuple[int, int]]:
    """All unordered pairs except the examples, shuffled."""
    numbers = range(1, args.largest + 1)
    examples = {tuple(sorted(pair)) for pair in EXAMPLES[: args.num_examples]}
    pairs = [(a, b) for a in numbers for b in numbers if a <= b and (a, b) not in examples]
    random.Random(args.seed).shuffle(pairs)
    return pairs


def messages(a: int, b: int, num_examples: int) -> list[dict[str, str]]:
    """The conversation up to the question. The empty system message keeps a template from adding a longer one."""
    turns = [{"role": "system", "content": ""}]
    for x, y in EXAMPLES[:num_examples]:
        turns.append({"role": "user", "content": QUESTION.format(a=x, b=y)})
        turns.append({"role": "assistant", "content": ANSWER.format(a=x, b=y, total=x + y)})
    return [*turns, {"role": "user", "content": QUESTION.format(a=a, b=b)}]


def main(args: Args) -> None:
    if args.largest < 2:
        raise UserError(f"--largest {args.largest}: needed 2 or more")
    if not 0 <= args.num_examples <= len(EXAMPLES):
        raise UserError(f"--num-examples {args.num_examples}: needed 0 to {len(EXAMPLES)}")
    if not 0 < args.test_share < 1:
        raise UserError(f"--test-share {args.test_share}: needed between 0 and 1")
    pairs = problems(args)
    num_test = max(1, round(args.test_share * len(pairs)))
    report = Report()

    def rows(split: str, pairs: list[tuple[int, int]]) -> Iterator[Row]:
        both_orders = [pair for a, b in pairs for pair in dict.fromkeys([(a, b), (b, a)])]
        for index, (a, b) in enumerate(both_orders):
            report.read[split] += 1
            prompt = messages(a, b, args.num_examples)
            truth = str(a + b)
            yield make_row("arithmetic/sums", prompt, ability="math", ground_truth=truth, split=split, index=index)

    write_dataset(args.out, rows("train", pairs[num_test:]), rows("test", pairs[:num_test]), report)


if __name__ == "__main__":
    launch(main, Args)
