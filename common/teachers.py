"""The frozen teacher of algos/distill.py before it is loaded: can it teach this student, is it the same, its memory."""

import hashlib
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from common import checkpoint, memory
from common.launch import UserError, require

SAMPLES, SAMPLE_BYTES = 64, 4096
"""How many pieces of a file of weights are part of its fingerprint, and their size."""


def check_arguments(args: Any) -> None:
    """Refuse what leaves the student without a teacher, and settings that would do nothing. Raises UserError."""
    require(
        args.teacher is not None,
        "--teacher is missing: name the folder or hub name of a model to learn from, with the tokenizer of --model "
        f"{args.model}; for example a larger model of the family, or runs/<name>/hf, which algos/grpo.py writes",
    )
    require(
        args.divergence != "jsd" or 0 < args.jsd_beta < 1,
        f"--jsd-beta {args.jsd_beta}: it must lie between 0 and 1, at which the divergence is 0 whatever the student "
        "does; its limits are --divergence forward-kl (near 0) and reverse-kl (near 1)",
    )
    require(args.divergence_top_k >= 0, f"--divergence-top-k {args.divergence_top_k}: it cannot be negative; 0 is off")
    require(
        not args.policy_gradient or (args.divergence == "reverse-kl" and args.divergence_top_k == 0),
        f"--policy-gradient with --divergence {args.divergence} --divergence-top-k {args.divergence_top_k}: sampled "
        "tokens estimate the reverse KL over the whole vocabulary alone",
    )


def check_teacher(args: Any, student_folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The teacher's folder, once it is sure that an id means the same token to both models. Raises UserError.

    The heads may have different sizes, padded beyond the tokenizer, but each must have a row for every token.
    """
    folder = checkpoint.resolve_model(args.teacher)
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"--teacher {args.teacher}: has no tokenizer that can be read ({error})") from error
    mine, other = tokenizer.get_vocab(), theirs.get_vocab()
    if mine != other:
        token = min(token for token in mine.keys() | other.keys() if mine.get(token) != other.get(token))
        raise UserError(
            f"--teacher {args.teacher}: has another vocabulary than --model {args.model}, {len(other):,} tokens and "
            f"not {len(mine):,}; the id of {token!r} is {other.get(token)} there and {mine.get(token)} here. They are "
            "compared token by token, so use models of one family"
        )
    for name in ("bos_token", "eos_token"):
        my_token, other_token = getattr(tokenizer, name), getattr(theirs, name)
        require(
            my_token == other_token,
            f"--teacher {args.teacher}: its {name} is {other_token!r}, and {my_token!r} that of --model {args.model}; "
            "the student would learn to end its responses like the one and be stopped by the other: give both folders "
            "the one that the teacher was trained with (tokenizer_config.json)",
        )
    for name, path in (("--model", student_folder), ("--teacher", folder)):
        rows = AutoConfig.from_pretrained(path, trust_remote_code=args.trust_remote_code).get_text_config().vocab_size
        last = max(mine.values())
        require(rows > last, f"{name} {path}: has {rows:,} embeddings for a tokenizer with ids up to {last:,}")
    return folder


def fingerprint(folder: Path) -> str:
    """Tells a model's weights from others without reading all of them: names and sizes of its files, and samples."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(set(checkpoint.safetensors_files(folder).values())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for i in range(SAMPLES):
                file.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def check_same(saved: str, folder: Path) -> None:
    """A run must go on with the teacher whose fingerprint its checkpoint holds. Raises UserError."""
    require(
        saved == fingerprint(folder),
        f"--teacher {folder}: is not the teacher that this run began with, its weights differ; name that one, or start "
        "a new run",
    )


def memory_table(args: Any) -> str:
    """The memory of each of `--dry-run` ranks, the teacher's included."""
    sizes, teacher = memory.sizes_of(checkpoint.resolve_model(args.teacher), args)
    compute = memory.DTYPE_BYTES[args.dtype]
    logits = 4 * args.logits_chunk_rows * teacher.config.get_text_config().vocab_size
    others = {
        "teacher (sharded)": compute * sizes.total / args.dry_run,
        "teacher: two layers gathered": 2 * compute * sizes.layer,
        "teacher: embedding and head gathered": compute * sizes.root,
        # Measured: with the student's 3 it comes to 7 times the logits of a chunk, for the mixture of jsd to 11.
        "teacher: logits, and their comparison": logits * (8 if args.divergence == "jsd" else 4),
    }
    return memory.table(args, ranks=args.dry_run, frozen_models=0, others=others)
