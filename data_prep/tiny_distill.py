"""Build the two models that algos/distill.py starts from on the embedded task: a student and its teacher.

    python data_prep/tiny_distill.py               # about ten minutes on 2 CPU cores

The student, assets/tiny-arith/student, has half the width and half the parameters of the embedded model and is
fine-tuned like it (data_prep/tiny_arith.py): it guesses most sums and works out the others. No sum of train.parquet or
test.parquet is among those it has seen. The teacher, assets/tiny-arith/teacher, is the embedded model after
algos/grpo.py with its defaults. Both have the embedded model's tokenizer, and are stored in bf16.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
from tiny_arith import ROOT, build_model, build_tokenizer, question, sft_rows  # beside this script


def unseen_sums(folder: Path, count: int, rng: random.Random) -> list[tuple[int, int]]:
    """`count` sums of three-digit numbers, none of them in train.parquet or test.parquet, none twice."""
    tables = [pq.read_table(folder / f"{split}.parquet", columns=["prompt"]) for split in ("train", "test")]
    held_out = {row["prompt"][-1]["content"] for table in tables for row in table.to_pylist()}
    codes = rng.sample(range(900 * 900), count + len(held_out))
    sums = [(100 + code // 900, 100 + code % 900) for code in codes]
    return [(a, b) for a, b in sums if question(a, b) not in held_out][:count]


def train(script: str, *arguments: object, nproc: int, out: Path) -> None:
    """Run a script and put the model that it exports in the place of `out`."""
    with tempfile.TemporaryDirectory() as run_dir:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", nproc]
        command = [*launcher, ROOT / "algos" / script, *arguments, "--run-dir", run_dir]
        subprocess.run([str(part) for part in command], check=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(Path(run_dir) / "hf", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--source", type=Path, default=ROOT / "assets" / "tiny-arith", help="folder with the sums")
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "tiny-arith")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=48, help="width of the student; the teacher's is 96")
    parser.add_argument("--sft-rows", type=int, default=128_000, help="examples to fine-tune on, each seen once")
    parser.add_argument("--nproc", type=int, default=2, help="ranks of both trainings")
    parser.add_argument("--only", choices=("student", "teacher"), help="make one of the two")
    args = parser.parse_args()

    if args.only != "teacher":
        rng = random.Random(args.seed)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            pq.write_table(sft_rows(unseen_sums(args.source, args.sft_rows, rng), rng), work / "sft.parquet")
            tokenizer = build_tokenizer()
            build_model(tokenizer, args.seed, hidden_size=args.hidden_size).save_pretrained(work / "random")
            tokenizer.save_pretrained(work / "random")
            train(
                *("sft.py", "--model", work / "random", "--train-files", work / "sft.parquet", "--batch-size", 128),
                *("--lr", "2e-3", "--warmup-steps", 50, "--dtype", "fp32", "--max-length", 256, "--seed", args.seed),
                nproc=args.nproc, out=args.out / "student",
            )  # fmt: skip
    if args.only != "student":
        train("grpo.py", "--seed", args.seed, nproc=args.nproc, out=args.out / "teacher")


if __name__ == "__main__":
    main()
