"""One optimizer update: the learning rate's course, the clipped gradient, and the refusal to step on a bad one."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def lr_factor(update: int, *, warmup: int, total: int, decay: str) -> float:
    """Learning rate of an update (counted from 0) as a share of its peak; `decay` reaches 0 at update `total`."""
    if update < warmup:
        return (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[decay]


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradient down to `max_norm`; returns its norm before, over all ranks. A collective."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def apply_update(model: nn.Module, optimizer: torch.optim.Optimizer, *, lr: float, max_grad_norm: float) -> float:
    """Clip the gradient and step, unless the gradient is NaN or infinite: then weights and moments stay as they are.

    Returns the gradient's norm before clipping. It is the same on all ranks, so all of them step or none does.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    grad_norm = clip_gradients(model, max_grad_norm)
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm


class BadUpdates:
    """Counts updates in a row whose gradient was NaN or infinite, and ends the run after `limit` of them."""

    def __init__(self, limit: int, *, note: Callable[[str], None]) -> None:
        self.limit = limit
        self.note = note
        self.in_a_row = 0
        self.total = 0

    def count(self, grad_norm: float, *, step: int) -> None:
        """Count one update: tells the console (`note`) when it was skipped, and raises when the limit is reached."""
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.total += 1
        self.note(f"warning: step {step}: gradient norm {grad_norm}, update skipped ({self.in_a_row} in a row)")
        if self.in_a_row >= self.limit:
            raise RuntimeError(
                f"step {step}: {self.in_a_row} updates in a row had a NaN or infinite gradient (--max-bad-updates)"
            )
