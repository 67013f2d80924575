"""Packed rows: a prompt goes through the model once for its group, with the log-probs and gradients of padded ones."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig

from common import packing
from common.data import Prompt

PROMPTS = [[5, 6, 7, 8], [5, 6, 7, 8], [9, 3], [9, 3], [9, 3]]
LENGTHS = (7, 3, 1, 12, 6)
"""Of the responses."""

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "qwen3, the embedded model's": lambda: AutoConfig.from_pretrained(TINY / "model"),
    "mistral, a window of 4 tokens": lambda: MistralConfig(**SIZES, sliding_window=4),
    **{kind: partial(AutoConfig.for_model, kind, **SIZES, pad_token_id=0) for kind in packing.PACKED_MODELS},
}


def models(name: str) -> tuple[nn.Module, nn.Module]:
    """The same random model twice: with torch's attention, and with that of packed rows."""
    torch.manual_seed(0)
    plain, packed = (
        AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation=attention)
        for attention in ("sdpa", packing.PACKED_ATTENTION)
    )
    packed.load_state_dict(plain.state_dict())
    return plain, packed


def batch(
    prompts: Sequence[list[int]] = PROMPTS, response_lengths: Sequence[int] = LENGTHS
) -> tuple[torch.Tensor, torch.Tensor, packing.Layout]:
    """Padded ids (b, L), the mask of real tokens (b, L), and the layout."""
    generator = torch.Generator().manual_seed(1)
    responses = [torch.randint(10, 50, (length,), generator=generator) for length in response_lengths]
    rows = [torch.cat([torch.tensor(prompt), response]) for prompt, response in zip(prompts, responses, strict=True)]
    lengths = [len(row) for row in rows]
    layout = packing.make_layout([len(prompt) for prompt in prompts], lengths, [tuple(prompt) for prompt in prompts])
    is_real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return pad_sequence(rows, batch_first=True), is_real, layout


def hidden_states(model: nn.Module, ids: torch.Tensor, layout: packing.Layout | None) -> torch.Tensor:
    """(b, L, H); in padded positions they mean nothing."""
    rows, columns = torch.meshgrid(torch.arange(ids.shape[0]), torch.arange(ids.shape[1]), indexing="ij")
    return packing.hidden_at(model.get_decoder(), ids, layout, rows, columns)


def largest_gap(
    plain: nn.Module, packed: nn.Module, layout: packing.Layout | None, *sizes: Sequence
) -> tuple[float, float]:
    """Largest difference of log-probs, and of gradients as a share of the largest of their parameter."""
    ids, is_real, _ = batch(*sizes)
    logprobs = []
    for model, its_layout in ((plain, None), (packed, layout)):
        hidden = hidden_states(model, ids, its_layout)
        every = model.get_output_embeddings()(hidden).log_softmax(dim=-1)[:, :-1]
        logprobs.append(every.gather(2, ids[:, 1:, None])[..., 0] * is_real[:, 1:])
        (logprobs[-1] * torch.linspace(-1, 1, logprobs[-1].numel()).view_as(logprobs[-1])).sum().backward()
    gradients = [
        float((a.grad - b.grad).abs().max() / a.grad.abs().max())
        for a, b in zip(plain.parameters(), packed.parameters(), strict=True)
    ]
    return float((logprobs[0] - logprobs[1]).detach().abs().max()), max(gradients)


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_gradients_are_those_of_padded_sequences(name: str) -> None:
    logprobs, gradients = largest_gap(*models(name), batch()[2])
    assert logprobs < 1e-5 and gradients < 1e-5


def test_a_model_for_packed_rows_also_takes_padded_ones() -> None:
    logprobs, gradients = largest_gap(*models("llama"), None)
    assert logprobs < 1e-6 and gradients < 1e-6


def test_a_prompt_is_in_the_row_once_for_its_key() -> None:
    _, is_real, layout = batch()
    assert len(layout.tokens) == 4 + 7 + 3 + 2 + 1 + 12 + 6
    apart = packing.make_layout([4] * 2, [5] * 2, ["a", "b"])
    assert len(apart.tokens) == 10
    assert layout.position_ids[0].tolist()[:14] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 4, 5, 6]


def test_sequences_without_a_prompt_see_themselves() -> None:
    plain, packed = models("llama")
    ids, is_real, _ = batch()
    layout = packing.make_layout([0] * len(ids), is_real.sum(dim=1).tolist(), range(len(ids)))
    assert len(layout.tokens) == is_real.sum()
    gap = (hidden_states(plain, ids, None) - hidden_states(packed, ids, layout))[is_real].abs().max()
    assert gap < 1e-5


@dataclass
class Sample:
    """What `split` looks at."""

    num_tokens: int
    prompt: Prompt | None = None


def token_counts(samples: list[Sample], max_tokens: int, *, is_packed: bool = True) -> list[list[int]]:
    parts = packing.split(samples, max_tokens, is_packed=is_packed)
    return [[sample.num_tokens for sample in part] for part in parts]


def test_a_micro_batch_counts_a_prompt_once_for_its_group() -> None:
    one, two = (Prompt(0, [7] * length, "", None, {}, "rule", []) for length in (4, 2))
    samples = [Sample(10, one), Sample(5, one), Sample(6, one), Sample(3, two), Sample(9, two)]
    # 10 + (5 - 4) + (6 - 4) = 13; then 3 + (9 - 2) = 10
    assert token_counts(samples, 13) == [[10, 5, 6], [3, 9]]
    # At 12 the third of the group comes with the prompt again: 6 + 3 = 9, and 9 + (9 - 2) = 16 is too much.
    assert token_counts(samples, 12) == [[10, 5], [6, 3], [9]]
    assert token_counts([], 12) == []
    assert token_counts([Sample(6)] * 5, 12) == [[6, 6], [6, 6], [6]]  # nothing is shared
    assert token_counts([Sample(3), Sample(20), Sample(3)], 12) == [[3], [20], [3]]  # what is too long goes alone


def test_a_micro_batch_of_padded_rows_counts_their_padding() -> None:
    prompt = Prompt(0, [7] * 2, "", None, {}, "rule", [])
    samples = [Sample(length, prompt) for length in (3, 10, 4, 6, 9)]
    # 2 rows of 10 are 20; a third would make 30. Then 3 rows of 6 are 18.
    assert token_counts(samples, 20, is_packed=False) == [[10, 9], [6, 4, 3]]
    assert token_counts(samples, 17, is_packed=False) == [[10], [9], [6, 4], [3]]
    assert token_counts(samples, 5, is_packed=False) == [[10], [9], [6], [4], [3]]
    assert token_counts([], 12, is_packed=False) == []


def test_every_padded_position_finds_its_token() -> None:
    ids, is_real, layout = batch()
    row = ids.flatten()[layout.tokens]
    assert torch.equal(row[layout.unpack][is_real], ids[is_real])


def test_segments_of_one_bucket_are_similar() -> None:
    lengths = [1000, 900, 800, 500, 60, 50, 10]
    buckets = packing.make_layout([5] * 7, [5 + length for length in lengths], range(7)).buckets
    padded = sum(bucket.queries.numel() for bucket in buckets)
    assert padded <= (sum(lengths) + 35) / packing.SIMILAR
    assert len(buckets) < 7


def test_a_response_changes_nothing_for_its_neighbours() -> None:
    """The responses of a group see their prompt and themselves, never each other."""
    _, model = models("llama")
    ids, is_real, layout = batch()
    before = hidden_states(model, ids, layout)
    ids[0, 4:] = 1
    after = hidden_states(model, ids, layout)
    assert torch.equal(before[1:][is_real[1:]], after[1:][is_real[1:]])
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.allclose(before[0, 4:][is_real[0, 4:]], after[0, 4:][is_real[0, 4:]])


# -- kernels for sequences of different lengths, by stubs with their meaning: causal, aligned at the last key ----------


def attend_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int,
    *, scale: float, window: int,
) -> torch.Tensor:  # fmt: skip
    """`window` counts the keys to the left of a query's own; -1: all."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    parts = []
    for first, last, start, end in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        assert last - first <= max_q and end - start <= max_k
        queries, keys, values = q[first:last], k[start:end], v[start:end]
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        distance = torch.arange(len(keys) - len(queries), len(keys))[:, None] - torch.arange(len(keys))
        hidden = (distance < 0) | ((distance > window) if window >= 0 else False)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(parts)


def flash_attn_varlen_func(
    *arguments: Any, softmax_scale: float, causal: bool, window_size: tuple[int, int]
) -> torch.Tensor:
    """flash-attn's: the mask is causal when it is told so, and (-1, -1) is no window."""
    assert causal and window_size[1] == (-1 if window_size[0] == -1 else 0)
    return attend_by_definition(*arguments, scale=softmax_scale, window=window_size[0])


def varlen_attn(*arguments: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> torch.Tensor:
    """torch's: nothing on the right is what makes it causal; fewer heads of keys must be announced."""
    assert window_size[1] == 0 and enable_gqa
    return attend_by_definition(*arguments, scale=scale, window=window_size[0])


@pytest.fixture(params=["flash-attn", "torch"])
def varlen_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    attend = {"flash-attn": packing._by_flash_attn, "torch": packing._by_torch}[request.param]
    monkeypatch.setattr(packing, "varlen_attention", lambda dtype: attend)


@pytest.mark.usefixtures("varlen_kernel")
@pytest.mark.parametrize("name", ["llama", "mistral, a window of 4 tokens"])
def test_kernels_for_different_lengths_get_the_same_layout(name: str) -> None:
    logprobs, gradients = largest_gap(*models(name), batch()[2])
    assert logprobs < 1e-5 and gradients < 1e-5


def test_torchs_own_kernel_takes_what_it_is_given() -> None:
    """The real function, with tensors that have shapes and no numbers: there is no such kernel on a CPU."""
    layout = batch()[2]
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(len(layout.restore), 6, 32, dtype=torch.bfloat16, requires_grad=True)
        key, value = (torch.empty(len(layout.seen), 2, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        for window in (None, 4):
            starts = layout.query_starts, layout.seen_starts, layout.max_queries, layout.max_seen
            out = packing._by_torch(query, key, value, *starts, scale=0.2, window=window)
            assert out.shape == query.shape and out.dtype == query.dtype and out.requires_grad


def test_kernel_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"flash-attn": packing._by_flash_attn, "torch": packing._by_torch, None: None}
    for name, expected in kernels.items():
        monkeypatch.setattr(packing, "get_device", lambda name=name: SimpleNamespace(varlen_kernel=lambda dtype: name))
        assert packing.varlen_attention.__wrapped__(torch.bfloat16) is expected


def test_an_accelerator_gets_no_buckets() -> None:
    """Its kernels need none, so that copying them would be for nothing."""
    layout = batch()[2]
    device = SimpleNamespace(is_accelerator=True, send=lambda tensor: tensor + 0)
    sent = layout.to(device)
    assert sent.buckets == () and sent.max_seen == layout.max_seen
    for name in ("tokens", "position_ids", "unpack", "seen", "query_starts", "seen_starts"):
        assert torch.equal(getattr(sent, name), getattr(layout, name))
        assert getattr(sent, name).dtype == getattr(layout, name).dtype
    assert layout.to(SimpleNamespace(is_accelerator=False)) is layout


def test_layers_share_one_mask() -> None:
    """Autograd keeps masks until the backward pass: one for each layer would be the largest thing in memory."""
    bucket = packing.make_layout([5] * 2, [9] * 2, ["a", "a"]).buckets[0]
    assert bucket.mask(None, torch.float32) is bucket.mask(None, torch.float32)
    assert bucket.mask(2, torch.float32).isinf().sum() > bucket.mask(None, torch.float32).isinf().sum()
    assert bucket.mask(None, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "is_accelerator", "kernel", "own", "chosen"),
    [
        ("qwen3", False, None, "sdpa", packing.PACKED_ATTENTION),
        ("qwen3", True, "flash-attn", "flash_attention_2", packing.PACKED_ATTENTION),
        ("qwen3", True, "torch", "sdpa", packing.PACKED_ATTENTION),
        ("qwen3", True, None, "sdpa", "sdpa"),  # as in fp32
        ("mamba", False, None, "sdpa", "sdpa"),
        ("qwen2_moe", True, "flash-attn", "flash_attention_2", "flash_attention_2"),
        ("bloom", True, "flash-attn", "flash_attention_2", "sdpa"),  # transformers has none for it
    ],
)
def test_models_and_devices_that_take_packed_rows(
    kind: str, is_accelerator: bool, kernel: str | None, own: str, chosen: str
) -> None:
    device = SimpleNamespace(
        is_accelerator=is_accelerator, varlen_kernel=lambda dtype: kernel, attn_implementation=lambda dtype: own
    )
    assert packing.attention_for(AutoConfig.for_model(kind), device, torch.bfloat16) == chosen


def test_a_model_with_another_attention_gets_padded_sequences() -> None:
    plain, _ = models("llama")
    ids, is_real, layout = batch()
    expected = hidden_states(plain, ids, None)
    assert torch.equal(hidden_states(plain, ids, layout)[is_real], expected[is_real])


def test_queries_that_pad_a_bucket_spoil_no_gradient() -> None:
    """The last of those beside the first response see, with a window, only keys beyond the last: no number at all."""
    sizes = [list(range(5, 15)), list(range(5, 9))], (12, 16)
    *_, layout = batch(*sizes)
    assert [bucket.keys.shape for bucket in layout.buckets][0] == (2, 22)
    assert layout.buckets[0].queries.shape == (2, 16)
    logprob_gap, gradient_gap = largest_gap(*models("mistral, a window of 4 tokens"), layout, *sizes)
    assert logprob_gap < 1e-5
    assert gradient_gap < 1e-5
