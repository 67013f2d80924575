"""Supervised fine-tuning: the policy learns to write the responses of a data set.

A prompt x comes with a response y. The loss is the cross-entropy of the response's tokens, the end of the turn included:

    L = -1/N sum_i sum_t  log pi(y_it | x_i, y_i<t)

N counts the response tokens of the whole optimizer step, over all micro-batches and ranks. Prompt tokens, and in
conversations the turns of the user, are read and not learnt.

    torchrun --nproc_per_node 2 algos/sft.py                        # the embedded tiny task, on a CPU
    torchrun --nproc_per_node 1 algos/sft.py --model Qwen/Qwen2.5-0.5B --train-files data/gsm8k_sft/train.parquet
    torchrun --nproc_per_node 8 algos/sft.py --model Qwen/Qwen2.5-7B --train-files data/gsm8k_sft/train.parquet

Rows have a `prompt` (text or messages) and a `response`, or `messages`, a whole conversation.

Shapes: b sequences of a micro-batch, L tokens of the longest of them, T trained tokens of the one that has most, N trained
tokens in all, H hidden size, V vocabulary.
"""

import json
import math
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common import data, launch
from common.checkpoint import Checkpointer, export_hf, find_run, load_hf_weights, resolve_model
from common.device import GIB, Device, get_device
from common.launch import Phases, UserError, all_reduce_sums
from common.tracking import Column, Tracker

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TINY = str(Path(__file__).resolve().parents[1] / "assets" / "tiny-arith")

# A default of None is filled in from here: what suits the embedded model would wreck a pretrained one.
# Differs from algos/grpo.py: fewer fields.
DEFAULTS = {"lr": 1e-5, "warmup_steps": 10}
# Differs from algos/grpo.py: fewer fields.
TINY_DEFAULTS = {"lr": 1e-3, "warmup_steps": 10}


@dataclass
class Args:
    # -- model and data --
    model: str = f"{TINY}/model"
    """Folder or hub name of a Hugging Face causal language model."""
    # Differs from algos/grpo.py: the rows carry responses.
    train_files: tuple[str, ...] = (f"{TINY}/sft.parquet",)
    """Parquet files, folders or globs with `prompt` and `response`, or with `messages`."""
    # Differs from algos/grpo.py: the rows carry responses.
    test_files: tuple[str, ...] = ()
    """The same for the evaluation loss. No names: no evaluation."""
    max_length: int = 2048
    """Examples with more tokens, prompt and response, are dropped and counted."""
    chat_template_kwargs: str = "{}"
    """JSON passed to the chat template, for example '{"enable_thinking": false}'."""
    trust_remote_code: bool = False
    """Let the model's repository run its own Python code."""

    # -- algorithm --
    # Differs from algos/grpo.py: log-probs of data, not of samples.
    temperature: float = 1.0
    """Divides the logits."""

    # -- optimisation --
    batch_size: int = 128
    """Examples in one optimizer step, over all ranks."""
    num_epochs: int = 1
    """Passes over the training data."""
    # Differs from algos/grpo.py: by default the data decide.
    steps: int | None = None
    """Optimizer steps; default: what --num-epochs takes."""
    # Differs from algos/grpo.py: a supervised step is larger.
    lr: float | None = None
    """Peak learning rate of AdamW; default 1e-5, for the embedded model 1e-3."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises from 0; default 10."""
    # Differs from algos/grpo.py: fine-tuning ends by decaying.
    lr_decay: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up, down to 0 at the last step."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm."""
    max_bad_updates: int = 3
    """Stop after this many updates in a row that were skipped for a NaN or infinite gradient."""
    micro_batch_tokens: int = 8192
    """Padded tokens in one forward and backward pass of a rank."""
    logits_chunk_rows: int = 1024
    """Response tokens whose logits (rows x vocabulary, fp32) are in memory at a time."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute dtype of trainer and engine; master weights and optimizer are always fp32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more compute."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in main memory, for accelerators."""
    delay_gradient_reduction: bool = False
    """Reduce gradients over ranks only at the last micro-batch: fewer collectives, one unsharded gradient in memory."""

    # -- logging and checkpoints --
    seed: int = 1
    """Seed of everything random. The same command gives the same run."""
    run_dir: str | None = None
    """Folder of this run; default runs/<script>-<time>-<seed>."""
    # Differs from algos/grpo.py: the loss of the test rows is what there is to evaluate.
    eval_every: int = 100
    """Evaluate the loss of the test rows every n steps and after the last; 0: never."""
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


# -- the algorithm ----------------------------------------------------------------------------------------------------


# Differs from algos/grpo.py: cross-entropy.
def compute_loss(
    *, new_logprobs: torch.Tensor, response_mask: torch.Tensor, num_tokens: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy of the trained tokens, over the number of them in the whole optimizer step. Arguments are (b, T).

    Returns the loss and metrics, each summed over the trained tokens: the caller divides by their global number.
    """
    loss = -(new_logprobs * response_mask).sum() / num_tokens
    return loss, {"nll": -(new_logprobs.detach() * response_mask).sum()}


# -- shared blocks: the same in every script --------------------------------------------------------------------------


# Differs from algos/grpo.py: the response is given, and may be several turns of a conversation.
@dataclass
class Sample:
    """One example: token ids, and which of them are trained."""

    input_ids: list[int]
    loss_mask: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


# Differs from algos/grpo.py: no rollout, so no old or reference log-probs.
@dataclass
class MicroBatch:
    """Examples padded on the right, on the device. Masks come from lengths: a pad id may be a real token too."""

    input_ids: torch.Tensor  # (b, L)
    rows: torch.Tensor  # (N,) row of each trained token in input_ids
    columns: torch.Tensor  # (N,) its column there
    offsets: torch.Tensor  # (N,) its number among the row's trained tokens, so its column in the (b, T) tensors
    response_mask: torch.Tensor  # (b, T) fp32, 1 on trained tokens


class HeadLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ head.T / temperature) at the targets, with the logits of only a few rows in memory.

    Forward keeps one number a row; backward computes the logits of each chunk again. All of softmax is fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float, chunk_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (N, H), head (V, H), targets (N,) -> log-probs (N,) and entropies (N,), fp32."""
        logprobs, entropies, normalisers = [], [], []
        for rows, ids in zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True):
            logits = (rows @ head.T).float() / temperature  # (chunk, V)
            normaliser = logits.logsumexp(dim=1)
            logprobs.append(logits.gather(1, ids[:, None])[:, 0] - normaliser)
            probs = (logits - normaliser[:, None]).exp_()
            entropies.append(normaliser - torch.einsum("nv,nv->n", probs, logits))
            normalisers.append(normaliser)
        ctx.save_for_backward(hidden, head, targets, torch.cat(normalisers))
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        """d logprob / d logits = (onehot(target) - softmax) / temperature."""
        hidden, head, targets, normalisers = ctx.saved_tensors
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        for start in range(0, len(hidden), ctx.chunk_rows):
            chunk = slice(start, start + ctx.chunk_rows)
            scale = grad[chunk, None] / ctx.temperature
            probs = ((hidden[chunk] @ head.T).float() / ctx.temperature - normalisers[chunk, None]).exp_()
            grad_logits = probs.mul_(-scale).scatter_add_(1, targets[chunk, None], scale).to(head.dtype)
            grad_hidden[chunk] = grad_logits @ head
            grad_head.addmm_(grad_logits.T, hidden[chunk])
        return grad_hidden, grad_head, None, None, None


def token_logprobs(
    self: nn.Module, batch: MicroBatch, temperature: float, chunk_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of each response token (N,). A forward method of the model, so that FSDP gathers its head.

    Padding is on the right and attention is causal, so real tokens never see it: no attention mask is needed.
    """
    hidden = self.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state  # (b, L, H)
    hidden = hidden[batch.rows, batch.columns - 1]  # (N, H): position t - 1 predicts token t
    targets = batch.input_ids[batch.rows, batch.columns]
    return HeadLogprobs.apply(hidden, self.get_output_embeddings().weight, targets, temperature, chunk_rows)


def shard_model(folder: Path, args: Args, device: Device, *, trainable: bool) -> nn.Module:
    """The model of `folder`, sharded over all ranks by FSDP2; no rank ever holds all of it.

    It is built without memory, sharded, and only then given memory and weights, each rank reading its own slices.
    A trainable model keeps fp32 master weights and computes in args.dtype; a frozen one is stored in that dtype.
    """
    compute_dtype = DTYPES[args.dtype]
    config = AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32 if trainable else compute_dtype,
            attn_implementation=device.attn_implementation(),
            trust_remote_code=args.trust_remote_code,
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the same tokens must get the same log-probs twice
    model.config.attention_dropout = 0.0
    model.requires_grad_(trainable)
    model.train()  # transformers checkpoints gradients only in training mode
    if trainable and args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if args.cpu_offload and device.is_accelerator else OffloadPolicy()
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    model.to_empty(device="cpu" if args.cpu_offload else device.torch_device)
    load_hf_weights(model, folder)

    model.token_logprobs = MethodType(token_logprobs, model)
    register_fsdp_forward_method(model, "token_logprobs")
    return model


def make_micro_batches(samples: list[Sample], max_tokens: int, device: Device) -> list[list[Sample]]:
    """Split samples into micro-batches of at most `max_tokens` padded tokens, longest first.

    Every forward and backward is a collective, so all ranks must run equally many: short ranks get empty ones.
    """
    micro_batches: list[list[Sample]] = []
    width = 0
    for sample in sorted(samples, key=lambda sample: -sample.num_tokens):
        if not micro_batches or (len(micro_batches[-1]) + 1) * width > max_tokens:
            micro_batches.append([])
            width = sample.num_tokens
        micro_batches[-1].append(sample)
    count = torch.tensor([len(micro_batches)], device=device.torch_device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return micro_batches + [[] for _ in range(int(count) - len(micro_batches))]


# Differs from algos/grpo.py: trained tokens may lie anywhere in the sequence.
def collate(samples: list[Sample], device: Device) -> MicroBatch:
    """Pad examples on the right. No examples: one row of two tokens whose second counts for nothing."""
    ids = [sample.input_ids for sample in samples] or [[0, 0]]
    trained = [[t for t, bit in enumerate(sample.loss_mask) if bit] for sample in samples] or [[1]]
    rows = [row for row, positions in enumerate(trained) for _ in positions]
    columns = [t for positions in trained for t in positions]
    offsets = [n for positions in trained for n in range(len(positions))]
    length, width = max(map(len, ids)), max(map(len, trained))
    mask = torch.zeros(len(ids), width)
    if samples:
        mask[rows, offsets] = 1.0
    batch = MicroBatch(
        input_ids=torch.tensor([row + [0] * (length - len(row)) for row in ids]),
        rows=torch.tensor(rows),
        columns=torch.tensor(columns),
        offsets=torch.tensor(offsets),
        response_mask=mask,
    )
    return MicroBatch(**{name: value.to(device.torch_device) for name, value in vars(batch).items()})


def compute_logprobs(model: nn.Module, batch: MicroBatch, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the response tokens, (b, T) fp32, 0 in padded positions."""
    logprobs, entropies = model.token_logprobs(batch, args.temperature, args.logits_chunk_rows)
    zeros, index = torch.zeros_like(batch.response_mask), (batch.rows, batch.offsets)
    return zeros.index_put(index, logprobs), zeros.index_put(index, entropies)


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """The JSON object of --chat-template-kwargs."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(
            f"--chat-template-kwargs {text!r} is not a JSON object, such as '{{\"enable_thinking\": false}}'"
        )
    return value


def lr_factor(update: int, *, warmup: int, total: int, decay: str) -> float:
    """Learning rate of an update (counted from 0) as a share of its peak."""
    if update < warmup:
        return (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[decay]


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradient down to `max_norm`; returns its norm before, over all ranks."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def apply_update(
    optimizer: torch.optim.Optimizer, grad_norm: float, bad_updates: int, step: int, args: Args, tracker: Tracker
) -> int:
    """Step the optimizer, unless the gradient is NaN or infinite: then weights and moments stay as they are.

    The norm is the same on all ranks, so all of them skip. Returns how many updates in a row were skipped, and raises
    when they are --max-bad-updates.
    """
    if math.isfinite(grad_norm):
        optimizer.step()
        bad_updates = 0
    else:
        bad_updates += 1
        tracker.note(f"warning: step {step}: gradient norm {grad_norm}, update skipped ({bad_updates} in a row)")
    optimizer.zero_grad()
    if bad_updates >= args.max_bad_updates:
        raise RuntimeError(f"{bad_updates} updates in a row had a NaN or infinite gradient")
    return bad_updates


# Differs from algos/grpo.py: there are no rewards.
COLUMNS = [
    Column("loss", "loss"),
    Column("entropy", "entropy"),
    Column("lr", "lr", ".1e"),
    Column("grad_norm", "grad", ".2f"),
    Column("perf/tokens_per_s", "tok/s", ",.0f"),
    Column("time/step", "s/step", ".2f"),
]


# Differs from algos/grpo.py: other arguments.
def resolve_args(args: Args, device: Device) -> None:
    """Fill in the defaults that depend on model and device, and refuse, in one line each, what cannot work."""
    for name, value in (TINY_DEFAULTS if args.model.startswith(TINY) else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.dtype == "auto":
        args.dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[device.default_dtype()]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    for name in ("batch_size", "num_epochs", "max_length", "micro_batch_tokens", "logits_chunk_rows"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 1")
    if args.batch_size % world_size:
        raise UserError(f"--batch-size {args.batch_size} does not divide over {world_size} ranks")
    if args.max_length > args.micro_batch_tokens:
        raise UserError(f"--micro-batch-tokens {args.micro_batch_tokens} is less than --max-length {args.max_length}")
    parse_template_kwargs(args.chat_template_kwargs)


# Differs from algos/grpo.py: the loss is what there is to evaluate.
@torch.no_grad()
def evaluate(model: nn.Module, dataset: data.SFTDataset, args: Args, device: Device) -> dict[str, float]:
    """Mean cross-entropy and perplexity of the trained tokens of all rows: {"loss", "perplexity"}, over all ranks."""
    rows = range(dist.get_rank(), len(dataset), dist.get_world_size())
    samples = [Sample(**vars(dataset[row])) for row in rows]
    sums = {"nll": 0.0, "tokens": float(sum(sum(sample.loss_mask) for sample in samples))}
    for micro_batch in make_micro_batches(samples, args.micro_batch_tokens, device):
        batch = collate(micro_batch, device)
        logprobs, _ = compute_logprobs(model, batch, args)
        sums["nll"] -= (logprobs * batch.response_mask).sum()
    totals = all_reduce_sums(sums, device)
    loss = totals["nll"] / totals["tokens"]
    return {"loss": loss, "perplexity": math.exp(min(loss, 50.0))}


# -- the run ----------------------------------------------------------------------------------------------------------


# Differs from algos/grpo.py: batches come from the data, not from the engine.
def main(args: Args) -> None:
    # ==== Set-up ====
    device = get_device()
    resolve_args(args, device)
    data.check_files(args.train_files + args.test_files, columns=())
    rank, world_size = launch.init_distributed(device, timeout_s=args.watchdog_s)
    folder = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    load_sft = partial(
        data.load_sft,
        tokenizer=tokenizer,
        max_length=args.max_length,
        chat_template_kwargs=parse_template_kwargs(args.chat_template_kwargs),
    )
    train_data = load_sft(args.train_files)
    test_data = load_sft(args.test_files) if args.test_files else None
    sampler = data.BatchSampler(len(train_data), args.batch_size, seed=args.seed, rank=rank, world_size=world_size)
    if args.steps is None:
        args.steps = max(1, args.num_epochs * len(train_data) // args.batch_size)

    run_dir, checkpoint = find_run(
        resume=args.resume, resume_from=args.resume_from, run_dir=args.run_dir, script=__file__
    )
    tracker = Tracker(
        args,
        script=__file__,
        rank=rank,
        total_steps=args.steps,
        columns=COLUMNS,
        run_dir=run_dir,
        resume=args.resume or checkpoint is not None,
        wandb_project=args.wandb_project,
    )
    checkpointer = Checkpointer(tracker.run_dir / "checkpoints", keep=args.keep_checkpoints)
    phases = Phases(device, watchdog_s=args.watchdog_s)
    tracker.note(
        f"{args.model} on {world_size} x {device.name}, {args.dtype}; {len(train_data):,} examples to train on"
    )

    with phases("setup"):
        device.seed(args.seed)
        model = shard_model(folder, args, device, trainable=True)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=args.adam_betas, weight_decay=args.weight_decay, fused=True
        )
        modules = {"policy": (model, optimizer)}
        step, bad_updates = 0, 0
        if checkpoint:
            state, rank_state = checkpointer.load(checkpoint, modules=modules)
            step, bad_updates = state["step"], state["bad_updates"]
            sampler.load_state_dict(state["sampler"])
            if rank_state:
                device.set_rng_state(rank_state["rng"])
        if args.resume or checkpoint:
            tracker.resume(step)

    while step < args.steps:
        step += 1
        start = time.perf_counter()
        phases.reset()
        samples = [Sample(**vars(train_data[row])) for row in sampler.next_batch()]
        counts = all_reduce_sums({"tokens": sum(sum(s.loss_mask) for s in samples)}, device)

        # ==== 5. Update ====
        sums: dict[str, torch.Tensor | float] = {}
        with phases("update"):
            micro_batches = make_micro_batches(samples, args.micro_batch_tokens, device)
            for i, micro_batch in enumerate(micro_batches):
                if args.delay_gradient_reduction:
                    model.set_requires_gradient_sync(i == len(micro_batches) - 1)
                batch = collate(micro_batch, device)
                new_logprobs, entropy = compute_logprobs(model, batch, args)
                loss, metrics = compute_loss(
                    new_logprobs=new_logprobs, response_mask=batch.response_mask, num_tokens=counts["tokens"]
                )
                (loss * world_size).backward()  # FSDP averages gradients over ranks, the loss is a sum
                for name, value in (metrics | {"entropy": (entropy * batch.response_mask).sum()}).items():
                    sums[name] = sums.get(name, 0.0) + value

            for group in optimizer.param_groups:
                group["lr"] = args.lr * lr_factor(
                    step - 1, warmup=args.warmup_steps, total=args.steps, decay=args.lr_decay
                )
            grad_norm = clip_gradients(model, args.max_grad_norm)
            bad_updates = apply_update(optimizer, grad_norm, bad_updates, step, args, tracker)

        # ==== 7. Log, evaluate, save ====
        totals = all_reduce_sums(sums | {"all_tokens": sum(s.num_tokens for s in samples)}, device)
        metrics = {"loss": totals["nll"] / counts["tokens"], "entropy": totals["entropy"] / counts["tokens"]}
        metrics |= {"grad_norm": grad_norm, "lr": optimizer.param_groups[0]["lr"], "bad_updates": bad_updates}
        metrics["time/step"] = time.perf_counter() - start
        metrics["perf/tokens_per_s"] = totals["all_tokens"] / metrics["time/step"]
        metrics["perf/peak_memory_gib"] = device.peak_memory() / GIB
        tracker.log(step, metrics)

        last, stop, last_eval = step == args.steps, launch.stop_requested(device), None
        if test_data and args.eval_every and (last or step % args.eval_every == 0):
            with phases("evaluate"):
                last_eval = evaluate(model, test_data, args, device)
            tracker.log_eval(step, {f"eval/{name}": value for name, value in last_eval.items()})
        if stop or (args.save_every and (last or step % args.save_every == 0)):
            with phases("save"):
                checkpointer.save(
                    step,
                    modules=modules,
                    extra={"step": step, "bad_updates": bad_updates, "sampler": sampler.state_dict()},
                    rank_state={"rng": device.rng_state()},
                    score=-last_eval["loss"] if last_eval else None,
                )
        if stop and not last:
            checkpointer.wait()
            tracker.note(f"stopped after step {step}; go on with --resume-from {tracker.run_dir}")
            break

    # ==== The end ====
    checkpointer.wait()
    if args.export and step == args.steps:
        export_hf(model, tokenizer, tracker.run_dir / "hf", dtype=DTYPES[args.export_dtype], source=folder)
    curve = tracker.plot({"loss": ["loss", "eval/loss"]})
    tracker.summary({"steps": step, "run folder": tracker.run_dir, "learning curve": curve})
    tracker.finish()


if __name__ == "__main__":
    launch.launch(main, Args)
