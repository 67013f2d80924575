"""What the scripts in data_prep/ share: reading a source, counting what is dropped, writing the two parquet files."""

import glob
import gzip
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.launch import UserError

Row = dict[str, Any]
SPLITS = ("train", "test")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")


@dataclass
class Report:
    """How many records were read, and why some of them are not in the result."""

    read: Counter[str] = field(default_factory=Counter)
    """Records by split."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Records by reason."""

    def drop(self, reason: str) -> None:
        self.dropped[reason] += 1

    def lines(self, kept: dict[str, int]) -> list[str]:
        """The report as it is printed; `kept` is the number of rows by split."""
        read = ", ".join(f"{self.read[split]} {split}" for split in SPLITS)
        lines = [f"read {read}; kept {', '.join(f'{kept[split]} {split}' for split in SPLITS)}"]
        lines += [f"  dropped {count}: {reason}" for reason, count in sorted(self.dropped.items())]
        return lines


# -- reading ----------------------------------------------------------------------------------------------------------


def find_split(source: str, split: str) -> list[Path]:
    """The files of a split in a source folder: `train.jsonl`, `train.parquet`, `train-00000-of-00002.parquet`, ...

    Raises:
        UserError: the folder has none.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise UserError(f"--source {source}: no such folder; it should hold train.jsonl and test.jsonl (or .parquet)")
    names = [folder / f"{split}{suffix}" for suffix in _SUFFIXES]
    found = [path for path in names if path.is_file()][:1]
    pattern = f"{glob.escape(split)}-*.parquet"
    found = found or sorted([*folder.glob(pattern), *folder.glob(f"data/{pattern}")])
    if not found:
        raise UserError(f"--source {source}: no {split}.jsonl, .jsonl.gz, .json or .parquet in it")
    return found


def hub_file(repo: str, filename: str) -> Path:
    """A file of a data set on the Hugging Face hub, downloaded once.

    Raises:
        UserError: it cannot be had, for example without a network.
    """
    from huggingface_hub import hf_hub_download  # only here: nothing else of the preparation needs it

    try:
        return Path(hf_hub_download(repo, filename, repo_type="dataset"))
    except Exception as error:  # the hub client has many kinds of failure; all mean the same to the user
        raise UserError(
            f"cannot download {filename} of {repo} from the hub ({' '.join(str(error).split())[:120]}); "
            "give a local copy with --source"
        ) from error


def read_records(path: Path) -> Iterator[Row]:
    """The records of a .jsonl, .jsonl.gz, .json (one list, or one object) or .parquet file.

    Raises:
        UserError: naming the file and the line that is not a JSON object.
    """
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
        return
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error})") from error
        yield from content if isinstance(content, list) else [content]
        return
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(record, dict):
                raise UserError(f"{path}, line {number}: needed a JSON object, it is {line.strip()[:60]}")
            yield record


# -- rows -------------------------------------------------------------------------------------------------------------


def make_row(
    data_source: str,
    prompt: str | list[dict[str, str]],
    *,
    ability: str,
    ground_truth: Any,
    split: str,
    index: int,
    style: str = "rule",
    **extra_info: Any,
) -> Row:
    """One row in the five-field form; `index` is the record's number in its source, and `prompt` one user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def _key(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"].strip()) for message in row["prompt"])


def without_duplicates(
    rows: Iterable[Row], report: Report, *, seen: set, why: str = "the same prompt again"
) -> list[Row]:
    """The rows whose prompt is not in `seen`; their prompts are added to it."""
    kept = []
    for row in rows:
        key = _key(row)
        if key in seen:
            report.drop(why)
            continue
        seen.add(key)
        kept.append(row)
    return kept


def write_dataset(out_dir: str, train: Iterable[Row], test: Iterable[Row], report: Report) -> None:
    """Write train.parquet and test.parquet without a prompt in common, and print what was done and one row.

    The test split comes first: a prompt of both is dropped from the training split.

    Raises:
        UserError: a split is empty.
    """
    folder = Path(out_dir)
    test_rows = without_duplicates(test, report, seen=set())
    tested = {_key(row) for row in test_rows}
    train_rows = []
    for row in without_duplicates(train, report, seen=set()):
        if _key(row) in tested:
            report.drop("a training prompt that is in the test split")
        else:
            train_rows.append(row)
    kept = {"train": len(train_rows), "test": len(test_rows)}
    print("\n".join(report.lines(kept)))
    for split, rows in zip(SPLITS, (train_rows, test_rows), strict=True):
        if not rows:
            raise UserError(f"no row is left for {split}.parquet; the lines above say why")
        _write_parquet(folder / f"{split}.parquet", rows)
        print(f"wrote {folder / split}.parquet ({len(rows)} rows)")
    print("a sample row:")
    print(json.dumps(train_rows[0], indent=2, ensure_ascii=False, default=str))


def _write_parquet(path: Path, rows: list[Row]) -> None:
    """A parquet file that is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows), unfinished, row_group_size=50_000)
    os.replace(unfinished, path)
