"""Started by tests/test_reliability.py under torchrun on two ranks: updates in which one rank's numbers are not finite.

    bad_numbers.py --out OUT.json

For each case OUT tells whether weights and moments moved on any rank, what `apply` returned on each rank, and what was
said and logged. No model of language: a linear layer sharded as the scripts shard theirs.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

from common import launch, optim
from common.data import Prompt
from common.device import get_device


@dataclass
class Args:
    out: Path


@dataclass
class Sample:
    prompt: Prompt
    reward: float = 0.5
    response_ids: list[int] = field(default_factory=lambda: [7, 8])
    rollout_logprobs: list[float] = field(default_factory=lambda: [-1.0, -2.0])
    old_logprobs: torch.Tensor | None = None
    text: str = "a response"


@dataclass
class Case:
    name: str
    rank: int | None = None
    """Where it happens; None: nowhere."""
    loss: float = 1.0
    """Factor of the loss."""
    gradient: float = 1.0
    """Value put into the gradient of one rank's own weights."""
    reward: float = 0.5
    output: float = 0.0
    """Added to the model's output for the second sample."""


CASES = [
    Case("good"),
    Case("loss NaN", rank=1, loss=math.nan),
    Case("good again", rank=0),
    Case("loss infinite", rank=0, loss=math.inf),
    Case("gradient NaN", rank=1, gradient=math.nan),
    Case("good in between", rank=0),
    Case("reward NaN", rank=1, reward=math.nan),
    Case("reward infinite", rank=0, reward=math.inf),
    Case("output NaN", rank=1, output=math.nan),
]


def main(args: Args) -> None:
    device = get_device()
    rank, _ = launch.init_distributed(device)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)  # a row for each rank
    fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    said: list[str] = []
    logged: list[dict] = []
    tracker = SimpleNamespace(note=said.append, log_samples=lambda step, rows: logged.extend(rows))
    settings = SimpleNamespace(max_grad_norm=1.0, max_bad_updates=3)
    state: dict = {"step": 0}
    updates = optim.Updates(settings, tracker=tracker, state=state)

    def snapshot() -> list[torch.Tensor]:
        moments = [value.clone() for values in optimizer.state.values() for value in values.values()]
        return [*(p.detach().to_local().clone() for p in model.parameters()), *moments]

    results = []
    for step, case in enumerate(CASES, start=1):
        said.clear()
        logged.clear()
        before = snapshot()
        hit = rank == case.rank
        samples = [Sample(Prompt(10 * rank + i, [1], "x", "", {}, "rule", [])) for i in range(2)]
        samples[1].reward = case.reward if hit else 0.5
        output = model(torch.ones(2, 4) * (step + rank))
        output = output + torch.tensor([[0.0], [case.output if hit else 0.0]])
        loss = output.square().mean() * (case.loss if hit else 1.0)
        updates.watch(samples, loss, output)
        updates.watch([], loss * 0, output)  # as for a rank with fewer micro-batches than another
        loss.backward()
        if hit and case.gradient != 1.0:
            with torch.no_grad():
                model.weight.grad.to_local().fill_(case.gradient)
        error = None
        try:
            norm = updates.apply(model, optimizer, lr=0.1, step=step)
        except RuntimeError as caught:
            norm, error = math.nan, str(caught)
        after = snapshot()
        mine = {
            "norm": norm if math.isfinite(norm) else None,
            "moved": len(before) != len(after) or any(not a.equal(b) for a, b in zip(before, after, strict=True)),
            "finite": all(bool(value.isfinite().all()) for value in after),
            "error": error,
        }
        everyone: list[dict] = [{}, {}]
        dist.all_gather_object(everyone, mine)
        result = {"name": case.name, "ranks": everyone, "said": list(said), "logged": list(logged)}
        results.append(result | {"counts": dict(state)})
    if rank == 0:
        args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    launch.launch(main, Args)
