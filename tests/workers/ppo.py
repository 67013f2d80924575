"""Started by tests/test_ppo.py under torchrun: PPO's credit, losses and gradients of one batch, in several ways.

    ppo.py MODEL_FOLDER OUT

All ranks together hold the same 8 samples, half of them scored by a reward model. OUT/<variant>.pt gets the results.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from algos import ppo
from common import launch, rewards
from common.data import Prompt
from common.device import get_device

VARIANTS = {
    "plain": {"micro_batch_tokens": 100_000},
    "one_sample": {"micro_batch_tokens": 1},
    "two_samples": {"micro_batch_tokens": 60, "delay_gradient_reduction": True},
}


def make_samples() -> list[ppo.Sample]:
    """8 samples of odd lengths; the first response is a single token."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for i in range(8):
        length = int(torch.randint(2, 20, (1,), generator=generator)) if i else 1
        prompt = torch.randint(6, 100, (3 + i % 4,), generator=generator).tolist()
        sample = ppo.Sample(
            prompt=Prompt(i, prompt, "tiny-arith", "7", {}, "model" if i % 2 else "rule", []),
            response_ids=torch.randint(6, 100, (length,), generator=generator).tolist(),
            rollout_logprobs=(-5 * torch.rand(length, generator=generator)).tolist(),
            text=f"#### {7 + i % 3}",
        )
        sample.old_logprobs = -5 * torch.rand(length, generator=generator)
        sample.ref_logprobs = -5 * torch.rand(length, generator=generator)
        samples.append(sample)
    return samples


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}


def gather(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of all ranks, in the order of ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    return [row for part in everyone for row in part]


def make_critic(folder: Path, args: ppo.Args, *, trainable: bool) -> nn.Module:
    """A critic whose head is not 0, so that the gradient reaches the whole model."""
    critic = ppo.shard_model(folder, args, get_device(), trainable=trainable, scalar_head=True)
    whole = torch.linspace(-1, 1, critic.score.weight.shape[1])[None]
    with torch.no_grad():
        local = critic.score.weight.to_local()
        local.copy_(whole[: len(local)])  # its one row is rank 0's
    return critic


def credit_and_gradients(folder: Path, changes: dict) -> dict[str, Any]:
    device = get_device()
    args = dataclasses.replace(ppo.Args(dtype="fp32", temperature=0.8, max_response_length=24), **changes)
    model = ppo.shard_model(folder, args, device, trainable=True)
    critic, reward_model = make_critic(folder, args, trainable=True), make_critic(folder, args, trainable=False)
    # Rank 0 takes 5 of the 8, so that the ranks have different numbers of micro-batches.
    mine = make_samples()
    if dist.get_world_size() == 2:
        mine = mine[:5] if dist.get_rank() == 0 else mine[5:]
    with rewards.Scorer(rewards.load_reward_fn(None)) as scorer:
        ppo.score(scorer, mine, reward_model, args, device)
    scores = [sample.reward for sample in mine]
    everything = [dataclasses.replace(s, prompt=dataclasses.replace(s.prompt, reward_style="model")) for s in mine]
    with rewards.Scorer(rewards.load_reward_fn(None)) as scorer:
        ppo.score(scorer, everything, reward_model, args, device)
    for sample, judged in zip(mine, everything, strict=True):
        expected = judged.reward if sample.prompt.reward_style == "model" else float(sample.text == "#### 7")
        assert abs(sample.reward - expected) < 1e-4, (sample.reward, expected, scores)

    with torch.no_grad():
        for micro_batch in ppo.make_micro_batches(critic, mine, args.micro_batch_tokens, device):
            values = ppo.compute_values(critic, ppo.collate(micro_batch, device))
            for sample, row in zip(micro_batch, values, strict=False):
                sample.values = row[: len(sample.response_ids)]
    batch = ppo.collate(mine, device)
    token_rewards = ppo.compute_rewards(
        scores=torch.tensor([sample.reward for sample in mine]),
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        response_mask=batch.response_mask,
        kl_coef=0.1,
    )
    advantages, returns = ppo.compute_advantages(
        rewards=token_rewards,
        values=batch.values,
        response_mask=batch.response_mask,
        gamma=0.99,
        gae_lambda=0.9,
    )
    advantages = ppo.whiten(advantages, batch.response_mask, device)
    for sample, advantage_row, return_row in zip(mine, advantages, returns, strict=True):
        sample.advantages = advantage_row[: len(sample.response_ids)]
        sample.returns = return_row[: len(sample.response_ids)]

    counts = launch.all_reduce_sums({"tokens": sum(len(s.response_ids) for s in mine)}, device)
    sums: dict[str, Any] = {}
    micro_batches = ppo.make_micro_batches(model, mine, args.micro_batch_tokens, device)
    for i, micro_batch in enumerate(micro_batches):
        if args.delay_gradient_reduction:
            for trained in (model, critic):
                trained.set_requires_gradient_sync(i == len(micro_batches) - 1)
        batch = ppo.collate(micro_batch, device)
        weights = batch.response_mask / counts["tokens"]
        value_loss, value_metrics = ppo.compute_value_loss(
            values=ppo.compute_values(critic, batch),
            old_values=batch.values,
            returns=batch.returns,
            response_mask=batch.response_mask,
            weights=weights,
            value_clip=0.2,
        )
        (value_loss * dist.get_world_size()).backward()
        loss, metrics = ppo.compute_loss(
            new_logprobs=ppo.compute_logprobs(model, batch, args)[0],
            old_logprobs=batch.old_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            response_mask=batch.response_mask,
            weights=weights,
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=3.0,
            tis_cap=2.0,
        )
        (loss * dist.get_world_size()).backward()
        for name, value in (metrics | value_metrics | {"total": loss + value_loss}).items():
            sums[name] = sums.get(name, 0.0) + value.item()
    return {
        "advantages": gather([sample.advantages for sample in mine]),
        "returns": gather([sample.returns for sample in mine]),
        "values": gather([sample.values for sample in mine]),
        "scores": gather([torch.tensor(sample.reward) for sample in everything]),
        "sums": launch.all_reduce_sums(sums, device),
        "micro_batches": len(micro_batches),
        "policy": gradients(model),
        "critic": gradients(critic),
    }


def main() -> None:
    folder, out = map(Path, sys.argv[1:3])
    launch.init_distributed(get_device())
    for name, changes in VARIANTS.items():
        result = credit_and_gradients(folder, changes)
        if dist.get_rank() == 0:
            torch.save(result, out / f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
