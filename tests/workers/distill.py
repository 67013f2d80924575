"""Started by tests/test_distill_gradients.py under torchrun: distillation's loss and its gradient, cut in several ways.

    distill.py STUDENT_FOLDER TEACHER_FOLDER OUT

All ranks together hold the same 6 samples. OUT/<variant>.pt gets the loss and all gradients.
"""

import dataclasses
import sys
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from common import launch
from common.data import Prompt
from common.device import get_device

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the scripts are no installed package
from algos import distill  # noqa: E402

ARGS = distill.Args(dtype="fp32", temperature=0.8, max_response_length=24, micro_batch_tokens=60, logits_chunk_rows=5)
VARIANTS = {
    "reverse-kl": {},
    "one_micro_batch": {"micro_batch_tokens": 100_000, "logits_chunk_rows": 1024},
    "jsd": {"divergence": "jsd", "jsd_beta": 0.3, "divergence_top_k": 7},
    "policy_gradient": {"policy_gradient": True},
}


def make_samples() -> list[distill.Sample]:
    """6 samples of odd lengths; the first response is a single token, and two prompts are the same."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for i in range(6):
        length = int(torch.randint(2, 20, (1,), generator=generator)) if i else 1
        prompt = [7, 8, 9] if i in (2, 3) else torch.randint(6, 100, (3 + i % 4,), generator=generator).tolist()
        samples.append(
            distill.Sample(
                prompt=Prompt(i, prompt, "x", "", {}, "rule", []),
                response_ids=torch.randint(6, 100, (length,), generator=generator).tolist(),
                rollout_logprobs=(-5 * torch.rand(length, generator=generator)).tolist(),
            )
        )
    return samples


def loss_and_gradients(student: Path, teacher_folder: Path, args: distill.Args) -> dict:
    device, world_size = get_device(), dist.get_world_size()
    model = distill.shard_model(student, args, device, trainable=True)
    teacher = distill.shard_model(teacher_folder, args, device, trainable=False)
    for module, method in ((model, distill.token_comparisons), (teacher, distill.token_hidden)):
        setattr(module, method.__name__, MethodType(method, module))
        fsdp.register_fsdp_forward_method(module, method.__name__)
    mine = make_samples()
    if world_size == 2:  # rank 0 takes 5 of the 6, so that the ranks have different numbers of micro-batches
        mine = mine[:5] if dist.get_rank() == 0 else mine[5:]
    num_tokens = launch.all_reduce_sums({"tokens": sum(len(s.response_ids) for s in mine)}, device)["tokens"]
    total = 0.0
    for micro_batch in distill.make_micro_batches(model, mine, args.micro_batch_tokens, device):
        batch = distill.collate(micro_batch, device)
        compared = distill.compare_models(model, teacher, batch, args)
        for name in ("entropy", "agreement"):
            compared.pop(name)
        loss, _ = distill.compute_loss(
            **compared, rollout_logprobs=batch.rollout_logprobs, response_mask=batch.response_mask,
            weights=batch.response_mask / num_tokens, policy_gradient=args.policy_gradient, tis_cap=args.tis_cap,
        )  # fmt: skip
        (loss * world_size).backward()
        total += loss.item()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad) for name, p in model.named_parameters()
    }
    return {"loss": launch.all_reduce_sums({"loss": total}, device)["loss"], "gradients": gradients}


def main() -> None:
    student, teacher, out = map(Path, sys.argv[1:4])
    launch.init_distributed(get_device())
    for name, changes in VARIANTS.items():
        result = loss_and_gradients(student, teacher, dataclasses.replace(ARGS, **changes))
        if dist.get_rank() == 0:
            torch.save(result, out / f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
