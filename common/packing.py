"""Sequences without padding, and the prompt of a group only once: less work in a forward pass, with the same result.

A causal model's keys and values of a prompt do not depend on what follows it, so the responses of a group can share
their prompt: its tokens go through the model once instead of once for each response. And since all of a transformer but
its attention treats tokens one by one, tokens of different sequences can stand side by side in one row.

    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_for(config, device, dtype))
    layout = layout_of(samples)                                                # on the host, from lengths alone
    hidden = hidden_at(model.get_decoder(), input_ids, layout, rows, columns)  # (N, H), as without a layout

`PACKED_ATTENTION` takes apart what the row holds. Models that are not known to allow it go on with padded sequences.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.attention import SegmentAttention
from common.device import Device, get_device

PACKED_ATTENTION = "solorl_packed"
"""Value of `attn_implementation` for models that are called with packed rows."""

PACKED_MODELS = (
    "gemma", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
"""Model types whose packed rows give what padded ones give, as tests/test_packing.py finds. Others may have more than
attention between tokens (state space models, convolutions), or attention with more to it (sinks, soft caps)."""

SIMILAR = 0.75
"""Segments whose shortest is at least this share of the longest are padded to one length in attention."""


@dataclass(frozen=True)
class Bucket:
    """Segments of similar length, padded for attention: S segments of at most Q tokens that look at K tokens."""

    queries: torch.Tensor  # (S, Q) place of each query in the row; padding points at some token
    keys: torch.Tensor  # (S, K) places of the prompt's tokens and then the segment's own; padding likewise
    prompt_lengths: torch.Tensor  # (S,) tokens that a segment sees before its own
    masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)  # once for all layers

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores, (S, 1, Q, K): 0 where a query sees a key, else minus infinity."""
        if (window, dtype) not in self.masks:
            self.masks[window, dtype] = self._make_mask(window, dtype)
        return self.masks[window, dtype]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        places = torch.arange(max(self.queries.shape[1], self.keys.shape[1]), device=self.queries.device)
        queries = self.prompt_lengths[:, None] + places[: self.queries.shape[1]]  # (S, Q) place in the sequence
        queries = queries.clamp(max=self.keys.shape[1] - 1)  # padding too sees a key, or its softmax were no number
        distances = queries[:, :, None] - places[: self.keys.shape[1]]  # negative: the key comes later
        is_seen = distances >= 0
        if window is not None:
            is_seen &= distances < window
        return torch.zeros(is_seen.shape, dtype=dtype, device=places.device).masked_fill_(~is_seen, -torch.inf)[:, None]


@dataclass(frozen=True)
class Layout:
    """How b padded sequences of at most L tokens become a row of N tokens, and which of these see each other.

    The row's segments are prompts, and responses that see their prompt too.
    """

    tokens: torch.Tensor  # (N,) place of each of the row's tokens in the flattened (b, L)
    position_ids: torch.Tensor  # (1, N) its place in its own sequence
    unpack: torch.Tensor  # (b, L) place in the row of each padded position; of padding, any
    buckets: tuple[Bucket, ...]
    restore: torch.Tensor  # (N,) place of each of the row's tokens among the buckets' queries, one bucket after another
    seen: torch.Tensor  # (M,) places of what each segment sees, segment after segment
    query_starts: torch.Tensor  # (segments + 1,) int32, where each segment begins in the row
    seen_starts: torch.Tensor  # (segments + 1,) int32, where what it sees begins in `seen`
    max_queries: int
    max_seen: int

    def to(self, device: Device) -> "Layout":
        """The layout on a device. On an accelerator without the buckets: its kernels need none."""
        if not device.is_accelerator:
            return self
        tensors = {name: device.send(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, buckets=(), **tensors)


@dataclass
class Segment:
    """A prompt or a response in the row: its tokens and those it sees, as places in the row."""

    start: int
    length: int
    prompt_start: int = 0
    prompt_length: int = 0

    @property
    def num_seen(self) -> int:
        return self.prompt_length + self.length

    def seen(self) -> torch.Tensor:
        prompt = torch.arange(self.prompt_start, self.prompt_start + self.prompt_length)
        return torch.cat([prompt, torch.arange(self.start, self.start + self.length)])


def make_layout(prompt_lengths: Sequence[int], lengths: Sequence[int], keys: Sequence[Hashable]) -> Layout:
    """Layout of sequences that are padded on the right: prompts of 0 or more tokens, responses of 1 or more.

    `lengths` are those of prompt and response together. Sequences with the same key have the same prompt, which then
    is in the row once.
    """
    width, prompts = max(lengths), {}
    segments: list[Segment] = []
    tokens, positions, unpack = [], [], torch.zeros(len(lengths), width, dtype=torch.int64)
    place = 0
    for row, (prompt_length, length, key) in enumerate(zip(prompt_lengths, lengths, keys, strict=True)):
        if key not in prompts:
            prompts[key] = place
            if prompt_length:
                segments.append(Segment(place, prompt_length))
            tokens.append(torch.arange(prompt_length) + row * width)
            positions.append(torch.arange(prompt_length))
            place += prompt_length
        segments.append(Segment(place, length - prompt_length, prompts[key], prompt_length))
        tokens.append(torch.arange(prompt_length, length) + row * width)
        positions.append(torch.arange(prompt_length, length))
        place += length - prompt_length
        unpack[row, :length] = segments[-1].seen()

    buckets, restore = make_buckets(segments)
    counts = torch.tensor([[segment.length, segment.num_seen] for segment in segments])
    starts = F.pad(counts.cumsum(0), (0, 0, 1, 0)).to(torch.int32)
    return Layout(
        tokens=torch.cat(tokens),
        position_ids=torch.cat(positions)[None],
        unpack=unpack,
        buckets=buckets,
        restore=restore,
        seen=torch.cat([segment.seen() for segment in segments]),
        query_starts=starts[:, 0].contiguous(),
        seen_starts=starts[:, 1].contiguous(),
        max_queries=int(counts[:, 0].max()),
        max_seen=int(counts[:, 1].max()),
    )


def make_buckets(segments: Sequence[Segment]) -> tuple[tuple[Bucket, ...], torch.Tensor]:
    """Segments of similar size put together, and the place of each of the row's tokens among the buckets' queries."""
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda segment: (-segment.num_seen, -segment.length)):
        longest = groups[-1][0] if groups else None
        fits = longest is not None and (
            SIMILAR * longest.num_seen <= segment.num_seen
            and SIMILAR * longest.length <= segment.length <= longest.length / SIMILAR
        )
        if not fits:
            groups.append([])
        groups[-1].append(segment)

    buckets, restore, place = [], torch.zeros(sum(segment.length for segment in segments), dtype=torch.int64), 0
    for group in groups:
        num_queries, num_seen = max(segment.length for segment in group), max(segment.num_seen for segment in group)
        queries = torch.zeros(len(group), num_queries, dtype=torch.int64)
        seen = torch.zeros(len(group), num_seen, dtype=torch.int64)
        for row, segment in enumerate(group):
            own = slice(segment.start, segment.start + segment.length)
            queries[row, : segment.length] = torch.arange(own.start, own.stop)
            restore[own] = torch.arange(segment.length) + place + row * num_queries
            seen[row, : segment.num_seen] = segment.seen()
        buckets.append(Bucket(queries, seen, torch.tensor([segment.prompt_length for segment in group])))
        place += queries.numel()
    return tuple(buckets), restore


def split(samples: Sequence[Any], max_tokens: int, *, is_packed: bool) -> list[list[Any]]:
    """Micro-batches of at most `max_tokens` tokens, or of one sample with more.

    Packed, they keep the order, and a prompt counts once for neighbours that share it. Padded, every row counts as
    long as the longest, and the longest come first, so that those of a micro-batch are of similar length.

    samples: with `num_tokens`, and a `prompt` unless nothing is shared
    """
    micro_batches: list[list[Any]] = []
    tokens = 0
    for sample in samples if is_packed else sorted(samples, key=lambda sample: -sample.num_tokens):
        tokens += sample.num_tokens if is_packed or not micro_batches else micro_batches[-1][0].num_tokens
        prompt = getattr(sample, "prompt", None) if is_packed else None
        if prompt is not None and micro_batches and micro_batches[-1][-1].prompt is prompt:
            tokens -= len(prompt.prompt_ids)
        if not micro_batches or tokens > max_tokens:
            micro_batches.append([])
            tokens = sample.num_tokens
        micro_batches[-1].append(sample)
    return micro_batches


def layout_of(samples: Sequence[Any]) -> Layout:
    """The layout of samples as in `split`, padded in this order; those with one and the same `prompt` share it."""
    prompts = [sample.prompt for sample in samples]
    lengths = [sample.num_tokens for sample in samples]
    return make_layout([len(prompt.prompt_ids) for prompt in prompts], lengths, [id(prompt) for prompt in prompts])


def hidden_at(
    decoder: nn.Module, input_ids: torch.Tensor, layout: Layout | None, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Last hidden states of the tokens at (rows, columns), (N, H), of sequences padded on the right, (b, L).

    Without a layout, or for a model that `attention_for` gave another attention, the sequences go through it padded.
    Attention is causal, so real tokens never see what is on their right: no attention mask is needed.
    """
    if layout is None or not is_packed(decoder):
        return decoder(input_ids=input_ids, use_cache=False).last_hidden_state[rows, columns]
    row = input_ids.flatten()[layout.tokens][None]  # (1, M)
    output = decoder(input_ids=row, position_ids=layout.position_ids, layout=layout, use_cache=False)
    return output.last_hidden_state[0][layout.unpack[rows, columns]]


# -- attention --------------------------------------------------------------------------------------------------------


def attention_for(config: PretrainedConfig, device: Device, dtype: torch.dtype) -> str:
    """The `attn_implementation` of a model: `PACKED_ATTENTION` for the kinds that were tried, else the device's own.

    On accelerators it takes a kernel for sequences of different lengths: torch's masked attention there would store
    every score.
    """
    is_fast = not device.is_accelerator or device.varlen_kernel(dtype) is not None
    if config.model_type in PACKED_MODELS and is_fast:
        return PACKED_ATTENTION
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    takes_flash = model_class is None or model_class._supports_flash_attn
    return device.attn_implementation(dtype) if takes_flash else "sdpa"


def is_packed(model: nn.Module) -> bool:
    """Whether the model takes packed rows."""
    return model.config._attn_implementation == PACKED_ATTENTION


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within a row's segments: query (1, heads, N, D), key and value (1, kv heads, N, D) -> (1, N, heads, D).

    By a kernel for sequences of different lengths where the device has one; on a CPU the segments are padded in buckets
    of similar size. Without a layout: causal attention, sequences padded on the right.
    """
    if layout is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window
        )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, heads, D)
    attend = varlen_attention(query.dtype)
    if attend is not None:
        starts = layout.query_starts, layout.seen_starts, layout.max_queries, layout.max_seen
        seen = key[layout.seen], value[layout.seen]
        return attend(query, *seen, *starts, scale=scaling, window=sliding_window)[None], None
    parts = []
    for bucket in layout.buckets:
        attended = SegmentAttention.apply(
            query[bucket.queries].transpose(1, 2),  # (S, heads, Q, D)
            key[bucket.keys].transpose(1, 2),
            value[bucket.keys].transpose(1, 2),
            bucket.mask(sliding_window, query.dtype),
            bucket.prompt_lengths,
            sliding_window,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
        )
        parts.append(attended.transpose(1, 2).flatten(0, 1))  # (S x Q, heads, D)
    return torch.cat(parts)[layout.restore][None], None


@functools.cache
def varlen_attention(dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """This device's attention for sequences of different lengths: flash-attn's, torch's copy of it, or none.

    It is called with query (N, heads, D), key and value of what each segment sees (M, kv heads, D), where the segments
    begin in both, and their largest lengths; `window` counts a query's own key. Both kernels align the causal mask at
    the last key, so a response sees all of its prompt.
    """
    return {"flash-attn": _by_flash_attn, "torch": _by_torch, None: None}[get_device().varlen_kernel(dtype)]


def _by_flash_attn(*tensors_and_lengths: Any, scale: float | None, window: int | None) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    sides = (-1, -1) if window is None else (window - 1, 0)
    return flash_attn_varlen_func(*tensors_and_lengths, softmax_scale=scale, causal=True, window_size=sides)


def _by_torch(*tensors_and_lengths: Any, scale: float | None, window: int | None) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    sides = (-1, 0) if window is None else (window - 1, 0)  # (-1, 0) is its way to say causal
    return varlen_attn(*tensors_and_lengths, scale=scale, window_size=sides, enable_gqa=True)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
