"""One optimizer update: the learning rate's course, the clipped gradient, and the refusal to step on a bad one."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

ROWS_SHOWN = 8
"""Rows at fault that each rank writes down for a skipped update."""


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


class Updates:
    """Applies updates, but skips one whose loss, gradient or reward is NaN or infinite, on all ranks alike.

    Weights and moments then stay as they are. The rows at fault are named on the console and written to samples.jsonl;
    after --max-bad-updates skipped updates in a row the run ends. The counts are part of `state`, the saved state of
    the run, so a resumed run goes on counting.

        updates.watch(micro_batch, loss, new_logprobs)  # for every micro-batch of the update
        grad_norm = updates.apply(model, optimizer, lr=lr, step=step)
    """

    def __init__(self, args: Any, *, tracker: Any, state: dict[str, Any]) -> None:
        self.max_grad_norm = args.max_grad_norm
        self.limit = args.max_bad_updates
        self.tracker = tracker
        self.state = state
        self._watched: list[tuple[Sequence[Any], torch.Tensor, torch.Tensor]] = []
        for count in ("bad_updates", "bad_updates_in_a_row"):
            state.setdefault(count, 0)

    @property
    def bad(self) -> int:
        """How many updates of this run were skipped."""
        return self.state["bad_updates"]

    def watch(self, samples: Sequence[Any], loss: torch.Tensor, numbers: torch.Tensor) -> None:
        """Remember a micro-batch, its loss and numbers (b, ...) that its samples gave, in their order.

        Nothing is read before `apply`, so that the accelerator never waits.
        """
        self._watched.append((samples, loss.detach(), numbers.detach().flatten(1).sum(dim=1)))

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, lr: float, step: int) -> float:
        """Clip the gradient and step, unless something is not finite. Returns the norm before clipping. A collective.

        The norm is the same on all ranks; it is NaN when the loss or a reward was not finite on any of them.
        Raises RuntimeError, on all ranks, after too many skipped updates in a row.
        """
        watched, self._watched = self._watched, []
        for group in optimizer.param_groups:
            group["lr"] = lr
        rewards = [getattr(sample, "reward", 0.0) for samples, _, _ in watched for sample in samples]
        is_finite = all(math.isfinite(number) for number in rewards)
        if watched:
            is_finite = is_finite and bool(torch.stack([loss for _, loss, _ in watched]).isfinite().all())
        everywhere = torch.tensor(float(is_finite), device=next(model.parameters()).device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        grad_norm = clip_gradients(model, self.max_grad_norm) if everywhere > 0 else math.nan
        if math.isfinite(grad_norm):
            optimizer.step()
            self.state["bad_updates_in_a_row"] = 0
        optimizer.zero_grad()
        if not math.isfinite(grad_norm):
            what = f"gradient norm {grad_norm}" if everywhere > 0 else "a loss or reward is NaN or infinite"
            self._skip(what, watched, step)
        return grad_norm

    def _skip(self, what: str, watched: list[tuple[Sequence[Any], torch.Tensor, torch.Tensor]], step: int) -> None:
        """Count a skipped update, say which rows are at fault, and end the run when it is one too many."""
        self.state["bad_updates"] += 1
        self.state["bad_updates_in_a_row"] += 1
        in_a_row = self.state["bad_updates_in_a_row"]
        mine = [row for samples, _, numbers in watched for row in bad_rows(samples, numbers.tolist())]
        everyone: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine[:ROWS_SHOWN])
        rows = [row for rows in everyone for row in rows]
        rows.sort(key=lambda row: -len(row["bad"]))  # a NaN reward comes before the advantages that it spoils
        self.tracker.log_samples(step, rows)
        rows_said = "; ".join(f"row {row['row']} (rank {row['rank']}): {row['bad']}" for row in rows[:3])
        rows_said = f"{rows_said}; see samples.jsonl" if rows else "no row stands out, so it arose in the backward pass"
        self.tracker.note(f"warning: step {step}: update skipped, {what} ({in_a_row} in a row): {rows_said}")
        if in_a_row >= self.limit:
            raise RuntimeError(
                f"step {step}: {in_a_row} updates in a row were skipped (--max-bad-updates), the last one because of "
                f"this: {what}; {rows_said}"
            )


def bad_rows(samples: Sequence[Any], numbers: Sequence[float]) -> list[dict[str, Any]]:
    """The samples that hold a NaN or an infinity, or gave one (`numbers`, one each), as rows for samples.jsonl."""
    rows = []
    for sample, number in zip(samples, numbers, strict=False):  # an empty micro-batch has a number, but no sample
        fields = {
            name: torch.as_tensor(value, dtype=torch.float64)
            for name, value in vars(sample).items()
            if isinstance(value, float | torch.Tensor) or name.endswith("logprobs") and value is not None
        }
        bad = [name for name, values in fields.items() if not values.isfinite().all()]
        if not math.isfinite(number):
            bad.append("trainer's output")
        if bad:
            index = getattr(getattr(sample, "prompt", None), "index", None)
            ids = {name: value for name, value in vars(sample).items() if name.endswith("_ids")}
            row = {"bad": ", ".join(bad), "rank": dist.get_rank(), "row": index, "reward": None} | ids
            if math.isfinite(getattr(sample, "reward", math.nan)):
                row["reward"] = sample.reward
            rows.append(row | {"response": getattr(sample, "text", None)})
    return rows
