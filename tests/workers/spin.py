"""Started by tests/test_spin.py under torchrun: SPIN's loss and gradients of one batch, and the opponent's weights.

    spin.py MODEL_FOLDER OUT

All ranks together hold the same 7 pairs. OUT gets the results by variant.
"""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from algos import spin
from common import checkpoint, launch, optim
from common.data import Prompt
from common.device import get_device

BETA, TEMPERATURE = 0.3, 0.8
VARIANTS = {
    "plain": {"micro_batch_tokens": 100_000},
    "one_pair": {"micro_batch_tokens": 1},
    "two_pairs": {"micro_batch_tokens": 120, "delay_gradient_reduction": True},
    "all_on_one_rank": {"micro_batch_tokens": 120},
}


def make_pairs_of_odd_lengths() -> list[spin.Pair]:
    """7 pairs; one response is a single token, and one pair is twice the same response."""
    generator = torch.Generator().manual_seed(5)

    def sample(prompt: Prompt, length: int) -> spin.Sample:
        ids = torch.randint(6, 100, (length,), generator=generator).tolist()
        return spin.Sample(prompt, ids, [0.0] * length, ref_logprobs=-5 * torch.rand(length, generator=generator))

    pairs = []
    for i in range(7):
        prompt = Prompt(i, torch.randint(6, 100, (3 + i % 4,), generator=generator).tolist(), "x", "", {}, "rule", [])
        lengths = torch.randint(2, 20, (2,), generator=generator).tolist()
        chosen, rejected = sample(prompt, lengths[0]), sample(prompt, lengths[1] if i else 1)
        pairs.append(spin.Pair(prompt, chosen, dataclasses.replace(chosen) if i == 3 else rejected))
    return pairs


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole, and copied."""
    tensors = checkpoint._weights(model).items()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors}


def backward(model: nn.Module, pairs: list[spin.Pair], args: spin.Args) -> dict[str, Any]:
    """As main does it: the sums of the metrics, the loss over all ranks and the number of micro-batches."""
    device = get_device()
    num_pairs = launch.all_reduce_sums({"pairs": len(pairs)}, device)["pairs"]
    sums: dict[str, Any] = {}
    micro_batches = spin.make_micro_batches(model, pairs, args.micro_batch_tokens, device)
    for i, micro_batch in enumerate(micro_batches):
        if args.delay_gradient_reduction:
            model.set_requires_gradient_sync(i == len(micro_batches) - 1)
        batch = spin.collate_pairs(micro_batch, device)
        loss, metrics = spin.compute_loss(
            new_logprobs=spin.compute_logprobs(model, batch, args)[0],
            ref_logprobs=batch.ref_logprobs,
            response_mask=batch.response_mask,
            beta=args.beta,
            num_pairs=num_pairs,
        )
        (loss * dist.get_world_size()).backward()
        for name, value in (metrics | {"total": loss}).items():
            sums[name] = sums.get(name, 0.0) + value.item()
    return {"sums": launch.all_reduce_sums(sums, device) if sums else {}, "micro_batches": len(micro_batches)}


def copies(folder: Path, dtype: str) -> dict[str, Any]:
    """The policy takes a step, becomes the opponent, and takes another one."""
    device, rank = get_device(), dist.get_rank()
    args = spin.Args(dtype=dtype, beta=BETA, temperature=TEMPERATURE)
    model, opponent = (spin.shard_model(folder, args, device, trainable=trainable) for trainable in (True, False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = make_pairs_of_odd_lengths()[rank :: dist.get_world_size()]
    batch = spin.collate_pairs(mine, device)
    stored = spin.DTYPES[dtype]

    def equal() -> bool:
        theirs = weights_of(model)
        return all(weight.equal(theirs[name].to(stored)) for name, weight in weights_of(opponent).items())

    def loss() -> torch.Tensor:
        with torch.no_grad():
            ref_logprobs, _ = spin.compute_logprobs(opponent, batch, args)
        rows = {"new_logprobs": spin.compute_logprobs(model, batch, args)[0], "ref_logprobs": ref_logprobs}
        return spin.compute_loss(**rows, response_mask=batch.response_mask, beta=BETA, num_pairs=len(mine))[0]

    loss().backward()
    optimizer.step()
    found = {"different before": not equal()}
    loss()  # both have seen a forward pass without a backward one
    checkpoint.copy_weights(model, opponent)
    found |= {"equal after": equal(), "loss after": loss().item()}
    before = weights_of(opponent)
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    after = weights_of(opponent)
    return found | {"kept": not equal() and all(before[name].equal(after[name]) for name in before)}


def no_pairs(model: nn.Module, args: spin.Args) -> dict[str, Any]:
    """An update of a step in which all rewards are tied on all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1)
    state: dict[str, Any] = {}
    updates = optim.Updates(args, tracker=SimpleNamespace(log_samples=print, note=print), state=state)
    before = weights_of(model)
    optimizer.zero_grad()
    micro_batches = backward(model, [], args)["micro_batches"]
    grad_norm = updates.apply(model, optimizer, lr=1.0, step=1)
    moved = any(not weight.equal(before[name]) for name, weight in weights_of(model).items())
    return {"grad_norm": grad_norm, "bad_updates": updates.bad, "moved": moved, "micro_batches": micro_batches}


def main() -> None:
    folder, out = map(Path, sys.argv[1:3])
    launch.init_distributed(get_device())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, changes in VARIANTS.items():
        args = dataclasses.replace(spin.Args(dtype="fp32", beta=BETA, temperature=TEMPERATURE), **changes)
        model = spin.shard_model(folder, args, get_device(), trainable=True)
        pairs = make_pairs_of_odd_lengths()
        # Rank 0 has 5 of the 7, or all, so that the ranks have different numbers of micro-batches.
        cut = 7 if name == "all_on_one_rank" or ranks == 1 else 5
        results[name] = backward(model, pairs[:cut] if rank == 0 else pairs[cut:], args)
        results[name]["grads"] = gradients(model)
    results["no_pairs"] = no_pairs(model, args)
    results |= {f"copy {dtype}": copies(folder, dtype) for dtype in ("fp32", "bf16")}
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
