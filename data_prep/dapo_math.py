r"""DAPO-Math-17k to train on, AIME 2024 to test on (Yu et al. 2025, Apache-2.0).

    python data_prep/dapo_math.py                                       # from the hub: BytedTsinghua-SIA
    python data_prep/dapo_math.py --source dapo-math-17k.parquet --test-source aime-2024.parquet

The published files already have the five fields, but repeat every problem (about 100 times, AIME 32 times) so that a
trainer without its own sampling passes over them often. Here each problem stays once: epochs and samples repeat it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.launch import UserError, launch
from common.prep import Report, Row, hub_file, make_row, read_records, write_dataset

TRAIN_REPO, TRAIN_FILE = "BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet"
TEST_REPO, TEST_FILE = "BytedTsinghua-SIA/AIME-2024", "data/aime-2024.parquet"


@dataclass
class Args:
    source: str | None = None
    """The training file (.parquet or .jsonl); default: the hub."""
    test_source: str | None = None
    """The test file (.parquet or .jsonl); default: the hub."""
    out: str = "data/dapo_math"
    """Where train.parquet and test.parquet go."""


def problem_of(record: dict[str, Any]) -> tuple[str, str] | None:
    """(problem, answer) of a published record; None when either is empty.

    Raises:
        KeyError, TypeError, IndexError: it has another form.
    """
    problem = record["prompt"] if isinstance(record["prompt"], str) else record["prompt"][-1]["content"]
    answer = str(record["reward_model"]["ground_truth"])
    return (problem.strip(), answer.strip()) if problem.strip() and answer.strip() else None


def rows(path: Path, split: str, report: Report) -> Iterator[Row]:
    """Each problem once, and none that is given two answers.

    Raises:
        UserError: a record has not the fields of the published files.
    """
    answers: dict[str, set[str]] = {}
    first_index: dict[str, int] = {}
    for index, record in enumerate(read_records(path)):
        report.read[split] += 1
        try:
            problem = problem_of(record)
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(
                f"{path}: record {index} needs 'prompt' and 'reward_model' with 'ground_truth', has {sorted(record)}"
            ) from error
        if problem is None:
            report.drop("an empty problem or answer")
            continue
        text, answer = problem
        if text in answers:
            report.drop("a repetition of a problem")
        answers.setdefault(text, set()).add(answer)
        first_index.setdefault(text, index)
    for text, given in answers.items():
        if len(given) > 1:
            report.drop("a problem with different answers")
            continue
        [answer] = given
        yield make_row("math_dapo", text, ability="math", ground_truth=answer, split=split, index=first_index[text])


def local_or_hub(source: str | None, option: str, repo: str, filename: str) -> Path:
    if source is None:
        return hub_file(repo, filename)
    if not Path(source).is_file():
        raise UserError(f"{option} {source}: no such file")
    return Path(source)


def main(args: Args) -> None:
    report = Report()
    train = local_or_hub(args.source, "--source", TRAIN_REPO, TRAIN_FILE)
    test = local_or_hub(args.test_source, "--test-source", TEST_REPO, TEST_FILE)
    write_dataset(args.out, rows(train, "train", report), rows(test, "test", report), report)


if __name__ == "__main__":
    launch(main, Args)
