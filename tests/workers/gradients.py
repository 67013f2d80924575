"""Started by tests/test_gradients.py under torchrun: one GRPO loss and its gradient, computed in several ways.

    gradients.py MODEL_FOLDER OUT

All ranks together hold the same 8 samples. OUT/<variant>.pt gets the loss, the metrics and all gradients.
"""

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from common import launch
from common.data import Prompt
from common.device import get_device

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the scripts are no installed package
from algos import grpo  # noqa: E402

VARIANTS = {
    "plain": {"micro_batch_tokens": 100_000},
    "one_sample": {"micro_batch_tokens": 30},
    "two_samples": {"micro_batch_tokens": 60},
    "delayed": {"micro_batch_tokens": 60, "delay_gradient_reduction": True},
    "checkpointing": {"micro_batch_tokens": 100_000, "gradient_checkpointing": True},
    "small_chunks": {"micro_batch_tokens": 100_000, "logits_chunk_rows": 3},
    "sequence_mean": {"micro_batch_tokens": 60, "loss_denominator": "sequence-mean"},
    "sequence_mean_plain": {"micro_batch_tokens": 100_000, "loss_denominator": "sequence-mean"},
    "constant": {"micro_batch_tokens": 60, "loss_denominator": "constant"},
    "constant_plain": {"micro_batch_tokens": 100_000, "loss_denominator": "constant"},
}


def make_samples() -> list[grpo.Sample]:
    """8 samples of odd lengths; the first response is a single token, and one advantage is 0."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for i in range(8):
        length = int(torch.randint(2, 20, (1,), generator=generator)) if i else 1
        prompt = torch.randint(6, 100, (3 + i % 4,), generator=generator).tolist()
        sample = grpo.Sample(
            prompt=Prompt(i, prompt, "x", "", {}, "rule", []),
            response_ids=torch.randint(6, 100, (length,), generator=generator).tolist(),
            rollout_logprobs=(-5 * torch.rand(length, generator=generator)).tolist(),
            text="",
            truncated=False,
            advantage=[1.0, -1.0, 0.5, 0.0][i % 4],
        )
        sample.old_logprobs = -5 * torch.rand(length, generator=generator)
        sample.ref_logprobs = -5 * torch.rand(length, generator=generator)
        samples.append(sample)
    return samples


def loss_and_gradients(folder: Path, changes: dict) -> dict:
    device = get_device()
    args = dataclasses.replace(grpo.Args(dtype="fp32", kl_coef=0.1, temperature=0.8, max_response_length=24), **changes)
    model = grpo.shard_model(folder, args, device, trainable=True)
    # Rank 0 takes 5 of the 8, so that the ranks have different numbers of micro-batches.
    mine = make_samples()
    if dist.get_world_size() == 2:
        mine = mine[:5] if dist.get_rank() == 0 else mine[5:]
    counts = launch.all_reduce_sums({"tokens": sum(len(s.response_ids) for s in mine), "sequences": len(mine)}, device)
    total, metric_sums = 0.0, {}
    micro_batches = grpo.make_micro_batches(model, mine, args.micro_batch_tokens, device)
    for i, micro_batch in enumerate(micro_batches):
        if args.delay_gradient_reduction:
            model.set_requires_gradient_sync(i == len(micro_batches) - 1)
        batch = grpo.collate(micro_batch, device)
        new_logprobs, _ = grpo.compute_logprobs(model, batch, args)
        loss, metrics = grpo.compute_loss(
            new_logprobs=new_logprobs,
            old_logprobs=new_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            ref_logprobs=batch.ref_logprobs,
            advantages=batch.advantages,
            response_mask=batch.response_mask,
            weights=grpo.token_weights(
                batch.response_mask,
                args.loss_denominator,
                num_tokens=counts["tokens"],
                num_sequences=counts["sequences"],
                max_length=args.max_response_length,
            ),
            clip_low=0.2,
            clip_high=0.2,
            kl_coef=args.kl_coef,
            kl_estimator="k3",
            tis_cap=2.0,
        )
        (loss * dist.get_world_size()).backward()
        total += loss.item()
        for name, value in metrics.items():  # an empty micro-batch has no kl_ref
            metric_sums[name] = metric_sums.get(name, 0.0) + value.item()
    sums = launch.all_reduce_sums(metric_sums | {"loss": total}, device)
    grads = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad) for name, p in model.named_parameters()
    }
    return {"sums": sums, "micro_batches": len(micro_batches), "grads": grads}


def main() -> None:
    folder, out = map(Path, sys.argv[1:3])
    launch.init_distributed(get_device())
    for name, changes in VARIANTS.items():
        result = loss_and_gradients(folder, changes)
        if dist.get_rank() == 0:
            torch.save(result, out / f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
