"""Build preferences for the embedded default: pairs for algos/reward_model.py, prompts to run PPO against it, and the
responses that algos/spin.py learns to write.

    python data_prep/tiny_pairs.py                 # seconds; the same files every time

The prompts are the sums of assets/tiny-arith. The chosen response is right and shows its working; the rejected one is

    a guess, 65 %        123+456=?  ->  #### 571                              one in five is right, none is shown to be
    cut short, 25 %      123+456=?  ->  3+6=9 2+5=7 #### 79                   columns are left out, and not added
    a slip, 10 %         123+456=?  ->  3+6=9 2+5=8 1+4=5 #### 589            one column is wrong, and so is the answer

Guesses and missing columns can be told by their form. A slip cannot: to see it one has to do the sum, which is too much
for a model of this size, so about half of the slips go unnoticed. Four files are written: pairs_train.parquet and
pairs_test.parquet (no sum in both), prompts_model.parquet, the training prompts with reward_model.style "model", and
worked.parquet, the rows of pairs_train.parquet with verl's five fields and the chosen response as `response`.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tiny_arith import ROOT, guess, working  # beside this script

GUESS_SHARE, SHORT_SHARE = 0.65, 0.25


def column_sums(
    a: int, b: int, *, slip: tuple[int, int] = (0, 0), places: tuple[int, ...] = (1, 10, 100)
) -> tuple[str, int]:
    """(working, answer) of a sum written out at some `places`; slip = (place, error) makes that column wrong."""
    steps, carry, answer = [], 0, 0
    for place in places:
        digits = (a // place % 10, b // place % 10)
        total = sum(digits) + carry + (slip[1] if slip[0] == place else 0)
        steps.append(f"{digits[0]}+{digits[1]}" + (f"+{carry}" if carry else "") + f"={total}")
        carry = total // 10
        answer += (total if place == places[-1] else total % 10) * place
    return " ".join(steps), answer


def cut_short(a: int, b: int, rng: random.Random) -> str:
    """The working, and the answer that it leads to, without the column of the hundreds or the tens and hundreds."""
    steps, answer = column_sums(a, b, places=rng.choice(((1,), (1, 10))))
    return f"{steps} #### {answer}"


def slip(a: int, b: int, rng: random.Random) -> str:
    """The working with one column sum off by 1 or 2, carried on to the answer."""
    place = rng.choice((1, 10, 100))
    room = a // place % 10 + b // place % 10  # the least that the column can come to
    error = rng.choice([error for error in (-2, -1, 1, 2) if 0 <= room + error <= 18])
    steps, answer = column_sums(a, b, slip=(place, error))
    return f"{steps} #### {answer}"


def pair_row(prompt: list[dict[str, str]], rng: random.Random) -> dict[str, Any]:
    """`prompt`, `chosen` and `rejected` of a sum written as "123+456=?"."""
    a, b = (int(number) for number in prompt[-1]["content"].removesuffix("=?").split("+"))
    kind = rng.random()
    make = guess if kind < GUESS_SHARE else cut_short if kind < GUESS_SHARE + SHORT_SHARE else slip
    return {"prompt": prompt, "chosen": working(a, b), "rejected": make(a, b, rng)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--source", type=Path, default=ROOT / "assets" / "tiny-arith", help="folder with the sums")
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "tiny-arith")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-rows", type=int, default=4096, help="how many of the training sums become pairs")
    args = parser.parse_args()

    rng = random.Random(args.seed)
    train, test = (pq.read_table(args.source / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    prompts = [row | {"reward_model": row["reward_model"] | {"style": "model"}} for row in train]
    tables = {
        "pairs_train": [pair_row(row["prompt"], rng) for row in train[: args.train_rows]],
        "pairs_test": [pair_row(row["prompt"], rng) for row in test],
        "prompts_model": prompts,
    }
    chosen = [{"response": pair["chosen"]} for pair in tables["pairs_train"]]
    tables["worked"] = [row | response for row, response in zip(train, chosen, strict=False)]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), args.out / f"{name}.parquet", compression="zstd")
        print(f"{args.out / name}.parquet: {len(rows):,} rows")
    for row in tables["pairs_train"][:3]:
        print("a sample pair:", row["prompt"][-1]["content"], "->", row["chosen"], "rather than", row["rejected"])


if __name__ == "__main__":
    main()
