"""Arguments that scripts share: defaults that depend on the model, and the refusal of what cannot work."""

import os
from typing import Any

import torch

from common import rewards
from common.data import PromptDataset
from common.device import Device
from common.launch import require

ROLLOUT_COUNTS = ("prompts_per_step", "group_size", "max_prompt_length", "max_response_length", "rollout_tp")
UPDATE_COUNTS = ("steps", "num_minibatches", "epochs", "micro_batch_tokens", "logits_chunk_rows", "keep_checkpoints")


def fill_in(args: Any, defaults: dict[str, Any], device: Device) -> None:
    """Replace None by its default in place, and the dtype "auto" by what the device is good at."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.dtype == "auto":
        args.dtype = "bf16" if device.default_dtype() == torch.bfloat16 else "fp32"


def flag(name: str) -> str:
    """The command-line spelling of a field of Args."""
    return "--" + name.replace("_", "-")


def check_counts(args: Any, names: tuple[str, ...]) -> None:
    """Each of these fields must be at least 1; scripts may lack some of them."""
    for name in names:
        value = getattr(args, name, 1)
        require(value is not None and value >= 1, f"{flag(name)} is {value}: it must be at least 1")


def check_rollout(args: Any) -> None:
    """What sampling and batch sizes must obey, each refusal with the numbers. Raises UserError."""
    check_counts(args, ROLLOUT_COUNTS + UPDATE_COUNTS)
    ranks = args.dry_run or int(os.environ.get("WORLD_SIZE", "1"))
    minibatches = getattr(args, "num_minibatches", 1)  # scripts that take one update for each rollout lack the flag
    prompts, group_size = args.prompts_per_step, args.group_size
    require(args.temperature > 0, f"--temperature {args.temperature}: training needs a temperature above 0")
    require(
        args.top_p == 1.0 and args.top_k <= 0,
        f"--top-p {args.top_p} --top-k {args.top_k}: training samples from the full distribution, as the trainer's "
        "log-probs are; use --top-p 1 --top-k 0 and a lower --temperature",
    )
    require(ranks % args.rollout_tp == 0, f"--rollout-tp {args.rollout_tp} does not divide {ranks} ranks")
    require(prompts >= ranks, f"{ranks} ranks for --prompts-per-step {prompts}: a rank would have no prompt")
    require(prompts % ranks == 0, f"--prompts-per-step {prompts} does not divide over {ranks} ranks")
    sequences = prompts * group_size // ranks
    require(
        sequences % minibatches == 0,
        f"--num-minibatches {minibatches} does not divide the {sequences} sequences of a rank "
        f"(--prompts-per-step {prompts} x --group-size {group_size} / {ranks} ranks)",
    )
    require(
        args.max_prompt_length + args.max_response_length <= args.micro_batch_tokens,
        f"--micro-batch-tokens {args.micro_batch_tokens} is less than one longest sequence, --max-prompt-length "
        f"{args.max_prompt_length} + --max-response-length {args.max_response_length}",
    )
    buffer = getattr(args, "overlong_buffer", 0)
    require(
        0 <= buffer <= args.max_response_length,
        f"--overlong-buffer {buffer}: it is a part of --max-response-length {args.max_response_length}",
    )


def check_pairs(args: Any) -> None:
    """What pairs of responses need beyond `check_rollout`. Raises UserError."""
    require(args.beta > 0, f"--beta {args.beta}: it must be above 0")
    require(
        args.group_size > 1 or args.pairing != "reward",
        f"--pairing reward --group-size {args.group_size}: the best and the worst response take two",
    )
    require(
        2 * (args.max_prompt_length + args.max_response_length) <= args.micro_batch_tokens,
        f"--micro-batch-tokens {args.micro_batch_tokens} is less than one longest pair, twice --max-prompt-length "
        f"{args.max_prompt_length} + --max-response-length {args.max_response_length}",
    )


def check_batch_size(batch_size: int, *, longest: int, args: Any) -> None:
    """A batch of examples must divide over the ranks, and the longest of them fit into a micro-batch."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    require(batch_size % ranks == 0, f"--batch-size {batch_size} does not divide over {ranks} ranks")
    require(
        longest <= args.micro_batch_tokens,
        f"--micro-batch-tokens {args.micro_batch_tokens} is less than one longest example, --max-length {longest}",
    )


def check_data(args: Any, train_data: PromptDataset, test_data: PromptDataset | None) -> None:
    """Every row must have a rule that scores it, if any does, and every rank a prompt. Raises UserError."""
    for dataset in filter(None, (train_data, test_data)):
        for source in sorted(getattr(dataset, "data_sources", ())):  # examples for fine-tuning are not scored
            require(
                args.reward_fn is not None or rewards.knows(source),
                f"data_source '{source}' has no reward rule: bring one with --reward-fn file.py:name",
            )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    require(len(train_data) >= ranks, f"{ranks} ranks for {len(train_data)} training prompts: use fewer ranks")


def describe(args: Any, device: Device, report: dict[str, Any]) -> str:
    """One line for the console: the model, what it runs on, how many rows were kept and what became of the others."""
    model = os.path.relpath(args.model) if os.path.isdir(args.model) else args.model
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    dropped = [f"{count:,} {reason}" for reason, count in report["dropped"].items() if count]
    rows = f"{report['kept']:,} rows" + (f" (dropped: {', '.join(dropped)})" if dropped else "")
    return f"{model} on {ranks} x {device.name}, {args.dtype}; {rows}"
