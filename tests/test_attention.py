"""Attention of segments by plain products: torch's own attention in float64, however it is cut into parts."""

import pytest
import torch
from torch.nn import functional as F

from common import attention
from common.attention import SegmentAttention

HEADS, KV_HEADS, SIZE = 6, 2, 8
SCALE = SIZE**-0.5
NUM_BEFORE = torch.tensor([5, 3, 0])
NUM_QUERIES = 20
NUM_KEYS = 25


def make_mask(window: int | None) -> torch.Tensor:
    """(S, 1, Q, K), written down one query at a time."""
    mask = torch.full((len(NUM_BEFORE), 1, NUM_QUERIES, NUM_KEYS), -torch.inf, dtype=torch.float64)
    for segment, before in enumerate(NUM_BEFORE.tolist()):
        for query in range(NUM_QUERIES):
            last = before + query
            first = 0 if window is None else max(0, last - window + 1)
            mask[segment, 0, query, first : last + 1] = 0.0
    return mask


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value, with gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(len(NUM_BEFORE), heads, tokens, SIZE, generator=generator, dtype=torch.float64).to(dtype)

    inputs = [draw(HEADS, NUM_QUERIES), draw(KV_HEADS, NUM_KEYS), draw(KV_HEADS, NUM_KEYS)]
    return [*(tensor.requires_grad_() for tensor in inputs), draw(HEADS, NUM_QUERIES)]


def by_torch(window: int | None, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Output and gradients of torch's attention."""
    query, key, value, grad = tensors(dtype)
    mask = make_mask(window).to(dtype)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=SCALE, enable_gqa=True)
    return [output, *torch.autograd.grad(output, (query, key, value), grad)]


def by_products(window: int | None, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    query, key, value, grad = tensors(dtype)
    mask = make_mask(window).to(dtype)
    output = SegmentAttention.apply(query, key, value, mask, NUM_BEFORE, window, SCALE)
    return [output, *torch.autograd.grad(output, (query, key, value), grad)]


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("max_scores", [2**21, 2 * HEADS * NUM_KEYS * NUM_QUERIES, 7 * HEADS * NUM_KEYS, 1])
def test_output_and_gradients_are_torchs(window: int | None, max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one part, two segments at a time, seven queries of one segment at a time, and three."""
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    monkeypatch.setattr(attention, "MIN_QUERIES", 3)
    for ours, theirs in zip(by_products(window), by_torch(window), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_parts_cover_every_query_once_and_leave_out_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_QUERIES", 8)
    monkeypatch.setattr(attention, "MAX_SCORES", 1)
    found = list(attention.parts(make_mask(None)[:1], HEADS, NUM_BEFORE[:1], window=None))
    assert found == [
        (slice(0, 1), slice(0, 8), slice(0, 13)),
        (slice(0, 1), slice(8, 16), slice(0, 21)),
        (slice(0, 1), slice(16, 20), slice(0, 25)),
    ]
    found = list(attention.parts(make_mask(4)[:1], HEADS, NUM_BEFORE[:1], window=4))
    assert [keys for _, _, keys in found] == [slice(2, 13), slice(10, 21), slice(18, 25)]


def test_no_scores_are_kept_for_backward() -> None:
    query, key, value, _ = tensors(torch.float64)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    mask = make_mask(None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        SegmentAttention.apply(query, key, value, mask, NUM_BEFORE, None, SCALE)
    assert sum(tensor.numel() for tensor in kept) == sum(map(torch.numel, (query, key, value, mask)))


def test_bf16_is_as_near_to_the_truth_as_eager_attention() -> None:
    """Eager attention of transformers: scores in bf16, softmax in fp32 and back, products in bf16."""
    query, key, value, grad = tensors(torch.bfloat16)
    keys, values = (tensor.repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in (key, value))
    scores = query @ keys.mT * SCALE + make_mask(None).to(torch.bfloat16)
    output = torch.softmax(scores, dim=-1, dtype=torch.float32).to(torch.bfloat16) @ values
    eager = [output, *torch.autograd.grad(output, (query, key, value), grad)]
    for ours, theirs, truth in zip(by_products(None, torch.bfloat16), eager, by_torch(None), strict=True):
        assert (ours - truth).norm() <= 1.1 * (theirs - truth).norm()
        assert (ours - truth).norm() <= 0.02 * truth.norm()
