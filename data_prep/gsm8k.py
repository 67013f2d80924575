"""GSM8K (Cobbe et al. 2021, MIT): grade-school problems with whole numbers as answers.

    python data_prep/gsm8k.py                              # from the hub: openai/gsm8k
    python data_prep/gsm8k.py --source path/to/folder      # train.jsonl and test.jsonl with `question` and `answer`

Beside the five fields each row has a `response`, the human solution, so that algos/sft.py reads the same files.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.launch import UserError, launch
from common.prep import Report, Row, find_split, hub_file, make_row, read_records, write_dataset

HUB_REPO = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_CALCULATOR = re.compile(r"<<[^<>]*>>")
"""Annotations for a calculator, `<<48/2=24>>`: not text that a model should write."""
_WHOLE_NUMBER = re.compile(r"-?\d+")


@dataclass
class Args:
    source: str | None = None
    """A folder with train.jsonl and test.jsonl (or .parquet); default: the hub."""
    out: str = "data/gsm8k"
    """Where train.parquet and test.parquet go."""


def final_answer(solution: str) -> str | None:
    """The number after the last `####`, without thousands separators; None when there is none."""
    _, mark, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "").replace("$", "")
    return answer if mark and _WHOLE_NUMBER.fullmatch(answer) else None


def rows(path: Path, split: str, report: Report) -> Iterator[Row]:
    """The usable records of one file.

    Raises:
        UserError: a record has not the two fields.
    """
    for index, record in enumerate(read_records(path)):
        report.read[split] += 1
        question, solution = record.get("question"), record.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str):
            raise UserError(f"{path}, record {index}: needs 'question' and 'answer' as text, it has {sorted(record)}")
        answer = final_answer(solution)
        if answer is None:
            report.drop("no whole number after ####")
            continue
        if not question.strip():
            report.drop("an empty question")
            continue
        row = make_row(
            "openai/gsm8k",
            f"{question.strip()} {INSTRUCTION}",
            ability="math",
            ground_truth=answer,
            split=split,
            index=index,
        )
        yield row | {"response": _CALCULATOR.sub("", solution).strip()}


def main(args: Args) -> None:
    report = Report()
    splits = []
    for split in ("train", "test"):
        if args.source is None:
            paths = [hub_file(HUB_REPO, f"main/{split}-00000-of-00001.parquet")]
        else:
            paths = find_split(args.source, split)
        splits.append([row for path in paths for row in rows(path, split, report)])
    write_dataset(args.out, *splits, report)


if __name__ == "__main__":
    launch(main, Args)
