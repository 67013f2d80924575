"""Small facts about the engine and its requests that every script needs and no paper changes."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from common.launch import UserError

_kept: list[Any] = []


def keep(llm: Any) -> None:
    """Let the engine live as long as the process does.

    Its finaliser destroys the default process group, whoever made it, while other ranks may still need it; and it
    searches the whole heap for garbage, which takes a second.
    """
    _kept.append(llm)


def weight_names(engine_model: nn.Module) -> set[str]:
    """Hugging Face names of all parameters of the engine's model; a fused one (qkv_proj) counts as its parts."""
    fused = getattr(engine_model, "packed_modules_mapping", {})
    names = set()
    for name, _ in engine_model.named_parameters():
        whole = next((key for key in fused if f".{key}." in name), None)
        names |= {name.replace(f".{whole}.", f".{part}.") for part in fused[whole]} if whole else {name}
    return names


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    """Every id that ends a response: the tokenizer's EOS and those of the generation config, which may be several."""
    ids = {tokenizer.eos_token_id}
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos])
    return sorted(ids - {None})


def make_tp_group(folder: Path, size: int) -> dist.ProcessGroup | None:
    """This rank's group of `size` neighbours that share an engine; None when every rank has its own. A collective.

    Raises UserError when the model's attention heads cannot be split over `size` ranks.
    """
    if size == 1:
        return None
    heads = AutoConfig.from_pretrained(folder).get_text_config().num_attention_heads
    if heads % size:
        raise UserError(f"--rollout-tp {size} does not divide the {heads} attention heads of {folder}")
    mine = None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks)  # every rank takes part in making every group
        if dist.get_rank() in ranks:
            mine = group
    return mine


def gather_requests(requests: list[Any], group: dist.ProcessGroup | None) -> tuple[list[Any], int]:
    """(the requests of all ranks that share an engine, the place where this rank's own begin)."""
    if group is None:
        return requests, 0
    parts: list[list[Any]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, requests, group=group)
    first = sum(len(part) for part in parts[: dist.get_rank(group)])
    return [request for part in parts for request in part], first


def sampling_seed(seed: int, *, step: int, row: int) -> int:
    """Seed of a prompt's first response: differs by run, step and row, and leaves room for its group."""
    return hash((seed, step, row)) % 2**40 * 2**20  # hashes of integers are the same in every process


def check_agreement(
    trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, *, tolerance: float | None, dtype: str
) -> float:
    """Mean |difference| of two log-probs of the same tokens, the largest of all ranks. Tensors are (b, T).

    Raises when it exceeds `tolerance` (None: 1e-3 in fp32, 0.1 in bf16): an engine that is not what the trainer thinks
    it is makes every step that follows worthless.
    """
    count = mask.sum().clamp(min=1)
    gap = ((trainer - engine).abs() * mask).sum() / count
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    allowed = tolerance or {"fp32": 1e-3, "bf16": 0.1}[dtype]
    if not gap <= allowed:  # also true for NaN
        raise RuntimeError(
            f"engine and trainer disagree: mean log-prob of the same tokens {(engine * mask).sum() / count:.6f} "
            f"(engine) and {(trainer * mask).sum() / count:.6f} (trainer) on rank {dist.get_rank()}, mean |difference| "
            f"{float(gap):.3g}, allowed {allowed:.3g} (--engine-tolerance)"
        )
    return float(gap)
