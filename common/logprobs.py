"""Log-probs of chosen tokens from hidden states, without ever holding the logits of all of them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CACHED_LOGITS = 2**21
"""On a CPU: logits that go through a softmax at a time, so few that the processor's cache holds them."""


class HeadLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ head.T / temperature) at the targets, with the logits of only a few rows in memory.

    Forward keeps one number a row, and the logits of the last chunk, for which there must be memory anyway; backward
    computes those of the other chunks again. Logits are in the dtype of hidden and head; all of softmax is fp32. Chunks
    share their memory: on a CPU, fresh memory costs a sixth of the product that fills it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float, chunk_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (N, H), head (V, H), targets (N,) -> log-probs (N,) and entropies (N,), fp32.

        Gradients flow from the log-probs to hidden and head; the entropies, in nats, have none.
        """
        logprobs, entropies, normalisers = [], [], []
        memory = hidden.new_empty(min(chunk_rows, len(hidden)), len(head))
        for rows, ids in zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True):
            logits = torch.mm(rows, head.T, out=memory[: len(rows)])  # (chunk, V)
            for part, part_ids in zip(*split_rows(logits, ids), strict=True):
                scaled = scaled_fp32(part, temperature)
                peak = scaled.amax(dim=1, keepdim=True)
                exps = scaled.sub_(peak).exp()  # softmax before it is divided by its sum
                total = exps.sum(dim=1)
                logprobs.append(scaled.gather(1, part_ids[:, None])[:, 0] - total.log())
                entropies.append(total.log() - exps.mul_(scaled).sum(dim=1) / total)
                normalisers.append(total.log() + peak[:, 0])
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            ctx.save_for_backward(hidden, head, targets, torch.cat(normalisers))
            ctx.memory = memory
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        """d logprob / d logits = (onehot(target) - softmax) / temperature."""
        hidden, head, targets, normalisers = ctx.saved_tensors
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        memory, ctx.memory = ctx.memory, None  # overwritten here: another backward computes all logits again
        last, *others = reversed(range(0, len(hidden), ctx.chunk_rows))
        kept = last if memory is not None else None
        if memory is None:
            memory = hidden.new_empty(min(ctx.chunk_rows, len(hidden)), len(head))
        for start in (last, *others):
            chunk = slice(start, start + ctx.chunk_rows)
            rows, logits = hidden[chunk], memory[: len(hidden[chunk])]
            if start != kept:
                torch.mm(rows, head.T, out=logits)
            of_rows = targets[chunk], normalisers[chunk], grad[chunk] / ctx.temperature
            for part, ids, normaliser, factor in zip(*split_rows(logits, *of_rows), strict=True):
                probs = scaled_fp32(part, ctx.temperature).sub_(normaliser[:, None]).exp_()
                part.copy_(probs.mul_(-factor[:, None]).scatter_add_(1, ids[:, None], factor[:, None]))
            torch.mm(logits, head, out=grad_hidden[chunk])  # by now `logits` holds their gradient
            grad_head.addmm_(logits.T, rows)
        return grad_hidden, grad_head, None, None, None


def split_rows(logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Each tensor's parts of as many rows as a CPU's cache holds logits of; on accelerators one part."""
    rows = max(1, CACHED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    return (tensor.split(rows) for tensor in (logits, *others))


def scaled_fp32(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / temperature, in new memory."""
    scaled = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
    return scaled if temperature == 1.0 else scaled.div_(temperature)


def compare_heads(
    compare: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, torch.Tensor]], *,
    hidden: tuple[torch.Tensor, torch.Tensor], heads: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor,
    temperature: float, chunk_rows: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """compare(logits, other_logits, targets) of two models at the same N tokens, with the logits of only a few rows.

    Each model's hidden states (N, H) and head (V, H) give its logits / temperature (n, V) of a chunk, in fp32; H and V
    may differ between them. targets is (N,). `compare` returns (n,) tensors by name; this function (N,), by the same
    names, and gradients flow wherever `compare` lets them. Forward keeps nothing of size V; backward computes each
    chunk again.
    """

    def compare_chunk(rows: torch.Tensor, other_rows: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, other_logits = ((r @ head.T).float() / temperature for r, head in zip((rows, other_rows), heads))
        return compare(logits, other_logits, ids)

    chunks = [
        checkpoint(compare_chunk, *parts, use_reentrant=False, preserve_rng_state=False)
        for parts in zip(*(rows.split(chunk_rows) for rows in (*hidden, targets)), strict=True)
    ]
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
