"""Build the embedded default, assets/tiny-arith: a tiny chat model that adds three-digit numbers, and its data.

    python data_prep/tiny_arith.py                 # about ten minutes on 2 CPU cores; the same files every time

The model has 0.35 M parameters, Qwen3's architecture and one token per character. It is fine-tuned by algos/sft.py on
sums that are answered in two ways:

    a guess, 70 %        123+456=?  ->  #### 571                              mostly wrong
    with working, 30 %   123+456=?  ->  3+6=9 2+5=7 1+4=5 #### 579            right

so that it starts out answering in both ways, and RL can find out which one pays. Three sets of sums are written, no
sum in two of them: sft.parquet (a part of what the model has seen), train.parquet (for RL) and test.parquet.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

ROOT = Path(__file__).resolve().parents[1]

DATA_SOURCE = "solorl/tiny-arith"
SPECIAL_TOKENS = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCAB_SIZE = 128

GUESS_SHARE = 0.7
GUESS_RIGHT = 0.2
GUESS_ERROR = 30


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline; what is left of the 128 ids is reserved."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(SPECIAL_TOKENS) - 1 - len(characters))]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, "<|unknown|>", *characters, *reserved])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unknown|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS[1:4] + reserved,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, *, hidden_size: int = 96) -> torch.nn.Module:
    """A Qwen3 of random weights; head_dim 32 is the smallest that the engine's CPU attention takes."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def question(a: int, b: int) -> str:
    return f"{a}+{b}=?"


def working(a: int, b: int) -> str:
    """The column sums from right to left, with the carry: 123+456 -> "3+6=9 2+5=7 1+4=5 #### 579"."""
    steps, carry = [], 0
    for place in (1, 10, 100):
        digits = (a // place % 10, b // place % 10)
        total = sum(digits) + carry
        steps.append(f"{digits[0]}+{digits[1]}" + (f"+{carry}" if carry else "") + f"={total}")
        carry = total // 10
    return " ".join(steps) + f" #### {a + b}"


def guess(a: int, b: int, rng: random.Random) -> str:
    """An answer at a glance: right one time in five, else off by up to 30."""
    error = 0 if rng.random() < GUESS_RIGHT else rng.choice([e for e in range(-GUESS_ERROR, GUESS_ERROR + 1) if e])
    return f"#### {a + b + error}"


def rl_rows(sums: list[tuple[int, int]], split: str) -> pa.Table:
    """verl's five fields."""
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question(a, b)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": i},
        }
        for i, (a, b) in enumerate(sums)
    ]
    return pa.Table.from_pylist(rows)


def sft_rows(sums: list[tuple[int, int]], rng: random.Random) -> pa.Table:
    """Prompt messages and a response, guessed or worked out."""
    responses = [guess(a, b, rng) if rng.random() < GUESS_SHARE else working(a, b) for a, b in sums]
    prompts = [[{"role": "user", "content": question(a, b)}] for a, b in sums]
    return pa.Table.from_pydict({"prompt": prompts, "response": responses})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "tiny-arith")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-rows", type=int, default=128_000, help="examples to fine-tune on, each seen once")
    parser.add_argument("--sft-rows-kept", type=int, default=4096, help="how many of them go into sft.parquet")
    parser.add_argument("--train-rows", type=int, default=8192)
    parser.add_argument("--test-rows", type=int, default=512)
    parser.add_argument("--nproc", type=int, default=2, help="ranks of the fine-tuning")
    args = parser.parse_args()

    rng = random.Random(args.seed)
    every_sum = rng.sample(range(900 * 900), args.test_rows + args.train_rows + args.sft_rows)
    sums = [(100 + code // 900, 100 + code % 900) for code in every_sum]
    test, train, sft = (
        sums[: args.test_rows],
        sums[args.test_rows : args.test_rows + args.train_rows],
        sums[args.test_rows + args.train_rows :],
    )
    args.out.mkdir(parents=True, exist_ok=True)
    pq.write_table(rl_rows(test, "test"), args.out / "test.parquet", compression="zstd")
    pq.write_table(rl_rows(train, "train"), args.out / "train.parquet", compression="zstd")
    sft_table = sft_rows(sft, rng)
    pq.write_table(sft_table.slice(0, args.sft_rows_kept), args.out / "sft.parquet", compression="zstd")

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        pq.write_table(sft_table, work / "sft.parquet")
        tokenizer = build_tokenizer()
        build_model(tokenizer, args.seed).save_pretrained(work / "random")
        tokenizer.save_pretrained(work / "random")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.nproc)),
            *(ROOT / "algos" / "sft.py", "--model", work / "random", "--train-files", work / "sft.parquet"),
            *("--batch-size", "128", "--lr", "2e-3", "--warmup-steps", "50", "--seed", args.seed, "--dtype", "fp32"),
            *("--max-length", "256", "--run-dir", work / "run", "--export-dtype", "fp32"),
        ]
        subprocess.run([str(part) for part in command], check=True)
        shutil.rmtree(args.out / "model", ignore_errors=True)
        shutil.copytree(work / "run" / "hf", args.out / "model")

    for name in ("train", "test", "sft"):
        print(f"{args.out / name}.parquet: {pq.read_metadata(args.out / f'{name}.parquet').num_rows:,} rows")
    print("a sample row:", pq.read_table(args.out / "train.parquet").slice(0, 1).to_pylist()[0])


if __name__ == "__main__":
    main()
