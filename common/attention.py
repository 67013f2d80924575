"""Causal attention of segments on a CPU, by plain batched matrix products, which is what a CPU is fast at."""

from collections.abc import Iterator
from typing import Any

import torch

MAX_SCORES = 2**21
"""Scores that are in memory at a time: few enough to be in the processor's cache still when they are used."""

MIN_QUERIES = 16
"""Queries of a segment whose scores are computed together, however many keys they see."""


class SegmentAttention(torch.autograd.Function):
    """softmax(query @ key.T * scale) @ value over the keys that a query sees, a part of the queries at a time.

    Backward computes the scores of a part again, so that none are kept (Dao et al. 2022, "FlashAttention", arXiv
    2205.14135, section 3.1). Keys that no query of a part sees are left out. Scores and probabilities are in the
    query's dtype, as in transformers' eager attention; the softmax and the gradients of keys add up in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor,
        num_before: torch.Tensor, window: int | None, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """query (S, heads, Q, D), key and value (S, kv heads, K, D) -> (S, heads, Q, D).

        mask (S, 1, Q, K) is added to the scores: 0, or minus infinity where query i of segment s does not see a key.
        It never sees those after num_before[s] + i nor, with a window, those that are not among the last `window` up
        to there. num_before is (S,). Gradients flow to query, key and value.
        """
        query = query.unflatten(1, (key.shape[1], -1)).contiguous()  # (S, kv heads, heads that share it, Q, D)
        output = torch.empty_like(query)
        ctx.parts, ctx.scale = list(parts(mask, query.shape[1] * query.shape[2], num_before, window)), scale
        for rows, queries, keys in ctx.parts:
            part = query[rows, :, :, queries]
            probs = attention_weights(part, key[rows, :, keys], mask[rows, :, queries, keys], scale)
            output[rows, :, :, queries] = (probs @ value[rows, :, keys]).view(part.shape)
        ctx.save_for_backward(query, key, value, mask)
        return output.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, mask = ctx.saved_tensors
        grad = grad.reshape(query.shape)
        grad_query = torch.empty_like(query)
        precise = torch.promote_types(key.dtype, torch.float32)
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=precise) for tensor in (key, value))
        for rows, queries, keys in ctx.parts:
            part, part_key = query[rows, :, :, queries], key[rows, :, keys]
            part_grad = grad[rows, :, :, queries].flatten(2, 3)
            probs = attention_weights(part, part_key, mask[rows, :, queries, keys], ctx.scale)
            grad_probs = part_grad @ value[rows, :, keys].mT
            # p (d loss / d p - sum over keys of p d loss / d p) is d loss / d score
            grad_scores = torch.ops.aten._softmax_backward_data(grad_probs, probs, -1, probs.dtype).mul_(ctx.scale)
            grad_query[rows, :, :, queries] = (grad_scores @ part_key).view(part.shape)
            grad_key[rows, :, keys] += grad_scores.mT @ part.flatten(2, 3)
            grad_value[rows, :, keys] += probs.mT @ part_grad
        return grad_query.flatten(1, 2), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None, None


def parts(
    mask: torch.Tensor, heads: int, num_before: torch.Tensor, window: int | None
) -> Iterator[tuple[slice, slice, slice]]:
    """Segments, queries and keys of parts with about MAX_SCORES scores; no other key is seen by one of the queries."""
    segments, _, num_queries, num_keys = mask.shape
    queries = min(num_queries, max(MIN_QUERIES, MAX_SCORES // (heads * num_keys)))
    rows = max(1, MAX_SCORES // (heads * num_keys * queries))
    least, most = int(num_before.min()), int(num_before.max())
    for row in range(0, segments, rows):
        for first in range(0, num_queries, queries):
            last = min(first + queries, num_queries)
            first_key = 0 if window is None else max(0, least + first - window + 1)
            yield slice(row, row + rows), slice(first, last), slice(first_key, most + last)


def attention_weights(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Query (s, kv heads, g, q, D), key (s, kv heads, k, D), mask (s, 1, q, k) -> softmax (s, kv heads, g x q, k)."""
    scores = query.flatten(2, 3) @ key.mT
    scores.unflatten(2, query.shape[2:4]).mul_(scale).add_(mask[:, :, None])
    return scores.softmax(-1)
