"""How much memory a run needs, by arithmetic: the size of the engine's KV cache, and the table of `--dry-run`.

Nothing is loaded: the model is built on the meta device, where a parameter is only a shape.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from common.checkpoint import resolve_model
from common.device import GIB, Device, get_device

DTYPE_BYTES = {"bf16": 2, "fp32": 4}

DEFAULT_BLOCK_SIZE = 128
"""Tokens of the engine's blocks on a CPU unless it is told; elsewhere they are no larger."""

FREE_MEMORY_SHARE = 0.5
"""At most this share of the memory that is free when the engine is built becomes KV cache."""


def kv_bytes_per_token(config: PretrainedConfig, dtype: str, *, tp: int = 1) -> int:
    """Bytes of keys and values that one token leaves in all layers, on each of `tp` ranks that share an engine.

    With more ranks than heads of keys each rank has one all the same.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * max(1, heads // tp) * head_dim * DTYPE_BYTES[dtype]


def kv_cache_bytes(folder: Path, args: Any, device: Device, *, ranks: int | None = None) -> int:
    """Bytes of KV cache for one rank's share of an engine: `--kv-cache-gib`, or what a step's sequences need.

    More would lie idle; with less the engine still works, running the sequences in turns. Two always fit. `ranks` is
    the number of ranks of the run (default: torchrun's); on a CPU those of a machine share its memory.
    """
    if args.kv_cache_gib is not None:
        return int(args.kv_cache_gib * GIB)
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    sizes, model = sizes_of(folder, args)
    block = device.engine_kwargs().get("block_size", DEFAULT_BLOCK_SIZE)
    prompts = args.prompts_per_step * args.rollout_tp // ranks
    # A prompt's full blocks are there once for its group, except the one with its last token, which is computed for
    # each response. Then whole blocks of a response, and one that is being filled.
    shared = (args.max_prompt_length - 1) // block
    own = math.ceil((args.max_prompt_length + args.max_response_length) / block) - shared + 1
    block_bytes = block * kv_bytes_per_token(model.config, args.dtype, tp=args.rollout_tp)
    needed = prompts * (shared + args.group_size * own) * block_bytes
    sharing = 1 if device.is_accelerator else min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    free = device.memory()[0] / sharing - bytes_to_come(sizes.total, args, device, ranks=ranks)
    limit = int(max(0, free) * FREE_MEMORY_SHARE)
    return max(2 * (shared + own) * block_bytes, min(needed, limit))


def bytes_to_come(parameters: int, args: Any, device: Device, *, ranks: int) -> float:
    """What a rank will hold beside the KV cache, and does not hold yet when the engine is built.

    That is the engine's weights, and AdamW's moments, which the first update makes, of the policy and of a critic that
    is as large. A run that goes on from a checkpoint has the moments already: it is treated alike.
    """
    in_main_memory = getattr(args, "cpu_offload", False) and device.is_accelerator
    trained = 0 if in_main_memory else hasattr(args, "lr") + hasattr(args, "critic_lr")
    return DTYPE_BYTES[args.dtype] * parameters / args.rollout_tp + 8 * trained * parameters / ranks


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model."""

    total: int
    layer: int
    """One decoder layer; FSDP gathers the next one while one computes."""
    root: int
    """All that is in no layer: embedding, last norm, head."""


def sizes_of(folder: Path, args: Any) -> tuple[Sizes, nn.Module]:
    """The sizes of the causal language model of a folder, and the model without memory."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    total = sum(p.numel() for p in model.parameters())
    layers = model.get_decoder().layers
    layer = sum(p.numel() for p in layers[0].parameters())
    return Sizes(total, layer, root=total - sum(p.numel() for p in layers.parameters())), model


def plan(folder: Path, args: Any, *, ranks: int, frozen_models: int, device: Device) -> dict[str, float]:
    """Bytes on each of `ranks` ranks, by what takes them. Parameters and optimizer are exact, activations an estimate.

    `frozen_models` counts models beside the trained one (a reference, a teacher) of the same size.
    """
    sizes, model = sizes_of(folder, args)
    layers = model.get_decoder().layers
    compute = DTYPE_BYTES[args.dtype]

    text = model.config.get_text_config()
    tokens = args.micro_batch_tokens
    attention = sum(
        p.shape[0]
        for name, p in layers[0].named_parameters()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    )
    mlp = getattr(text, "intermediate_size", 4 * text.hidden_size)
    # What autograd keeps of a layer for each token: inputs and outputs of its norms and residuals, of q, k, v and their
    # rotated forms, and of the three MLP products.
    layer_activations = tokens * compute * (6 * text.hidden_size + 2 * attention + 4 * mlp)
    layer_inputs = tokens * compute * text.hidden_size * len(layers)
    kept = layer_inputs + layer_activations if args.gradient_checkpointing else layer_activations * len(layers)

    logits = (compute + 8) * args.logits_chunk_rows * text.vocab_size  # and twice in fp32, for their softmax

    return {
        "parameters, fp32 master (sharded)": 4 * sizes.total / ranks,
        "gradients, fp32 (sharded)": 4 * sizes.total / ranks,
        "AdamW moments, fp32 (sharded)": 8 * sizes.total / ranks,
        "frozen models (sharded)": frozen_models * compute * sizes.total / ranks,
        "two layers gathered, with gradients": 2 * 2 * compute * sizes.layer,
        "embedding and head gathered, with gradients": 2 * compute * sizes.root,
        "unsharded gradient until the last micro-batch": 4 * sizes.total * args.delay_gradient_reduction,  # fp32
        f"activations of {tokens:,} tokens (estimate)": kept,
        f"logits, {args.logits_chunk_rows:,} rows x {text.vocab_size:,}": logits,
        "engine weights": compute * sizes.total / args.rollout_tp,
        "engine KV cache": kv_cache_bytes(folder, args, device, ranks=ranks),
    }


def table(args: Any, *, ranks: int, frozen_models: int, others: dict[str, float] | None = None) -> str:
    """The plan as text: GiB a rank, the totals while training and while sampling, what this machine's device has.

    `others` are further rows, in bytes; those that are there all the time end with "(sharded)".
    """
    device, folder = get_device(), resolve_model(args.model)
    rows = plan(folder, args, ranks=ranks, frozen_models=frozen_models, device=device) | (others or {})
    resident = sum(size for name, size in rows.items() if name.endswith("(sharded)"))
    engine = rows["engine weights"] + rows["engine KV cache"]
    training = sum(rows.values()) - engine
    width = max(map(len, rows)) + 2

    def line(name: str, size: float, remark: str = "") -> str:
        return f"  {name.ljust(width)}{size / GIB:9.3f}{remark}"

    offload = "   --cpu-offload moves the sharded ones to main memory" if args.cpu_offload else ""
    return "\n".join(
        [
            f"GiB on each of {ranks} ranks, {args.dtype} compute, {args.prompts_per_step} prompts x {args.group_size}",
            "",
            *(line(name, size) for name, size in rows.items() if size),
            "",
            line("while training, the engine asleep (accelerators)", training, offload),
            line("while training, the engine awake (CPU)", training + engine),
            line("while sampling", resident + engine),
            line(f"this machine's {device.name} has", device.memory()[1]),
        ]
    )
