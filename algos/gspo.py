"""GSPO: group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071), in one file.

For every prompt x the current policy samples a group of G responses o_1..o_G, each scored by a rule. A response is as
good as it is better than its group, so no critic is needed (equation 6 of the paper):

    A_i = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                                                     advantage

    J = E[ 1/G sum_i  min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i) ]                       equation 5

with s_i = (pi(o_i) / pi_old(o_i))^(1 / |o_i|), the ratio of the whole response after and before the updates of this
step, per token (equation 7). A response is clipped as a whole. Its tokens share the gradient in the stop-gradient form
s_it = sg[s_i] pi(o_t) / sg[pi(o_t)] (equations 13 and 14), whose mean over a response has the gradient of s_i.

Where this file departs from the paper, on purpose:
  1. --loss-denominator can be other than the paper's sequence-mean.
  2. beta is 0, so no reference model is held in memory; the paper leaves the KL out too. --kl-coef brings it.
  3. The first of the --num-minibatches 4 (the paper's number) has s = 1 and clips nothing. With one optimizer step per
     rollout this is so for all: then GSPO is GRPO with sequence means. It needs several updates to matter.
  4. The engine that samples and the trainer that learns round differently. The gap is measured in every step
     (mismatch_*) and weighted away by truncated importance sampling, --tis-cap (Yao et al. 2025).

    torchrun --nproc_per_node 2 algos/gspo.py                       # the embedded tiny task, on a CPU, in minutes
    torchrun --nproc_per_node 1 algos/gspo.py --model Qwen/Qwen2.5-0.5B-Instruct --train-files data/gsm8k/train.parquet
    torchrun --nproc_per_node 8 algos/gspo.py --model Qwen/Qwen2.5-3B --train-files data/countdown/train.parquet

Shapes: P prompts and B = P x G sequences of this rank, b sequences of a micro-batch, L tokens of the longest of them
(prompt and response), T tokens of its longest response, N its response tokens, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from common import arguments, checkpoint, data, engine, launch, memory, optim, packing, rewards
from common.device import Device, get_device
from common.logprobs import HeadLogprobs
from common.models import compile_layers, disable_dropout
from common.tracking import RL_COLUMNS, RL_CURVES, Tracker

if TYPE_CHECKING:
    from vllm import LLM

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TINY = str(Path(__file__).resolve().parents[1] / "assets" / "tiny-arith")

# A default of None is filled in from here: what suits the embedded model would wreck a pretrained one.
DEFAULTS = {"steps": 500, "lr": 1e-6, "warmup_steps": 10, "max_response_length": 1024, "eval_every": 20}
TINY_DEFAULTS = {"steps": 60, "lr": 1e-4, "warmup_steps": 10, "max_response_length": 48, "eval_every": 10}


@dataclass
class Args:
    # -- model and data --
    model: str = f"{TINY}/model"
    """Folder or hub name of a Hugging Face causal language model."""
    train_files: tuple[str, ...] = (f"{TINY}/train.parquet",)
    """Parquet files, folders or globs with verl's five fields."""
    test_files: tuple[str, ...] = (f"{TINY}/test.parquet",)
    """The same for evaluation. No names: no evaluation."""
    max_prompt_length: int = 512
    """Prompts with more tokens, counted after the chat template, are dropped and counted."""
    chat_template_kwargs: str = "{}"
    """JSON passed to the chat template, for example '{"enable_thinking": false}'."""
    reward_fn: str | None = None
    """file.py:name of your own compute_score; by default the row's data_source picks the rule."""
    reward_timeout: float = 5.0
    """Seconds of wall time after which scoring a response is given up (score 0, counted)."""
    strict_rewards: bool = False
    """Stop the run when a reward function raises, instead of counting it in rewards/errors."""
    overlong_buffer: int = 0
    """Tokens before the length limit over which a training reward falls linearly (DAPO, eq. 13); 0: no penalty."""
    overlong_penalty: float = 1.0
    """What a response of the full length loses by that."""
    trust_remote_code: bool = False
    """Let the model's repository run its own Python code."""

    # -- rollout --
    prompts_per_step: int = 32
    """Prompts in one step, over all ranks."""
    group_size: int = 8
    """Responses sampled for each prompt (G; DeepSeekMath has 64)."""
    max_response_length: int | None = None
    """Longest response in tokens; default 1024, for the embedded task 48."""
    temperature: float = 1.0
    """Sampling temperature. Every log-prob is that of softmax(logits / temperature)."""
    top_p: float = 1.0
    """Must stay 1: training on a truncated distribution needs log-probs that the trainer does not have."""
    top_k: int = 0
    """Must stay 0 (off), for the same reason."""
    rollout_tp: int = 1
    """Ranks that share one engine (tensor parallel)."""
    kv_cache_gib: float | None = None
    """GiB of KV cache of an engine; default: what the step's sequences need, at most half of the free memory."""
    engine_check_every: int = 0
    """Compare engine and trainer log-probs after every n-th sync too; before the first step it is always done."""
    engine_tolerance: float | None = None
    """Largest mean |difference| of those log-probs; default 1e-3 in fp32, 0.1 in bf16."""

    # -- algorithm --
    scale_by_std: bool = True
    """Divide the advantage by the group's standard deviation; Dr. GRPO does not."""
    # Differs from algos/grpo.py: a mean over a sequence moves far less than a token.
    clip_low: float = 3e-4
    """Lower clip range of the sequence ratio, eps_low (the paper's value)."""
    # Differs from algos/grpo.py: the same.
    clip_high: float = 4e-4
    """Upper clip range of the sequence ratio, eps_high (the paper's value)."""
    kl_coef: float = 0.0
    """Weight beta of the KL to the frozen starting model; 0 keeps no reference model (DeepSeekMath: 0.04)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (equation 4 is k3). In a loss only k2 has the gradient of the reverse KL; k1 has none."""
    # Differs from algos/grpo.py: every response counts once (equation 5).
    loss_denominator: Literal["token-mean", "sequence-mean", "constant"] = "sequence-mean"
    """What the summed token losses are divided by: all tokens; each length, then sequences; max length x sequences."""
    tis_cap: float = 2.0
    """Cap of the importance weight pi_old / pi_engine of a token; 0 turns the correction off."""

    # -- optimisation --
    steps: int | None = None
    """Rollout batches to train on; default 500, for the embedded task 60."""
    # Differs from algos/grpo.py: with one update every ratio is 1.
    num_minibatches: int = 4
    """Optimizer steps per pass over a rollout batch (the paper: 4)."""
    epochs: int = 1
    """Passes over each rollout batch."""
    lr: float | None = None
    """Peak learning rate of AdamW; default 1e-6 (DeepSeekMath), for the embedded model 1e-4."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises from 0; default 10."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, down to 0 at the last step."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm."""
    max_bad_updates: int = 3
    """Stop after this many updates in a row that were skipped for a NaN or infinite loss, gradient or reward."""
    micro_batch_tokens: int = 8192
    """Tokens in one forward and backward pass of a rank."""
    logits_chunk_rows: int = 1024
    """Response tokens whose logits (rows x vocabulary, fp32) are in memory at a time."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute dtype of trainer and engine; master weights and optimizer are always fp32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more compute."""
    compile: bool = False
    """torch.compile the decoder layers. No faster on a CPU; not measured on accelerators yet."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in main memory, for accelerators."""
    delay_gradient_reduction: bool = False
    """Reduce gradients over ranks only at the last micro-batch: fewer collectives, one unsharded gradient in memory."""

    # -- logging and checkpoints --
    seed: int = 1
    """Seed of everything random. The same command gives the same run."""
    run_dir: str | None = None
    """Folder of this run; default runs/<script>-<time>-<seed>."""
    eval_every: int | None = None
    """Evaluate before the first step, every n steps and after the last; 0: never. Default 20, embedded task 10."""
    eval_temperature: float = 1.0
    """Sampling temperature of the evaluation; 0 is greedy."""
    save_every: int = 0
    """Write a checkpoint every n steps; 0: only when the run is told to stop (SIGTERM)."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, beside the best by evaluation."""
    resume: bool = False
    """Go on from the newest complete checkpoint: of --run-dir, or else of the newest run of this script."""
    resume_from: str | None = None
    """The same from this run folder or checkpoint."""
    export: bool = True
    """Write the trained model as a Hugging Face folder, <run>/hf, at the end."""
    export_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of that folder."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""
    watchdog_s: float = 1800.0
    """Seconds after which a phase counts as stuck: the run stops and names it."""
    dry_run: int = 0
    """Print the memory that each of this many ranks needs, without loading weights, and stop."""


# -- the algorithm ----------------------------------------------------------------------------------------------------


def compute_advantages(rewards: torch.Tensor, *, scale_by_std: bool) -> torch.Tensor:
    """Advantage of each response over its group, section 4.1.2 of the paper. (P, G) -> (P, G), fp32.

    Equal rewards give exactly 0, where rounding would leave a residue that the division by a tiny std blows up.
    The std is the unbiased one. A group of one response has no spread, so its advantage is 0.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if scale_by_std and rewards.shape[1] > 1:
        centred = centred / (rewards.std(dim=1, keepdim=True) + 1e-6)
    all_equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return centred.masked_fill(all_equal, 0.0)


def estimate_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(pi || pi_ref) from tokens sampled by pi (Schulman 2020, "Approximating KL divergence").

    All three have the right mean (k2 to second order). As a loss they differ: the expected gradient of k2 is that of
    the reverse KL, that of k3 belongs to the forward KL, and that of k1 is zero.
    """
    log_ratio = (logprobs - ref_logprobs).clamp(-20.0, 20.0)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.exp(-log_ratio) - 1.0 + log_ratio  # k3, equation 4


def token_weights(
    response_mask: torch.Tensor, denominator: str, *, num_tokens: float, num_sequences: float, max_length: int
) -> torch.Tensor:
    """Weight of each token's loss, so that the loss of a batch is a plain sum over its micro-batches and ranks. (b, T)

    `num_tokens` and `num_sequences` count the whole optimizer step over all ranks, never a micro-batch: the mean of
    micro-batch means would weigh a token by the company it keeps.
    """
    if denominator == "token-mean":
        return response_mask / num_tokens
    if denominator == "sequence-mean":
        return response_mask / response_mask.sum(dim=1, keepdim=True).clamp(min=1) / num_sequences
    return response_mask / (max_length * num_sequences)


# Differs from algos/grpo.py: one ratio for the whole response.
def compute_loss(
    *, new_logprobs: torch.Tensor, old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None, advantages: torch.Tensor, response_mask: torch.Tensor, weights: torch.Tensor,
    clip_low: float, clip_high: float, kl_coef: float, kl_estimator: str, tis_cap: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Equation 13 of the paper, negated. Arguments are (b, T), advantages (b,); `weights` as from `token_weights`.

    Returns the loss and metrics, each summed over the response tokens: the caller divides by their global number.

    In the first update after a rollout old_logprobs equals new_logprobs, the ratio is 1 and the loss is minus the mean
    advantage, about 0. That is no fault: the gradient of the ratio is the gradient of new_logprobs.
    """
    log_ratio = ((new_logprobs - old_logprobs) * response_mask).sum(1, True) / response_mask.sum(1, True).clamp(min=1)
    ratio = (log_ratio.detach().clamp(-20.0, 20.0) + (new_logprobs - new_logprobs.detach())).exp()  # equation 14
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    advantages = advantages[:, None]
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    is_clipped = clipped_ratio * advantages < ratio * advantages

    mismatch = ((old_logprobs - rollout_logprobs) * response_mask).detach().clamp(-20.0, 20.0)
    importance = mismatch.exp()
    if tis_cap > 0:
        objective = objective * importance.clamp(max=tis_cap)

    token_loss = -objective
    metrics = {
        "clip_fraction": (is_clipped * response_mask).sum(),
        "approx_kl": (-log_ratio * response_mask).sum(),  # k1 estimate of KL(pi_old || pi)
        "mismatch_kl": (-mismatch).sum(),  # k1 estimate of KL(engine || trainer)
        "mismatch_abs": mismatch.abs().sum(),
        "tis_capped": ((importance > (tis_cap or torch.inf)) * response_mask).sum(),
    }
    if ref_logprobs is not None:
        kl = estimate_kl(new_logprobs, ref_logprobs, kl_estimator)
        token_loss = token_loss + kl_coef * kl
        metrics["kl_ref"] = (kl * response_mask).sum()

    # where, not a product: 0 x inf in a padded position would be NaN
    loss = torch.where(response_mask > 0, token_loss * weights, 0.0).sum()
    return loss, {name: value.detach() for name, value in metrics.items()}


# -- shared blocks: the same in every script --------------------------------------------------------------------------


@dataclass
class Sample:
    """One prompt and one response to it. Token ids are the truth; the text only serves the rewards."""

    prompt: data.Prompt
    response_ids: list[int]
    rollout_logprobs: list[float]
    text: str = ""
    truncated: bool = False
    score: float = 0.0
    """What the rule gave."""
    reward: float = 0.0
    """What is trained on: the score, less the penalty on length."""
    advantage: float = 0.0
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.prompt_ids) + len(self.response_ids)


@dataclass
class MicroBatch:
    """Samples padded on the right, on the device. Masks come from lengths: a pad id may be a real token too."""

    input_ids: torch.Tensor  # (b, L)
    layout: packing.Layout  # how they go through the model: without padding, a group's prompt once
    rows: torch.Tensor  # (N,) row of each response token
    columns: torch.Tensor  # (N,) its column in input_ids
    offsets: torch.Tensor  # (N,) its place in the response, so its column in the (b, T) tensors
    response_mask: torch.Tensor  # (b, T) fp32, 1 on response tokens, the EOS included
    advantages: torch.Tensor  # (b,)
    rollout_logprobs: torch.Tensor  # (b, T)
    old_logprobs: torch.Tensor | None  # (b, T)
    ref_logprobs: torch.Tensor | None  # (b, T)


def token_logprobs(
    self: nn.Module, batch: MicroBatch, temperature: float, chunk_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of each response token (N,). A forward method, so that FSDP gathers the head."""
    predictors = batch.rows, batch.columns - 1  # position t - 1 predicts token t
    hidden = packing.hidden_at(self.get_decoder(), batch.input_ids, batch.layout, *predictors)  # (N, H)
    targets = batch.input_ids[batch.rows, batch.columns]
    return HeadLogprobs.apply(hidden, self.get_output_embeddings().weight, targets, temperature, chunk_rows)


def shard_model(folder: Path, args: Args, device: Device, *, trainable: bool) -> nn.Module:
    """The model of `folder`, sharded over all ranks by FSDP2; no rank ever holds all of it.

    It is built without memory, sharded, and only then given memory and weights, each rank reading its own slices.
    A trainable model keeps fp32 master weights and computes in args.dtype; a frozen one is stored in that dtype.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32 if trainable else DTYPES[args.dtype],
            attn_implementation=packing.attention_for(config, device, DTYPES[args.dtype]),
            trust_remote_code=args.trust_remote_code,
        )
    disable_dropout(model)
    model.requires_grad_(trainable)
    model.train()  # transformers checkpoints gradients only in training mode
    if trainable and args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    offload = args.cpu_offload and device.is_accelerator
    shard = partial(
        fsdp.fully_shard,
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=DTYPES[args.dtype], reduce_dtype=torch.float32),
        offload_policy=fsdp.CPUOffloadPolicy() if offload else fsdp.OffloadPolicy(),
    )
    if args.compile:
        compile_layers(model)
    for layer in model.get_decoder().layers:
        shard(layer)
    shard(model)
    model.to_empty(device="cpu" if offload else device.torch_device)
    checkpoint.load_hf_weights(model, folder)
    model.token_logprobs = MethodType(token_logprobs, model)
    fsdp.register_fsdp_forward_method(model, "token_logprobs")
    return model


def build_engine(folder: Path, args: Args, device: Device) -> "LLM":
    """One vLLM engine for every `rollout_tp` ranks, inside their processes. Its weights arrive by `sync_weights`."""
    sequences = args.prompts_per_step * args.group_size * args.rollout_tp // dist.get_world_size()
    with device.starting_engine():
        from vllm import LLM

        device.patch_engine()
        llm = LLM(
            model=str(folder),
            load_format="dummy",
            dtype=DTYPES[args.dtype],
            max_model_len=args.max_prompt_length + args.max_response_length,
            max_num_seqs=min(max(sequences, 128), 1024),  # an evaluation has more of them than a small step
            kv_cache_memory_bytes=memory.kv_cache_bytes(folder, args, device),
            tensor_parallel_size=args.rollout_tp,
            distributed_executor_backend="external_launcher",  # uses torchrun's processes and process group
            logprobs_mode="processed_logprobs",  # of softmax(logits / temperature), as in the trainer
            generation_config="vllm",  # no sampling defaults from the model's folder
            async_scheduling=False,
            seed=args.seed,
            trust_remote_code=args.trust_remote_code,
            **device.engine_kwargs(),
        )  # fmt: skip
    if device.can_sleep:
        llm.sleep(level=2)
    engine.keep(llm)
    return llm


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, unsharded, in compute dtype: one all-gather per layer.

    A tied head comes beside the embedding, for engines that pack the head apart. What the root holds (embedding,
    norm, head) stays unsharded, since the engine may look at it again at the end: the caller reshards the model.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, fsdp.FSDPModule):
            module.unshard()
            for name, weight in module.named_parameters(prefix=prefix, remove_duplicate=False):
                if not isinstance(weight, DTensor):  # weights of modules that are still sharded have their own turn
                    yield checkpoint.clean_name(name), weight.detach()
            if module is not model:
                module.reshard()


@torch.no_grad()
def sync_weights(llm: "LLM", model: nn.Module, device: Device) -> None:
    """Hand the trainer's weights to the engine. Raises when it owns one that was not sent, or lacks one that was.

    On accelerators the engine wakes for it in two stages, so that weights in flight and KV cache are never both there.
    """
    if device.can_sleep:
        device.empty_cache()
        llm.wake_up(tags=["weights"])
    owned, sent = llm.apply_model(engine.weight_names)[0], set()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in named_weights(model):
            if name not in owned | {"lm_head.weight"}:
                raise RuntimeError(f"weight sync: the engine has no weight {name}")
            sent.add(name)
            yield name, weight
        if owned - sent:
            raise RuntimeError(f"weight sync: the engine was not given {sorted(owned - sent)}")

    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights(), "is_checkpoint_format": True})
    model.reshard()
    if device.can_sleep:
        device.empty_cache()
        llm.wake_up(tags=["kv_cache"])
    if not llm.reset_prefix_cache():  # cached keys and values belong to the old weights
        raise RuntimeError("the engine did not drop its prefix cache: a request still holds blocks of it")


def rollout(
    *, prompts: list[data.Prompt], step: int, seed: int, group_size: int, temperature: float, max_tokens: int,
    stop_token_ids: list[int], llm: "LLM", tokenizer: PreTrainedTokenizerBase, tp_group: dist.ProcessGroup | None,
) -> list[Sample]:  # fmt: skip
    """Sample `group_size` responses to each prompt: P prompts -> P x G samples, those of a prompt side by side.

    What is drawn depends on the seed, the step, the prompt's row and the response's place in its group, not on the
    rest of the batch. Ranks that share an engine put their prompts together, and each keeps the responses to its own.
    """
    from vllm import SamplingParams

    seeds = [engine.sampling_seed(seed, step=step, row=prompt.index) for prompt in prompts]
    mine = [(p.prompt_ids, seed + j) for p, seed in zip(prompts, seeds, strict=True) for j in range(group_size)]
    requests, first = engine.gather_requests(mine, tp_group)
    settings = {"temperature": temperature, "max_tokens": max_tokens, "stop_token_ids": stop_token_ids}
    settings |= {"logprobs": 0, "flat_logprobs": True, "detokenize": False}  # log-probs of the sampled tokens only
    params = [SamplingParams(seed=seed, **settings) for _, seed in requests]
    inputs = [{"prompt_token_ids": ids} for ids, _ in requests]
    outputs = llm.generate(inputs, params, use_tqdm=False) if inputs else []
    responses = [output.outputs[0] for output in outputs[first : first + len(mine)]]
    texts = tokenizer.batch_decode([list(r.token_ids) for r in responses], skip_special_tokens=True)
    return [
        Sample(
            prompt=prompts[i // group_size], response_ids=list(response.token_ids), text=texts[i],
            rollout_logprobs=list(response.logprobs.logprobs), truncated=response.finish_reason == "length",
        )
        for i, response in enumerate(responses)
    ]  # fmt: skip


def make_micro_batches(model: nn.Module, samples: list[Sample], max_tokens: int, device: Device) -> list[list[Sample]]:
    """Split samples into micro-batches for which the model computes at most `max_tokens` tokens.

    Every forward and backward is a collective, so all ranks must run equally many: short ranks get empty ones.
    """
    micro_batches = packing.split(samples, max_tokens, is_packed=packing.is_packed(model))
    count = torch.tensor(len(micro_batches), device=device.torch_device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return micro_batches + [[] for _ in range(int(count) - len(micro_batches))]


def collate(samples: list[Sample], device: Device) -> MicroBatch:
    """Pad samples on the right. No samples: one row of two tokens whose response token counts for nothing."""
    is_empty = not samples
    if is_empty:
        samples = [Sample(data.Prompt(-1, [0], "", None, {}, "rule", []), [0], [0.0])]

    def pad(rows: list[Any]) -> torch.Tensor | None:
        return None if rows[0] is None else pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)

    lengths = torch.tensor([len(sample.response_ids) for sample in samples])
    prompt_lengths = torch.tensor([len(sample.prompt.prompt_ids) for sample in samples])
    rows = torch.arange(len(samples)).repeat_interleave(lengths)
    offsets = torch.cat([torch.arange(length) for length in lengths.tolist()])
    batch = MicroBatch(
        input_ids=pad([sample.prompt.prompt_ids + sample.response_ids for sample in samples]),
        layout=packing.layout_of(samples),
        rows=rows,
        columns=prompt_lengths[rows] + offsets,
        offsets=offsets,
        response_mask=(torch.arange(int(lengths.max())) < lengths[:, None]).float() * (not is_empty),
        advantages=torch.tensor([sample.advantage for sample in samples]),
        rollout_logprobs=pad([sample.rollout_logprobs for sample in samples]),
        old_logprobs=pad([sample.old_logprobs for sample in samples]),
        ref_logprobs=pad([sample.ref_logprobs for sample in samples]),
    )
    tensors = {name: value for name, value in vars(batch).items() if value is not None}
    moved = {name: device.send(value) for name, value in tensors.items()}
    return MicroBatch(**(vars(batch) | moved))


def compute_logprobs(model: nn.Module, batch: MicroBatch, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the response tokens, (b, T) fp32, 0 in padded positions."""
    logprobs, entropies = model.token_logprobs(batch, args.temperature, args.logits_chunk_rows)
    zeros, index = torch.zeros_like(batch.response_mask), (batch.rows, batch.offsets)
    return zeros.index_put(index, logprobs), zeros.index_put(index, entropies)


@torch.no_grad()
def check_engine(model: nn.Module, prompts: list[data.Prompt], args: Args, device: Device, sampling: dict) -> float:
    """Sample a few tokens and compare the engine's log-probs of them with the trainer's: the mean |difference|.

    Raises on all ranks when it exceeds --engine-tolerance.
    """
    sampling = sampling | {"max_tokens": min(16, args.max_response_length), "group_size": 1}
    batch = collate(rollout(prompts=prompts, step=0, **sampling), device)
    logprobs, _ = compute_logprobs(model, batch, args)
    settings = {"tolerance": args.engine_tolerance, "dtype": args.dtype}
    return engine.check_agreement(logprobs, batch.rollout_logprobs, batch.response_mask, **settings)


def score(scorer: rewards.Scorer, samples: list[Sample]) -> dict[str, float]:
    """Fill in the samples' rewards; returns the scorer's metrics."""
    values, metrics = scorer(
        [sample.prompt.data_source for sample in samples],
        [sample.text for sample in samples],
        [sample.prompt.ground_truth for sample in samples],
        [sample.prompt.extra_info for sample in samples],
    )
    for sample, value in zip(samples, values, strict=True):
        sample.score = sample.reward = value
    return metrics


def sample_row(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What samples.jsonl shows of a sample."""
    row = {"prompt": tokenizer.decode(sample.prompt.prompt_ids), "response": sample.text}
    return row | {"reward": sample.reward, "ground_truth": sample.prompt.ground_truth}


def sequence_sums(samples: list[Sample]) -> dict[str, float]:
    """What is averaged over sequences. Accuracy is the share of responses with a score of 1 or more."""
    return {
        "reward": sum(sample.reward for sample in samples),
        "accuracy": sum(sample.score >= 1.0 for sample in samples),
        "response_length": sum(len(sample.response_ids) for sample in samples),
        "truncated": sum(sample.truncated for sample in samples),
    }


def evaluate(
    dataset: data.PromptDataset, scorer: rewards.Scorer, args: Args, device: Device, sampling: dict
) -> dict[str, float]:
    """Sample one response to every test prompt: accuracy, reward, response length and share of truncated ones.

    The seeds depend on the run's seed and the row alone: every evaluation of a run draws with the same luck, and none
    touches a generator that training uses.
    """
    rows = range(dist.get_rank(), len(dataset), dist.get_world_size())
    sampling = sampling | {"temperature": args.eval_temperature, "group_size": 1}
    samples = rollout(prompts=[dataset[row] for row in rows], step=-1, **sampling)
    score(scorer, samples)
    means = launch.all_reduce_means((sequence_sums(samples), len(samples)), device=device)
    return {f"eval/{name}": value for name, value in means.items()}


# -- the run ----------------------------------------------------------------------------------------------------------


def main(args: Args) -> None:
    # ==== Set-up: data, models, engine; then the run that is resumed, if one is ====
    device = get_device()
    arguments.fill_in(args, TINY_DEFAULTS if args.model.startswith(TINY) else DEFAULTS, device)
    arguments.check_rollout(args)
    data.check_files(args.train_files + args.test_files)
    reward_fn = rewards.load_reward_fn(args.reward_fn)
    if args.dry_run:
        return print(memory.table(args, ranks=args.dry_run, frozen_models=int(args.kl_coef > 0)))
    rank, world_size = launch.init_distributed(device, timeout_s=args.watchdog_s)
    folder = checkpoint.resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    load = partial(
        data.load_prompts, tokenizer=tokenizer, max_prompt_length=args.max_prompt_length,
        chat_template_kwargs=launch.json_object(args.chat_template_kwargs, flag="--chat-template-kwargs"),
    )  # fmt: skip
    train_data = load(args.train_files)
    test_data = load(args.test_files) if args.test_files and args.eval_every else None
    arguments.check_data(args, train_data, test_data)
    sampler = data.BatchSampler(len(train_data), args.prompts_per_step, args.seed, rank=rank, world_size=world_size)
    scorer = rewards.Scorer(reward_fn, timeout_s=args.reward_timeout, strict=args.strict_rewards)

    run_dir, resume_path = checkpoint.find_run(args, script=__file__)
    is_resumed = args.resume or resume_path is not None
    tracker = Tracker(
        args, script=__file__, rank=rank, total_steps=args.steps, columns=RL_COLUMNS, run_dir=run_dir,
        resume=is_resumed, wandb_project=args.wandb_project,
    )  # fmt: skip
    tracker.note(arguments.describe(args, device, train_data.report))
    checkpointer = checkpoint.Checkpointer(tracker.run_dir / "checkpoints", keep=args.keep_checkpoints)
    phases = launch.Phases(device, watchdog_s=args.watchdog_s)

    with phases("set-up"):
        tp_group = engine.make_tp_group(folder, args.rollout_tp)
        model = shard_model(folder, args, device, trainable=True)
        ref_model = shard_model(folder, args, device, trainable=False) if args.kl_coef > 0 else None
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=args.adam_betas, weight_decay=args.weight_decay, fused=True
        )
        modules = {"policy": (model, optimizer)}
        state, rank_state = {"step": 0, "update": 0, "first_eval": None}, None
        if resume_path:
            state, rank_state = checkpointer.load(resume_path, modules=modules)
            sampler.load_state_dict(state["sampler"])
        if is_resumed:
            tracker.resume(state["step"] if resume_path else -1)
        llm = build_engine(folder, args, device)
        sync_weights(llm, model, device)
        sampling = {
            "llm": llm, "tokenizer": tokenizer, "tp_group": tp_group, "seed": args.seed, "group_size": args.group_size,
            "temperature": args.temperature, "max_tokens": args.max_response_length,
            "stop_token_ids": engine.stop_token_ids(tokenizer, folder),
        }  # fmt: skip
        gap = check_engine(model, [train_data[row] for row in range(min(4, len(train_data)))], args, device, sampling)
        tracker.note(f"engine and trainer agree: mean |log-prob difference| {gap:.1e}")
        device.seed(args.seed)  # the engine's start-up draws from the global generators
        if rank_state:
            device.set_rng_state(rank_state["rng"])

    if test_data and state["first_eval"] is None:
        with phases("evaluate"):
            state["first_eval"] = evaluate(test_data, scorer, args, device, sampling)
        tracker.log_eval(0, state["first_eval"])
    step = state["step"]
    updates = optim.Updates(args, tracker=tracker, state=state)
    updates_per_step = args.epochs * args.num_minibatches
    warmup, total = args.warmup_steps * updates_per_step, args.steps * updates_per_step

    while state["step"] < args.steps:
        state["step"] += 1
        step = state["step"]
        phases.start_step()

        # ==== 1. Rollout ====
        with phases("rollout"):
            prompts = [train_data[row] for row in sampler.next_batch()]
            samples = rollout(prompts=prompts, step=step, **sampling)
            if device.can_sleep:
                llm.sleep(level=2)  # weights and KV cache are dropped: the next sync brings all weights

        # ==== 2. Rewards ====
        with phases("rewards"):
            reward_metrics = score(scorer, samples) | rewards.penalise_length(samples, args)

        # ==== 3. Advantages ====
        reward_groups = torch.tensor([sample.reward for sample in samples]).view(-1, args.group_size)  # (P, G)
        advantages = compute_advantages(reward_groups, scale_by_std=args.scale_by_std)
        for sample, advantage in zip(samples, advantages.flatten().tolist(), strict=True):
            sample.advantage = advantage

        # ==== 4. Old and reference logprobs ====
        # With one update per rollout the update's own logprobs are the old ones: no pass is needed for them.
        passes = [("old_logprobs", model)] if updates_per_step > 1 else []
        passes += [("ref_logprobs", ref_model)] if ref_model is not None else []
        with phases("logprobs"), torch.no_grad():
            for name, scoring_model in passes:
                for micro_batch in make_micro_batches(scoring_model, samples, args.micro_batch_tokens, device):
                    logprobs, _ = compute_logprobs(scoring_model, collate(micro_batch, device), args)
                    for sample, row in zip(micro_batch, logprobs, strict=False):
                        setattr(sample, name, row[: len(sample.response_ids)])

        # ==== 5. Update ====
        sums: dict[str, torch.Tensor] = {}
        # Every num_minibatches-th sample, so that each minibatch has a part of every group.
        minibatches = [samples[first :: args.num_minibatches] for first in range(args.num_minibatches)]
        with phases("update"):
            for minibatch in minibatches * args.epochs:
                counts = {"num_tokens": sum(len(s.response_ids) for s in minibatch), "num_sequences": len(minibatch)}
                counts = launch.all_reduce_sums(counts, device)
                micro_batches = make_micro_batches(model, minibatch, args.micro_batch_tokens, device)
                for i, micro_batch in enumerate(micro_batches):
                    model.set_requires_gradient_sync(not args.delay_gradient_reduction or i == len(micro_batches) - 1)
                    batch = collate(micro_batch, device)
                    new_logprobs, entropy = compute_logprobs(model, batch, args)
                    weights = token_weights(
                        batch.response_mask, args.loss_denominator, max_length=args.max_response_length, **counts
                    )
                    loss, metrics = compute_loss(
                        new_logprobs=new_logprobs,
                        old_logprobs=new_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
                        rollout_logprobs=batch.rollout_logprobs, ref_logprobs=batch.ref_logprobs,
                        advantages=batch.advantages, response_mask=batch.response_mask, weights=weights,
                        clip_low=args.clip_low, clip_high=args.clip_high, kl_coef=args.kl_coef,
                        kl_estimator=args.kl_estimator, tis_cap=args.tis_cap,
                    )  # fmt: skip
                    updates.watch(micro_batch, loss, new_logprobs)
                    (loss * world_size).backward()  # FSDP averages gradients over ranks, the loss is a sum
                    metrics |= {"entropy": (entropy * batch.response_mask).sum()}
                    metrics["loss"] = loss.detach() * counts["num_tokens"]  # divided again, so the mean over updates
                    sums |= {name: value + sums.get(name, 0.0) for name, value in metrics.items()}
                lr = args.lr * optim.lr_factor(state["update"], warmup=warmup, total=total, decay=args.lr_decay)
                grad_norm = updates.apply(model, optimizer, lr=lr, step=step)
                state["update"] += 1

        # ==== 6. Sync weights ====
        with phases("sync"):
            sync_weights(llm, model, device)
            if args.engine_check_every and step % args.engine_check_every == 0:
                check_engine(model, prompts[:4], args, device, sampling)

        # ==== 7. Log, evaluate, save ====
        means = launch.all_reduce_means(
            (sums, args.epochs * sum(len(sample.response_ids) for sample in samples)),
            (sequence_sums(samples) | {"tokens": sum(sample.num_tokens for sample in samples)}, len(samples)),
            ({"zero_advantage_groups": (advantages == 0).all(dim=1).sum()}, len(advantages)),
            (launch.merge_metrics(reward_metrics), 1.0),
            device=device,
        )
        tokens = means.pop("tokens") * args.prompts_per_step * args.group_size
        means |= {"grad_norm": grad_norm, "lr": lr, "bad_updates": updates.bad} | phases.metrics(tokens=tokens)
        tracker.log(step, means)
        tracker.log_samples(step, [sample_row(sample, tokenizer) for sample in samples[: args.group_size]])

        is_last, stop = step == args.steps, launch.stop_requested(device)
        evaluated = bool(test_data) and (is_last or step % args.eval_every == 0)
        if evaluated:
            with phases("evaluate"):
                last_eval = evaluate(test_data, scorer, args, device, sampling)
            tracker.log_eval(step, last_eval)
        if stop or (args.save_every and (is_last or step % args.save_every == 0)):
            with phases("save"):
                checkpointer.save(
                    step, modules=modules, extra=state | {"sampler": sampler.state_dict()},
                    rank_state={"rng": device.rng_state()}, score=last_eval["eval/accuracy"] if evaluated else None,
                )  # fmt: skip
        if stop and not is_last:
            tracker.note(f"stopped after step {step}; go on with --resume-from {tracker.run_dir}")
            break

    # ==== The end ====
    checkpointer.wait()
    if args.export and step == args.steps:
        checkpoint.export_hf(model, tokenizer, tracker.run_dir / "hf", dtype=DTYPES[args.export_dtype], source=folder)
    tracker.conclude(step, panels=RL_CURVES)
    scorer.close()


if __name__ == "__main__":
    launch.launch(main, Args)
