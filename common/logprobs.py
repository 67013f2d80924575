"""Log-probs of chosen tokens from hidden states, without ever holding the logits of all of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class HeadLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ head.T / temperature) at the targets, with the logits of only a few rows in memory.

    Forward keeps one number a row, and the softmax of the last chunk, for which there must be memory anyway; backward
    computes the logits of the other chunks again. All of softmax is fp32. Chunks share their memory: on a CPU, fresh
    memory costs a sixth of the product that fills it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float, chunk_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (N, H), head (V, H), targets (N,) -> log-probs (N,) and entropies (N,), fp32.

        Gradients flow from the log-probs to hidden and head; the entropies, in nats, have none.
        """
        logprobs, entropies, normalisers = [], [], []
        memory, exps = (
            hidden.new_empty(min(chunk_rows, len(hidden)), len(head), dtype=torch.float32) for _ in range(2)
        )
        for rows, ids in zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True):
            logits, weights = memory[: len(rows)], exps[: len(rows)]  # (chunk, V)
            scaled_logits(rows, head, temperature, out=logits)
            peak = logits.amax(dim=1, keepdim=True)
            torch.exp(logits.sub_(peak), out=weights)  # softmax before it is divided by its sum
            total = weights.sum(dim=1)
            logprobs.append(logits.gather(1, ids[:, None])[:, 0] - total.log())
            entropies.append(total.log() - torch.einsum("nv,nv->n", weights, logits) / total)
            normalisers.append(total.log() + peak[:, 0])
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            weights.div_(total[:, None])
            ctx.save_for_backward(hidden, head, targets, torch.cat(normalisers), exps)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        """d logprob / d logits = (onehot(target) - softmax) / temperature."""
        hidden, head, targets, normalisers, memory = ctx.saved_tensors
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        last, *others = reversed(range(0, len(hidden), ctx.chunk_rows))
        for start in (last, *others):
            chunk = slice(start, start + ctx.chunk_rows)
            scale = grad[chunk, None] / ctx.temperature
            probs = memory[: len(scale)]  # of the last chunk, as forward left them
            if start != last:
                logits = scaled_logits(hidden[chunk], head, ctx.temperature, out=probs)
                probs = logits.sub_(normalisers[chunk, None]).exp_()
            grad_logits = probs.mul_(-scale).scatter_add_(1, targets[chunk, None], scale).to(head.dtype)
            torch.mm(grad_logits, head, out=grad_hidden[chunk])
            grad_head.addmm_(grad_logits.T, hidden[chunk])
        return grad_hidden, grad_head, None, None, None


def scaled_logits(rows: torch.Tensor, head: torch.Tensor, temperature: float, *, out: torch.Tensor) -> torch.Tensor:
    """rows (n, H) @ head.T (H, V) / temperature, into `out` (n, V) fp32; the product is in the rows' dtype."""
    if rows.dtype == out.dtype:
        torch.mm(rows, head.T, out=out)
    else:
        out.copy_(rows @ head.T)
    return out if temperature == 1.0 else out.div_(temperature)


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
