r"""MATH (Hendrycks et al. 2021, MIT): competition problems with the answer in a box.

    python data_prep/math_dataset.py                          # from the hub: DigitalLearningGmbH/MATH-lighteval
    python data_prep/math_dataset.py --source path/to/MATH    # the original folders, or train/test .jsonl or .parquet

(The file is not called math.py: run as a script, it would hide Python's own `math` module.)
Beside the five fields each row has a `response`, the human solution, so that algos/sft.py reads the same files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.launch import UserError, launch
from common.prep import Report, Row, find_split, hub_file, make_row, read_records, write_dataset
from common.rewards.boxed import last_boxed

HUB_REPO = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


@dataclass
class Args:
    source: str | None = None
    """A folder: the original train/<subject>/<n>.json, or train and test as .jsonl or .parquet; default: the hub."""
    out: str = "data/math"
    """Where train.parquet and test.parquet go."""


def find_files(source: str | None, split: str) -> list[Path]:
    """The files of a split, from the hub or a folder of any of the three layouts."""
    if source is None:
        return [hub_file(HUB_REPO, f"data/{split}-00000-of-00001.parquet")]
    problems = (Path(source) / split).glob("*/*.json")
    return sorted(problems, key=lambda path: (path.parent.name, len(path.stem), path.stem)) or find_split(source, split)


def rows(paths: list[Path], split: str, report: Report) -> Iterator[Row]:
    """The usable records of the files.

    Raises:
        UserError: a record has not the two fields.
    """
    index = -1
    for path in paths:
        for record in read_records(path):
            index += 1
            report.read[split] += 1
            problem, solution = record.get("problem"), record.get("solution")
            if not isinstance(problem, str) or not isinstance(solution, str):
                raise UserError(f"{path}: record {index} needs 'problem' and 'solution' as text, has {sorted(record)}")
            answer = last_boxed(solution)
            if not answer:
                report.drop(r"no closed, non-empty \boxed{} in the solution")
                continue
            row = make_row(
                "DigitalLearningGmbH/MATH-lighteval",
                f"{problem.strip()} {INSTRUCTION}",
                ability="math",
                ground_truth=answer,
                split=split,
                index=index,
                level=str(record.get("level") or ""),
                subject=str(record.get("type") or ""),
            )
            yield row | {"response": solution.strip()}


def main(args: Args) -> None:
    report = Report()
    train, test = (list(rows(find_files(args.source, split), split, report)) for split in ("train", "test"))
    write_dataset(args.out, train, test, report)


if __name__ == "__main__":
    launch(main, Args)
