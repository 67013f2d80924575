"""Build preferences for the embedded default: pairs for algos/reward_model.py, and prompts to run PPO against it.

    python data_prep/tiny_pairs.py                 # seconds; the same files every time

The prompts are the sums of assets/tiny-arith. The chosen response is right and shows its working; the rejected one is

    a guess, 40 %        123+456=?  ->  #### 571                              one in five is right, none is shown to be
    a slip, 40 %         123+456=?  ->  3+6=9 2+5=8 1+4=5 #### 589            one column is wrong, and so is the answer
    a misreading, 20 %   123+456=?  ->  3+6=9 2+5=7 1+4=5 #### 576            right working, another answer

so that a reward model has to follow the working: neither length nor form tells the two apart. Three files are written:
pairs_train.parquet and pairs_test.parquet (no sum in both), and prompts_model.parquet, the training prompts with
reward_model.style "model".
"""

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tiny_arith import ROOT, guess, working  # beside this script

GUESS_SHARE, SLIP_SHARE = 0.4, 0.4


def slip(a: int, b: int, rng: random.Random) -> str:
    """The working with one column sum off by 1 or 2, carried on to the answer."""
    wrong_place, steps, carry, answer = rng.choice((1, 10, 100)), [], 0, 0
    for place in (1, 10, 100):
        digits = (a // place % 10, b // place % 10)
        total = sum(digits) + carry
        shown = f"{digits[0]}+{digits[1]}" + (f"+{carry}" if carry else "")
        if place == wrong_place:
            total += rng.choice([error for error in (-2, -1, 1, 2) if 0 <= total + error <= 19])
        steps.append(f"{shown}={total}")
        carry = total // 10
        answer += (total if place == 100 else total % 10) * place
    return " ".join(steps) + f" #### {answer}"


def misreading(a: int, b: int, rng: random.Random) -> str:
    """The right working, and an answer that is off by 1 to 9 in one of its digits' places."""
    error = rng.choice((-1, 1)) * rng.randint(1, 9) * rng.choice((1, 10))
    return working(a, b).replace(f"#### {a + b}", f"#### {a + b + error}")


def pair_row(prompt: list[dict[str, str]], rng: random.Random) -> dict[str, Any]:
    """`prompt`, `chosen` and `rejected` of a sum written as "123+456=?"."""
    a, b = (int(number) for number in prompt[-1]["content"].removesuffix("=?").split("+"))
    kind = rng.random()
    make = guess if kind < GUESS_SHARE else slip if kind < GUESS_SHARE + SLIP_SHARE else misreading
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
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), args.out / f"{name}.parquet", compression="zstd")
        print(f"{args.out / name}.parquet: {len(rows):,} rows")
    for row in tables["pairs_train"][:3]:
        print("a sample pair:", row["prompt"][-1]["content"], "->", row["chosen"], "rather than", row["rejected"])


if __name__ == "__main__":
    main()
