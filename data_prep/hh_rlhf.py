"""Anthropic's hh-rlhf (Bai et al. 2022, MIT): dialogues with a chosen and a rejected last answer.

    python data_prep/hh_rlhf.py                                          # from the hub: Anthropic/hh-rlhf
    python data_prep/hh_rlhf.py --source harmless-base-test.jsonl.gz     # local files; split by prompt

One file serves three uses: `prompt`, `chosen` and `rejected` for algos/reward_model.py; the five fields, with
reward_model.style "model", for RL against a reward model; `prompt` and `response` (the chosen answer) for algos/sft.py.
The data is upsetting in places, by its purpose.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.launch import UserError, launch
from common.prep import Report, Row, hub_file, make_row, read_records, write_dataset

HUB_REPO = "Anthropic/hh-rlhf"
SUBSETS = ("harmless-base", "helpful-base")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass
class Args:
    source: list[str] = field(default_factory=list)
    """Local .jsonl or .jsonl.gz files with `chosen` and `rejected`; default: the hub's two base subsets."""
    out: str = "data/hh_rlhf"
    """Where train.parquet and test.parquet go."""
    test_fraction: float = 0.1
    """Of local files without "train" or "test" in all their names: the share of prompts that becomes the test split."""


def split_turns(dialogue: str) -> list[dict[str, str]] | None:
    """Chat messages of a dialogue "\\n\\nHuman: ...\\n\\nAssistant: ..."; None when the turns do not alternate."""
    pieces = _TURN.split(dialogue)
    if pieces[0].strip():
        return None
    roles, texts = pieces[1::2], pieces[2::2]
    if any(role != ("Human", "Assistant")[turn % 2] for turn, role in enumerate(roles)):
        return None
    return [{"role": _ROLES[role], "content": text.strip()} for role, text in zip(roles, texts, strict=True)]


def read_pair(record: dict[str, str], report: Report) -> tuple[list[dict[str, str]], str, str] | None:
    """(prompt messages, chosen answer, rejected answer) of a record, or None and a reason in the report."""
    chosen, rejected = split_turns(record["chosen"]), split_turns(record["rejected"])
    if not chosen or not rejected or chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
        report.drop("turns that do not alternate from Human to a last Assistant")
    elif chosen[:-1] != rejected[:-1]:
        report.drop("chosen and rejected differ before the last answer")
    elif not all(message["content"] for message in [*chosen, rejected[-1]]):
        report.drop("an empty turn")
    elif chosen[-1] == rejected[-1]:
        report.drop("chosen and rejected are the same")
    else:
        return chosen[:-1], chosen[-1]["content"], rejected[-1]["content"]
    return None


def split_of(prompt: list[dict[str, str]], test_fraction: float) -> str:
    """The split of a prompt, by a hash of its first turn: dialogues that begin alike stay together."""
    digest = hashlib.sha256(prompt[0]["content"].encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < test_fraction * 2**64 else "train"


def rows(path: Path, split: str | None, report: Report, test_fraction: float) -> Iterator[Row]:
    """The usable pairs of one file; `split` None lets the hash decide.

    Raises:
        UserError: a record has not the two fields.
    """
    for index, record in enumerate(read_records(path)):
        if not isinstance(record.get("chosen"), str) or not isinstance(record.get("rejected"), str):
            raise UserError(f"{path}: record {index} needs 'chosen' and 'rejected' as text, has {sorted(record)}")
        # Of a record that is dropped nobody knows the prompt, so it counts where its text would go.
        place = split or split_of([{"content": record["chosen"]}], test_fraction)
        pair = read_pair(record, report)
        if pair is None:
            report.read[place] += 1
            continue
        prompt, chosen, rejected = pair
        place = split or split_of(prompt, test_fraction)
        report.read[place] += 1
        row = make_row(
            "Anthropic/hh-rlhf",
            prompt,
            ability="alignment",
            ground_truth=chosen,
            split=place,
            index=index,
            style="model",
            file=path.name,
        )
        yield row | {"chosen": chosen, "rejected": rejected, "response": chosen}


def find_files(source: list[str]) -> list[tuple[Path, str | None]]:
    """(file, its split) for every input; the split is None when the names do not tell both splits apart.

    Raises:
        UserError: a file does not exist.
    """
    if not source:
        names = [(f"{subset}/{split}.jsonl.gz", split) for subset in SUBSETS for split in ("train", "test")]
        return [(hub_file(HUB_REPO, name), split) for name, split in names]
    for name in source:
        if not Path(name).is_file():
            raise UserError(f"--source {name}: no such file")
    splits = [next((split for split in ("train", "test") if split in Path(name).name), None) for name in source]
    if set(splits) != {"train", "test"}:
        splits = [None] * len(source)
    return [(Path(name), split) for name, split in zip(source, splits, strict=True)]


def main(args: Args) -> None:
    if not 0 < args.test_fraction < 1:
        raise UserError(f"--test-fraction {args.test_fraction}: needed between 0 and 1")
    report = Report()
    splits: dict[str, list[Row]] = {"train": [], "test": []}
    for path, split in find_files(args.source):
        for row in rows(path, split, report, args.test_fraction):
            splits[row["extra_info"]["split"]].append(row)
    write_dataset(args.out, splits["train"], splits["test"], report)


if __name__ == "__main__":
    launch(main, Args)
